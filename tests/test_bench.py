"""`tokenmill bench`: verdicts that noise cannot win, contenders in fresh processes, figures that add up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest

from tests.conftest import make_texts, write_jsonl
from tests.running import command, sentence, tokenmill
from tests.tiny_tokenizers import byte_fallback_config, byte_level_config
from tokenmill.bench.documents import Source, Workplace, read_documents
from tokenmill.bench.figures import Figure, differ, judge
from tokenmill.bench.loaders import Wanted, bench_loaders
from tokenmill.bench.measuring import Contender, Effort, Failure, ask, stopwatch, take_turns, watch
from tokenmill.bench.plots import check_plot, save_plot
from tokenmill.bench.reporting import Machine, Report, Row, print_report
from tokenmill.bench.strategies import bench_strategies, count_differing
from tokenmill.bench.tables import ENGINES, LOADERS, STRATEGIES, WORKERS
from tokenmill.bench.workers import bench_workers, worker_counts
from tokenmill.engines import create, load_tokenizer
from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError

LONG_SECONDS = 280


def figures(**runs: list[float]) -> dict[str, Figure]:
    return {name: Figure.of(values) for name, values in runs.items()}


def test_a_difference_inside_the_spread_is_no_win() -> None:
    assert judge(figures(a=[10.0, 14.0, 12.0], b=[9.0, 11.0, 13.0])) == ["a and b cannot be told apart"]


def test_ranges_that_only_just_miss_each_other_are_no_win() -> None:
    wide, close = Figure.of([10.0, 12.0, 13.0]), Figure.of([13.1, 14.0, 16.0])
    assert wide.high < close.low and not differ(wide, close)


def test_a_difference_of_one_percent_is_no_win_however_steady() -> None:
    assert not differ(Figure.of([100.0] * 3), Figure.of([101.0] * 3))
    assert differ(Figure.of([100.0] * 3), Figure.of([103.0] * 3))


def test_a_verdict_has_ratios_of_medians_and_names_who_cannot_be_told_apart() -> None:
    found = judge(figures(c=[9.9, 10.0, 10.2], a=[18.0, 18.2, 18.1], d=[10.1, 9.8, 10.0]))
    assert found == ["a is 1.8x c", "c and d cannot be told apart"]


def test_nobody_wins_who_was_measured_once() -> None:
    assert judge(figures(a=[1.0], b=[9.0])) == ["measured once, so nobody is called faster; pass --repeat 3 or more"]


def test_noise_alone_hardly_ever_makes_a_winner() -> None:
    draws = np.random.default_rng(0).normal(1, 0.05, (4000, 2, 3))
    wins = sum(differ(Figure.of(a.tolist()), Figure.of(b.tolist())) for a, b in draws)
    assert 0 < wins / len(draws) < 0.06


# Contenders of the tests below; they run in fresh processes.


def answer(value: int) -> dict[str, Any]:
    return {"value": value, "pid": os.getpid()}


def append(path: str, letter: str) -> dict[str, Any]:
    with Path(path).open("a") as file:
        file.write(letter)
    return {}


def refuse() -> dict[str, Any]:
    raise UsageError("this cannot work")


def crash() -> dict[str, Any]:
    raise ValueError("out of luck")


def die() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hold(size: int) -> dict[str, Any]:
    data = np.ones(size, np.uint8)
    time.sleep(0.3)
    return {"size": int(data.sum())}


def hold_in_a_child(size: int) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        hold(size)
        os._exit(0)
    os.waitpid(child, 0)
    return {}


def leave_a_child() -> dict[str, Any]:
    return {"pid": subprocess.Popen(["sleep", "60"]).pid}


def burn(seconds: float) -> dict[str, Any]:
    with stopwatch() as taken:
        child = os.fork()
        started = time.process_time()
        while time.process_time() - started < seconds:
            pass
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return {"cpu_seconds": taken.cpu_seconds}


def contender(function: Any, name: str = "a", **settings: Any) -> Contender:
    return Contender(name, f"tests.test_bench:{function.__name__}", settings)


def test_every_run_has_a_process_of_its_own() -> None:
    found = [ask(contender(answer, value=7)) for _ in range(2)]
    assert [one["value"] for one in found] == [7, 7]
    assert len({found[0]["pid"], found[1]["pid"], os.getpid()}) == 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [(refuse, "this cannot work"), (crash, "ValueError: out of luck"), (die, "was ended by SIGKILL")],
)
def test_a_contender_that_fails_says_why(function: Any, reason: str) -> None:
    with pytest.raises(Failure, match=reason):
        ask(contender(function))


def test_contenders_take_turns_and_one_that_fails_takes_no_further_part(tmp_path: Path) -> None:
    path = str(tmp_path / "order")
    several = [contender(append, name, path=path, letter=name) for name in "ab"]
    told: list[str] = []
    turns = take_turns([*several, contender(crash, "c")], Effort(repeat=3, tell=told.append))
    assert Path(path).read_text() == "ababab"
    assert turns.answers == {"a": [{}, {}, {}], "b": [{}, {}, {}]}
    assert turns.failures == {"c": "ValueError: out of luck"}
    assert told[:4] == ["turn 1 of 3: a", "turn 1 of 3: b", "turn 1 of 3: c", "turn 2 of 3: a"]


def test_peak_memory_is_that_of_the_whole_process_tree() -> None:
    size = 300_000_000
    _, nothing = watch(contender(hold, size=1))
    for function in (hold, hold_in_a_child):
        _, peak = watch(contender(function, size=size))
        assert 0.8 * size < peak - nothing < 1.3 * size


def test_a_contender_that_takes_too_much_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.bench.measuring.available_memory", lambda: 100_000_000)
    with pytest.raises(Failure, match="was stopped when it held"):
        watch(contender(hold, size=300_000_000))


def test_nothing_that_a_contender_started_is_left_behind() -> None:
    pid = ask(contender(leave_a_child))["pid"]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_while_a_contender_is_started_does_not_leave_it_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:
        raise Failure("stopped")

    previous = signal.signal(signal.SIGTERM, stop)
    monkeypatch.setattr("tokenmill.bench.measuring.subprocess.Popen", Interrupted)
    try:
        with pytest.raises(Failure, match="stopped"):
            ask(contender(hold, size=1))
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_processors_are_counted_for_children_too() -> None:
    assert 0.55 < ask(contender(burn, seconds=0.3))["cpu_seconds"] < 0.75


def test_documents_come_from_all_files_in_proportion(tmp_path: Path, tiny_tokenizer: Path) -> None:
    for name, count in (("a", 300), ("b", 100)):
        write_jsonl(
            tmp_path / "in" / f"{name}.jsonl", [f"{name} {number:04d} and some words" for number in range(count)]
        )
    (tmp_path / "work").mkdir()
    place = Workplace(tmp_path / "work", Source([str(tmp_path / "in")], str(tiny_tokenizer)))
    corpus = place.collect(4000, 1.0)
    texts = list(read_documents(corpus.path))
    assert not corpus.is_whole
    assert corpus.num_documents == len(texts) and corpus.num_bytes == sum(map(len, texts))
    assert 4000 <= corpus.num_bytes < 4100
    assert 2.5 < sum(text[0] == "a" for text in texts) / sum(text[0] == "b" for text in texts) < 3.5
    everything = place.collect(10**6, 1.0)
    assert everything.is_whole and everything.num_documents == 400


def differing_by_offsets(folder: Path, texts: list[str]) -> int:
    """The same question asked of Hugging Face's own offsets."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = library.encode("\n".join(texts), add_special_tokens=False)
    count = first = 0
    for text in texts:
        last = first + len(text)
        inside = [i for i, (a, b) in zip(whole.ids, whole.offsets, strict=True) if a < last and b > first]
        count += inside != library.encode(text, add_special_tokens=False).ids
        first = last + 1
    return count


