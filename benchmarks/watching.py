"""Measure the error of estimates, the cost of watching a run, and the cost of a report of a large store.

    python benchmarks/watching.py --save
    python benchmarks/watching.py --parts monitor --gb 0.3 --repeat 3

Estimates from 2% of each corpus are compared with whole runs. Watched and unwatched runs take turns, each with its own
terminal, and are timed from the first task to the last. The store of the report has `--tokens` tokens of generated
text.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import json
import os
import pty
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tokenmill.machine import tree_memory, usable_cores
from tokenmill.tools.bench.bench_report import MachineInfo
from tokenmill.tools.bench.measurement import Measurement, differ

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "data"
TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
CORPORA: dict[str, list[str]] = {
    "web_en": [],
    "multi": [],
    "code": [],
    "chat": ["--messages-key", "messages", "--prompt-key", "prompt", "--response-key", "response"],
}
SHARE = 0.02
BYTES_PER_TOKEN = 2.78
"""With GPT-2, of the text that `grow --mix all` generates."""
LOOK_SECONDS = 0.05
UP_SECONDS = 2.0
"""After this time a run has started its tasks, and a second terminal shows them."""


def main() -> None:
    arguments = parse()
    parts: dict[str, Callable[[argparse.Namespace, Path], list[str]]] = {
        "estimate": measure_estimates,
        "monitor": measure_watching,
        "report": measure_report,
    }
    command = " ".join(["python benchmarks/watching.py", *sys.argv[1:]])
    lines = ["# Watching: measured", "", f"{MachineInfo.here().line()}.", f"Command: `{command}`."]
    for part in arguments.parts:
        if part != "estimate" and not (arguments.data / "grow").exists():
            lines += ["", f"`{part}` was not measured: it needs text that `grow` makes, and `--data` has none."]
            continue
        with tempfile.TemporaryDirectory(prefix="tokenmill-bench-", dir=arguments.work) as folder:
            lines += ["", *parts[part](arguments, Path(folder))]
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.save:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "watching.md").write_text(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["estimate", "monitor", "report"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="what to measure")
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with corpora, tokenizers and grow")
    tokenizers = ["gpt2", "llama3", "qwen3", "spm_bpe32k", "bytebpe8k"]
    parser.add_argument("--tokenizers", nargs="+", default=tokenizers, help="for the estimates")
    parser.add_argument("--gb", type=float, default=3.0, help="of text for the runs that are watched")
    parser.add_argument("--repeat", type=int, default=7, help="turns of the runs that are watched")
    parser.add_argument("--tokens", type=parse_count, default="1G", help="of the store that a report is made of")
    parser.add_argument("--work", help="folder for corpora and stores; they are removed")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/watching.md")
    return parser.parse_args()


def parse_count(text: str) -> int:
    unit = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1], 1)
    return int(float(text.rstrip("kMG")) * unit)


def measure_estimates(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the error of every estimate, and whether the truth is in its interval."""
    lines = [
        f"## Estimates from {SHARE:.0%} of the text",
        "",
        "| corpus | tokenizer | tokens | estimated | error | in the interval | seconds | estimated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for corpus, flags in CORPORA.items():
        path = arguments.data / f"{corpus}.jsonl.zst"
        if not path.exists():
            continue
        for name in arguments.tokenizers:
            tokenizer = arguments.data / "tokenizers" / name
            if flags and not has_chat_template(tokenizer):
                continue
            row, error = compare_estimate(path, [*flags, "--tokenizer", str(tokenizer)], folder / "out")
            lines.append(f"| {corpus} | {name} | {row} |")
            errors.append(abs(error))
            progress(lines[-1])
    if errors:
        lines += ["", f"The largest error is {max(errors):.2%}; the limit is 5%."]
    missing = [name for name in CORPORA if not (arguments.data / f"{name}.jsonl.zst").exists()]
    if missing:
        lines += ["", f"Missing, and so not estimated: {', '.join(missing)}."]
    return lines


def has_chat_template(tokenizer: Path) -> bool:
    config = tokenizer / "tokenizer_config.json"
    return config.exists() and "chat_template" in json.loads(config.read_bytes())


def compare_estimate(path: Path, flags: list[str], out: Path) -> tuple[str, float]:
    command = [TOKENMILL, "estimate", str(path), *flags, "--sample", str(SHARE), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    started = time.perf_counter()
    subprocess.run(
        [TOKENMILL, "tokenize", str(path), *flags, "-o", str(out), "--quiet"], check=True, capture_output=True
    )
    seconds = time.perf_counter() - started
    truth = sum(split["num_tokens"] for split in json.loads((out / "manifest.json").read_bytes())["splits"].values())
    shutil.rmtree(out)
    low, high = found["intervals"]["tokens"]
    error = found["tokens"] / truth - 1
    workers = max(found["seconds"], key=int)
    fast, slow = found["intervals"]["seconds"][workers]
    cells = [
        f"{truth:,}",
        f"{found['tokens']:,}",
        f"{error:+.2%}",
        "yes" if low <= truth <= high else "NO",
        f"{seconds:.1f}",
        f"{found['seconds'][workers]:.1f} ({fast:.1f}-{slow:.1f})",
    ]
    return " | ".join(cells), error


def measure_watching(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Take turns: no display, a bar, --monitor, and each of them with a second terminal."""
    corpus = grow(arguments, folder, arguments.gb)
    tokenizer = str(arguments.data / "tokenizers" / "gpt2")
    command = [TOKENMILL, "tokenize", str(corpus), "-o", str(folder / "out"), "--tokenizer", tokenizer]
    ways: dict[str, tuple[list[str], bool]] = {
        "--quiet": (["--quiet"], False),
        "the usual bar": ([], False),
        "--monitor": (["--monitor"], False),
        "--monitor, and status --watch": (["--monitor"], True),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    run_watched([*command, "--quiet"], folder / "out", watched=False)
    for turn in range(arguments.repeat):
        # The order changes from turn to turn, because a run changes the state of the machine for the next one.
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            flags, watched = ways[name]
            run = run_watched([*command, *flags], folder / "out", watched=watched)
            runs[name].append(run)
            progress(
                f"turn {turn + 1} of {arguments.repeat}: {name}, {run.speed:.1f} MB/s, {run.share:.2%} of the cores"
            )
    return render_watching(arguments, runs)


class Run(NamedTuple):
    """The speed of a run, and the share of all cores that the watching processes took."""

    speed: float
    share: float


def render_watching(arguments: argparse.Namespace, runs: dict[str, list[Run]]) -> list[str]:
    quiet = [run.speed for run in runs["--quiet"]]
    unwatched = Measurement.of([run.share for run in runs["--quiet"]]).median
    lines = [
        "## What watching costs",
        "",
        f"{arguments.gb:g} GB of JSON lines (`grow --mix all`), GPT-2, default workers, {arguments.repeat} turns, "
        "each run with a terminal of 80 columns.",
        "MB/s of text from the first task to the last. Loss: to the `--quiet` run of the same turn, by the clock, "
        "which a noisy machine blurs.",
        "CPU: what the run's first process and the second terminal's take of all cores once they are up, and how much "
        "more that is than without a watcher. Workers keep every core busy, so they lose this much.",
        "",
        "| watched by | MB/s | spread | loss | spread | | CPU | more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, measured in runs.items():
        speeds = [run.speed for run in measured]
        figure, share = Measurement.of(speeds), Measurement.of([run.share for run in measured]).median
        losses = Measurement.of([1 - speed / other for speed, other in zip(speeds, quiet, strict=True)])
        verdict = "" if name == "--quiet" else judge(figure, Measurement.of(quiet))
        lines.append(
            f"| {name} | {figure.median:.1f} | {figure.low:.1f}-{figure.high:.1f} | {losses.median:.1%} | "
            f"{losses.low:.1%} to {losses.high:.1%} | {verdict} | {share:.2%} | {share - unwatched:.2%} |"
        )
    return lines


def judge(watched: Measurement, quiet: Measurement) -> str:
    if len(quiet.runs) < 2:
        return "measured once"
    if not differ(watched, quiet):
        return "cannot be told apart"
    return "slower" if watched.median < quiet.median else "faster"


def run_watched(command: list[str], out: Path, *, watched: bool) -> Run:
    """Run once; with `watched`, a second terminal shows `status --watch` all the time."""
    with ExitStack() as stack:
        process = stack.enter_context(in_terminal(command))
        watchers = [psutil.Process(process.pid)]
        if watched:
            wait_for(lambda: (out / ".tasks").exists() or process.poll() is not None)
            watcher = stack.enter_context(in_terminal([TOKENMILL, "status", str(out), "--watch"]))
            watchers.append(psutil.Process(watcher.pid))
        share = measure_share(watchers, process)
        if process.wait():
            sys.exit(f"{' '.join(command)} exited with code {process.returncode}")
    last: dict[str, Any] = json.loads((out / "run.json").read_bytes())["attempts"][-1]["last"]
    shutil.rmtree(out)
    return Run(last["num_text_bytes"] / last["seconds"] / 1e6, share)


def measure_share(watchers: list[psutil.Process], process: subprocess.Popen[bytes]) -> float:
    """Measure the share of all cores that some processes take, from their start until the run ends."""
    time.sleep(UP_SECONDS)
    seen: list[tuple[float, float]] = []
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            taken = sum(sum(watcher.cpu_times()[:2]) for watcher in watchers)
            seen.append((time.perf_counter(), taken))
        time.sleep(LOOK_SECONDS)
    (began, before), (ended, after) = seen[0], seen[-1]
    return (after - before) / (ended - began) / usable_cores()


@contextmanager
def in_terminal(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a pseudo-terminal, and read its output as fast as it writes."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    reader = threading.Thread(target=drain, args=(ours,), daemon=True)
    reader.start()
    try:
        yield process
    finally:
        process.wait()
        reader.join()
        os.close(ours)


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        # Reading a terminal after its last user has exited raises an error.
        return


def wait_for(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(LOOK_SECONDS)


def measure_report(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the time and peak memory of `report` on a store of `--tokens` tokens."""
    corpus = grow(arguments, folder, 1.03 * arguments.tokens * BYTES_PER_TOKEN / 1e9)
    store = folder / "store"
    tokenizer = str(arguments.data / "tokenizers" / "gpt2")
    making = ["--keep-keys", "source,id", "--val-fraction", "0.01", "--quiet"]
    subprocess.run(
        [TOKENMILL, "tokenize", str(corpus), "-o", str(store), "--tokenizer", tokenizer, *making], check=True
    )
    shutil.rmtree(corpus)
    manifest = json.loads((store / "manifest.json").read_bytes())
    num_tokens = sum(split["num_tokens"] for split in manifest["splits"].values())
    num_documents = sum(split["num_documents"] for split in manifest["splits"].values())
    lines = [
        "## A report of a large store",
        "",
        f"{num_tokens:,} tokens ({manifest['dtype']}) in {num_documents:,} documents. Memory is the proportional set "
        "size, with mapped pages of the store.",
        "",
        "| command | seconds | peak memory, MB | page, MB |",
        "|---|---|---|---|",
    ]
    for flags in ([], ["--verify"]):
        page = folder / "report.html"
        command = [TOKENMILL, "report", str(store), "-o", str(page), "--overwrite", *flags]
        seconds, peak = weigh(command)
        shown = " ".join(["report OUT -o report.html", *flags])
        lines.append(f"| `{shown}` | {seconds:.1f} | {peak / 1e6:.0f} | {page.stat().st_size / 1e6:.1f} |")
        progress(lines[-1])
    return lines


def weigh(command: list[str]) -> tuple[float, int]:
    """Run a command and return its seconds and peak memory."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        peak = max(peak, tree_memory(tree))
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with code {process.returncode}")
    return time.perf_counter() - started, peak


def grow(arguments: argparse.Namespace, folder: Path, gigabytes: float) -> Path:
    program = arguments.data / "grow"
    corpus = folder / "corpus"
    command = [
        sys.executable,
        str(program),
        "--gb",
        str(gigabytes),
        "--out",
        str(corpus),
        "--files",
        "8",
        "--mix",
        "all",
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return corpus


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