@pytest.fixture(scope="module")
def merging_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has tokens for several line ends and spaces."""
    folder = tmp_path_factory.mktemp("merging")
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_config()))
    return folder


def test_joining_documents_changes_ids_where_white_space_meets(merging_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(str(merging_tokenizer))
    engine = create("huggingface", tokenizer)
    clean = ["the mill", "grinds every token", "größer 水車"]
    assert count_differing(tokenizer, engine, clean) == 0
    # GPT-2's pattern splits off the last line end before a word: only a text that begins with white space is changed.
    texts = ["\n" * (number % 3) + text for number, text in enumerate(make_texts(60, seed=3)) if text]
    assert 0 < count_differing(tokenizer, engine, texts) == differing_by_offsets(merging_tokenizer, texts) < len(texts)


def test_joining_documents_changes_all_but_the_first_where_texts_get_a_space_in_front(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_fallback_config()))
    tokenizer = load_tokenizer(str(tmp_path))
    texts = ["the mill", "grinds every token", "of a text"]
    assert count_differing(tokenizer, create("huggingface", tokenizer), texts) == 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("bench") / "a.jsonl", make_texts(120, seed=4))


@pytest.mark.timeout(LONG_SECONDS)
def test_strategies_measure_everybody_on_the_same_documents(corpus: Path, merging_tokenizer: Path) -> None:
    report = bench_strategies(Source([str(corpus)], str(merging_tokenizer)), Effort(max_bytes=10_000, repeat=1))
    assert report.left_out == {}
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [
        *("one by one", "streaming", "batches of 200", "batches of 1,000", "one huge string", "all at once"),
        *("process pool", "tokenmill"),
    ]
    size = report.input["num_bytes"]
    assert 10_000 <= size < 12_000
    tokens = {row.facts["num_tokens"] for name, row in rows.items() if name != "one huge string"}
    assert len(tokens) == 1
    for row in rows.values():
        seconds, speed = row.figures["seconds"], row.figures["mb_per_second"]
        assert len(seconds.runs) == 1
        assert speed.runs == pytest.approx([size * row.facts["copies"] / taken / 1e6 for taken in seconds.runs])
        assert row.facts["peak_memory_bytes"] > 10_000_000
    assert 0 < rows["one huge string"].facts["num_differing_documents"] <= report.input["num_documents"]
    assert any("WRONG IDS" in note for note in report.notes)
    assert rows["batches of 1,000"].facts["memory_growth"] is None
    assert report.verdicts


@pytest.mark.timeout(LONG_SECONDS)
def test_engines_say_whether_their_ids_are_the_references(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    flags = ["--tokenizer", tiny_tokenizer, "--max-mb", "0.01", "--repeat", "1", "--json", "--plot", "e.svg"]
    arguments = command("bench", "engines", corpus, *flags)
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, timeout=LONG_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    parity = {row["name"]: row["parity"] for row in report["results"]}
    assert parity == {"gigatoken": "equal", "huggingface": "reference", "huggingface, all cores": "reference"}
    assert report["results"][0]["num_awkward"] > 1000
    assert set(report["left_out"]) == {"sentencepiece", "tiktoken", "bytes"}
    assert report["command"].startswith("tokenmill bench engines") and report["machine"]["cores"] >= 1
    assert {"tokenmill", "gigatoken", "tokenizers"} <= set(report["versions"])
    assert report["verdicts"] == ["measured once, so nobody is called faster; pass --repeat 3 or more"]
    assert ElementTree.parse(tmp_path / "e.svg").getroot().tag.endswith("svg")


@pytest.mark.timeout(LONG_SECONDS)
def test_workers_are_compared_with_one_worker_of_the_same_turn(corpus: Path) -> None:
    report = bench_workers(Source([str(corpus)], "bytes"), Effort(max_bytes=5000, repeat=1), max_workers=2)
    one, two = report.rows
    assert one.figures["speedup"].median == 1
    expected = one.figures["seconds"].median / two.figures["seconds"].median
    assert two.figures["speedup"].median == pytest.approx(expected)
    assert two.figures["efficiency"].median == pytest.approx(expected / 2)


def test_worker_counts_are_all_up_to_eight_and_then_double() -> None:
    assert worker_counts(3) == [1, 2, 3]
    assert worker_counts(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert worker_counts(48) == [1, 2, 4, 8, 16, 32, 48]
    assert worker_counts(64) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.timeout(LONG_SECONDS)
def test_loaders_are_measured_at_every_batch_size(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("tokenmill.bench.loaders.find_spec", lambda name: name != "jax" and real(name))
    report = bench_loaders(str(tiny_store), Wanted([2, 4], 32, 5, skip=["tf", "grain"]), Effort(repeat=1))
    names = ["np.memmap loop", "torch DataLoader", "DataLoader, 2 workers", "tokenmill numpy", "tokenmill torch"]
    for group in ("2 rows of 32 tokens", "4 rows of 32 tokens"):
        assert [row.name for row in report.rows if row.group == group] == names
    assert report.left_out == {
        "tokenmill jax": "not installed: pip install 'tokenmill[jax]'",
        "tokenmill tf": "--skip-tf",
        "tokenmill grain": "--skip-grain",
    }
    for row in report.rows:
        assert row.facts["num_batches"] == [5]
        batch_tokens = row.figures["tokens_per_second"].median / row.figures["batches_per_second"].median
        assert batch_tokens == pytest.approx(int(row.group[0]) * 32)


MISTAKES = [
    ("engines a.jsonl --tokenizer bytes --plot x.pdf", 2, "--plot x.pdf: a plot is a .png or .svg file"),
    ("engines a.jsonl --tokenizer bytes --plot no/x.png", 2, "--plot no/x.png: there is no directory no"),
    ("strategies b.jsonl --tokenizer bytes", 2, "input b.jsonl does not exist"),
    ("strategies a.jsonl --tokenizer ./nowhere", 2, "--tokenizer ./nowhere: no such file or directory"),
    ("workers a.jsonl --tokenizer broken", 1, "tokenizer.json cannot be loaded"),
    ("workers a.jsonl --tokenizer bytes --max-workers 0", 2, "--max-workers 0 must be at least 1"),
    ("engines a.jsonl --tokenizer bytes --repeat 0", 2, "--repeat 0 must be at least 1"),
    ("engines a.jsonl --tokenizer bytes --max-mb 0", 2, "--max-mb 0 must be above 0"),
    ("engines a.jsonl --tokenizer bytes --text-key body", 2, "say which field holds it with --text-key"),
    ("loaders nowhere", 1, "nowhere"),
    ("loaders store --batch-size 0", 2, "--batch-size 0 must be at least 1"),
    ("loaders store --seq-len 1000000", 2, "fewer than a batch of 64"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_in_a_sentence(
    arguments: str, code: int, message: str, tmp_path: Path, tiny_store: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    done = tokenmill("bench", *arguments.split(), cwd=tmp_path)
    assert message in sentence(done)
    assert done.returncode == code
    assert done.stdout == ""


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tokenmill.bench.plots.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"tokenmill\[plot\]"):
        check_plot(tmp_path / "x.png")


def make_report(benchmark: str) -> Report:
    """Large figures, long names: the widest that a table gets."""
    size = {"num_bytes": 12_345_678, "num_tokens": 10**9, "path": "data/tok", "tokenizer": "gpt2"}
    counts = {"num_documents": 10**6, "num_rejects": 3, "is_whole": False} if benchmark != "loaders" else {}
    report = Report(benchmark, {**size, **counts}, machine=Machine("A processor", 2, 10**10, "Linux", "3.11", 0.1))
    names = {
        "strategies": ["batches of 1,000", "one huge string", "tokenmill"],
        "engines": ["gigatoken", "huggingface, all cores"],
        "workers": ["1 worker", "2 workers", "64 workers"],
        "loaders": ["DataLoader, 2 workers", "tokenmill numpy"],
    }[benchmark]
    keys = ["mb_per_second", "documents_per_second", "tokens_per_second", "cpu_seconds_per_gb", "cpu_seconds"]
    keys += ["first_mb_per_second", "speedup", "efficiency", "batches_per_second", "first_seconds", "memory_bytes"]
    for number, name in enumerate(names):
        figure = Figure.of([1200.0 * 1.7**number, 1234.5 * 1.7**number, 1300.0 * 1.7**number])
        facts = {
            "peak_memory_bytes": 12_345_678_901,
            "memory_growth": 126.3,
            "parity": "reference",
            "workers": 2**number,
        }
        report.rows.append(Row(name, dict.fromkeys(keys, figure), facts, "8 rows" if benchmark == "loaders" else ""))
    return report


TABLES = {"strategies": STRATEGIES, "engines": ENGINES, "workers": WORKERS, "loaders": LOADERS}


@pytest.mark.parametrize("benchmark", TABLES)
def test_tables_fit_80_columns_with_every_name_whole(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(benchmark)
    print_report(report, TABLES[benchmark])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("command")) <= 80
    for row in report.rows:
        assert any(line.startswith(row.name) for line in lines)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("benchmark", TABLES)
def test_plots_are_png_and_svg(benchmark: str, tmp_path: Path) -> None:
    report = make_report(benchmark)
    save_plot(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    save_plot(report, tmp_path / "x.SVG")
    drawn = (tmp_path / "x.SVG").read_text()
    ElementTree.fromstring(drawn)
    assert all(row.name in drawn for row in report.rows) or benchmark == "workers"


def test_the_json_of_a_report_has_every_run() -> None:
    import msgspec

    found = json.loads(msgspec.json.encode(make_report("engines").to_json()))
    assert found["results"][0]["mb_per_second"] == {
        "median": 1234.5,
        "low": 1200,
        "high": 1300,
        "runs": [1200, 1234.5, 1300],
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_a_sentence_and_leaves_nothing_behind(
    number: signal.Signals, corpus: Path, tmp_path: Path
) -> None:
    arguments = command("bench", "workers", corpus, "--tokenizer", "bytes")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as process:
        started = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while not (children := started.children()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.read() == f"error: stopped by {number.name}; nothing is left behind\n"
        assert process.wait() == 128 + number
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_measure_is_an_error() -> None:
    from tokenmill.cli.measuring import _show

    report = make_report("engines")
    report.rows.clear()
    report.leave_out({"gigatoken": "was ended by SIGKILL"})
    with pytest.raises(TokenmillError, match="nothing could be measured: gigatoken: was ended by SIGKILL"):
        _show(report, ENGINES, None, as_json=False)
