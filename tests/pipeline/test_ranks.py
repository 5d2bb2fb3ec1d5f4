"""One run by many processes without a coordinator: shares, locks, kills, and who writes the manifest."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import tokenmill as tm
from tests.pipeline.test_resume import identities, journal_of, leftovers, make_texts
from tests.support.running import (
    Contradicting,
    ThreadExecutor,
    compress,
    jsonl,
    rejects_of,
    sentence,
    snapshot,
    start,
    tokenize_here,
    tokenmill,
    wait_for,
    write_parquet,
)
from tests.tools.test_status import make_attempt
from tokenmill.display import Silence
from tokenmill.files import create_durably
from tokenmill.pipeline.input_file import InputFile, Span
from tokenmill.pipeline.journal.finish import Incomplete, finish_store
from tokenmill.pipeline.journal.journal import GateRecord, Journal, SavedPlan
from tokenmill.pipeline.journal.mirror import Mirror
from tokenmill.pipeline.plan.ranks import Share, divide, find_share, join_ranks, membership
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import Outcome, run
from tokenmill.remote import split_url
from tokenmill.tools.report import report
from tokenmill.tools.status import Status, read_status
from tokenmill.tools.status_view import render_status
from tokenmill.tools.verify import verify

TASK_BYTES = 4000
FLAGS = ("--task-bytes", str(TASK_BYTES), "--workers", "1", "--on-error", "skip", "--val-fraction", "0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of tasks: ranges of bytes and of rows, groups of small files, and two streams of several tasks."""
    folder = tmp_path_factory.mktemp("ranks") / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(make_texts(150, 1)) + b"broken\n" + jsonl(make_texts(30, 2)))
    # Tasks that lie inside one huge document are left out.
    long = jsonl([*make_texts(200, 3), "long " * TASK_BYTES, *make_texts(200, 16)]) + b"broken\n"
    (folder / "b.jsonl.zst").write_bytes(compress(long, "zst"))
    (folder / "c.jsonl.gz").write_bytes(compress(jsonl(make_texts(150, 4)), "gz"))
    write_parquet(folder / "d.parquet", make_texts(200, 5), rows_per_group=10)
    for number in range(10):
        (folder / f"e{number}.txt").write_text("\n".join(make_texts(3, 6 + number)))
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> dict[str, bytes]:
    """The store that one undisturbed process makes."""
    out = corpus.parent / "undisturbed"
    tokenize_here(f"{corpus}/**", out, **here())
    return snapshot(out)


def here(**flags: Any) -> dict[str, Any]:
    known = {"tokenizer": "bytes", "task_bytes": TASK_BYTES, "workers": 1, "on_error": "skip", "val_fraction": 0.1}
    return {**known, **flags}


def run_rank(corpus: Path, out: Path, rank: int | str, world_size: int | None, **flags: Any) -> Outcome:
    """One rank without worker processes, for tests of the result of ranks and not of their execution."""
    asked = {
        "inputs": [f"{corpus}/**" if corpus.is_dir() else str(corpus)],
        "out": str(out),
        "rank": rank,
        "world_size": world_size,
        **here(**flags),
    }
    return run(Request.from_flags(asked), Silence(), ThreadExecutor())


def arguments(corpus: Path, out: Path, rank: int, world_size: int, tokenizer: str | Path = "bytes") -> list[str]:
    ranks = ["--rank", str(rank), "--world-size", str(world_size)]
    return ["tokenize", f"{corpus}/**", "-o", str(out), "--tokenizer", str(tokenizer), *FLAGS, *ranks]


def draw(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None, highlight=False)
    console.print(render_status(read_status(folder)))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.fixture
def halves(corpus: Path, tmp_path: Path) -> Path:
    """A store whose tasks are all done by two ranks that did not see each other, so that neither wrote the manifest."""
    for rank in (0, 1):
        assert run_rank(corpus, tmp_path / f"half{rank}", rank, 2).manifest is None
    shutil.copytree(tmp_path / "half1", tmp_path / "half0", dirs_exist_ok=True)
    return tmp_path / "half0"


# Shares.


def make_plan_of(sizes: list[int], streams: list[int]) -> Plan:
    inputs = [
        InputFile(
            path=f"/in/{number}", name=str(number), bytes=size, fingerprint="", mtime_ns=0, format="jsonl",
            compression="none" if number < len(sizes) else "zstd",
        )
        for number, size in enumerate([*sizes, *streams])
    ]  # fmt: skip
    tasks = [Task(input=n, number=0, spans=[Span(n)], bytes=size) for n, size in enumerate(sizes)]
    return Plan(inputs, tasks, [Stream(len(sizes) + n) for n in range(len(streams))])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=30), st.lists(st.integers(1, 10**6), max_size=8), st.integers(1, 12))
def test_shares_are_all_of_the_plan_and_none_is_much_larger(sizes: list[int], streams: list[int], world: int) -> None:
    plan = make_plan_of(sizes, streams)
    parts = divide(plan, world)
    assert sorted(task.name for part in parts for task in part.tasks) == [task.name for task in plan.tasks]
    assert sorted(stream.name for part in parts for stream in part.streams) == [stream.name for stream in plan.streams]
    works = [*sizes, *(4 * size for size in streams)]
    loads = [
        sum(task.bytes for task in part.tasks) + sum(4 * plan.inputs[stream.input].bytes for stream in part.streams)
        for part in parts
    ]
    # The rank that got the last task had the least before.
    assert max(loads) - min(loads) <= max(works, default=0) + len(works)
    assert world == 1 or [Share(rank, world).of(plan) for rank in range(world)] == parts


def test_the_largest_go_first_to_the_least_loaded_and_ties_by_number() -> None:
    parts = divide(make_plan_of([10, 50, 30, 30, 10], [5]), 2)
    # 50 to rank 0, 30 and 30 to rank 1, the stream counts for 20 and goes to rank 0, then 10 to rank 1 and 10 to rank 0.
    assert [[task.input for task in part.tasks] for part in parts] == [[1, 4], [2, 3, 0]]
    assert [[stream.name for stream in part.streams] for part in parts] == [["00005"], []]


def test_a_task_is_known_by_its_name_also_if_a_stream_was_cut_into_it() -> None:
    is_own = membership(make_plan_of([1, 2], [3]))
    assert [is_own(name) for name in ("00001-0000", "00002-0017", "00003-0000", "00001-0001")] == [
        True,
        True,
        False,
        False,
    ]


SLURM_ARRAY = {
    "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "1",
    "SLURM_PROCID": "0",
}  # fmt: skip
SLURM_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "expected"),
    [
        (None, None, {**SLURM_ARRAY, "JOB_COMPLETION_INDEX": "2"}, Share()),
        (3, 8, SLURM_ARRAY, Share(3, 8)),
        ("slurm", None, SLURM_ARRAY, Share(2, 4)),
        ("slurm", 8, SLURM_ARRAY, Share(5, 8)),
        ("slurm", 8, {"SLURM_ARRAY_TASK_ID": "5"}, Share(5, 8)),
        ("slurm", None, {**SLURM_ARRAY, "SLURM_ARRAY_TASK_STEP": "2"}, Share(1, 4)),
        ("slurm", None, SLURM_STEP, Share(1, 3)),
        ("slurm", None, {**SLURM_ARRAY, **SLURM_STEP}, Share(7, 12)),
        ("kubernetes", 8, {"JOB_COMPLETION_INDEX": "2"}, Share(2, 8)),
        ("kubernetes", None, {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}, Share(2, 4)),
    ],
)  # fmt: skip
def test_ranks_come_from_the_environment_only_when_asked(
    rank: int | str | None, world_size: int | None, environment: dict[str, str], expected: Share
) -> None:
    assert find_share(rank, world_size, environment) == expected


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "message"),
    [
        (None, 4, {}, "--world-size 4 says how many ranks there are; say which one this is with --rank"),
        (2, None, {}, "--rank 2 is one of several; say how many with --world-size"),
        (4, 4, {}, "--rank 4 must be below --world-size 4: ranks are counted from 0"),
        ("slurm", None, {}, "neither SLURM_ARRAY_TASK_ID nor a step of srun"),
        ("slurm", None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "start it with srun"),
        ("slurm", None, {**SLURM_ARRAY, "SLURM_ARRAY_TASK_ID": "9"}, "SLURM_ARRAY_TASK_ID 9 is in an array with gaps"),
        ("slurm", None, {**SLURM_ARRAY, "SLURM_ARRAY_TASK_ID": "x"}, "SLURM_ARRAY_TASK_ID is 'x' in the environment"),
        ("slurm", 4, SLURM_ARRAY, "SLURM_ARRAY_TASK_ID is 5 and --world-size 4; submit --array=0-3, or leave"),
        ("slurm", 2, SLURM_STEP | {"SLURM_PROCID": "2"}, "SLURM_PROCID is 2 and --world-size 2; start at most 2 tasks"),
        (
            "slurm",
            4,
            {**SLURM_ARRAY, **SLURM_STEP, "SLURM_NTASKS": "2"},
            "is 5, SLURM_PROCID is 1 and --world-size 4; submit --array=0-1",
        ),
        (
            "kubernetes",
            2,
            {"JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX is 2 and --world-size 2; set --world-size",
        ),
        (
            "kubernetes",
            None,
            {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "0"},
            "is 0 and JOB_COMPLETIONS 0; set JOB",
        ),
        ("kubernetes", 4, {}, "finds no JOB_COMPLETION_INDEX; the job needs completionMode: Indexed"),
        ("kubernetes", None, {"JOB_COMPLETION_INDEX": "1"}, "does not say of how many; pass --world-size"),
    ],
)
def test_an_invalid_rank_is_refused_with_what_to_do(
    rank: int | str | None, world_size: int | None, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(tm.UsageError, match=re.escape(message)):
        find_share(rank, world_size, environment)


# Real processes.


def end_all(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until all have ended; return their output."""
    said = []
    for process in processes:
        output, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        said.append(output)
    return said


def test_four_processes_at_once_make_the_store_that_one_makes(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = end_all([start(*arguments(corpus, out, rank, 4, tiny_tokenizer)) for rank in range(4)])
    tokenize_here(f"{corpus}/**", tmp_path / "plain", **here(tokenizer=str(tiny_tokenizer)))
    assert snapshot(out) == snapshot(tmp_path / "plain")
    manifest = tm.open(out).manifest
    assert manifest.engine.parity is not None and manifest.engine.parity.num_mismatches == 0
    assert any("Next: tokenmill inspect" in output for output in said)
    waiting = [output.splitlines()[0] for output in said if "The last rank to end" in output]
    for line in waiting:
        assert re.fullmatch(
            r"rank \d of 4: \d+ tasks? done; of all ranks, (no task|\d+ of (at least )?\d+ tasks)", line
        )
    attempts = json.loads((out / "run.json").read_bytes())["attempts"]
    assert sorted((attempt["rank"], attempt["world_size"]) for attempt in attempts) == [(rank, 4) for rank in range(4)]
    assert all(attempt["completed"] for attempt in attempts)
    shown = draw(out)
    assert "finished" in shown and "4 of 4 ranks" in shown
    assert verify(out, against=[f"{corpus}/**"]).is_sound
    assert report(tm.open(out), tmp_path / "report.html").num_documents == manifest.num_documents


def ranks_that_are(status: Status, *states: str) -> list[int]:
    return [rank.rank for rank in status.ranks if rank.state in states]


def test_a_rank_that_was_killed_is_named_and_started_again(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    victim = start(*arguments(corpus, out, 1, 3))
    wait_for(lambda: len(journal_of(out)) >= 3 or victim.poll() is not None)
    victim.kill()
    victim.communicate(timeout=30)
    done = journal_of(out)
    assert len(done) >= 3
    said = end_all([start(*arguments(corpus, out, rank, 3)) for rank in (0, 2)])
    assert all("The last rank to end writes the manifest" in output for output in said)
    assert not (out / "manifest.json").exists()
    published = identities(out, journal_of(out))

    status = read_status(out)
    assert status.state == "stopped" and ranks_that_are(status, "stopped", "not begun") == [1]
    assert "--rank RANK --world-size 3, for RANK in 1." in " ".join(draw(out).split())
    missing = tokenmill("finish", out)
    assert missing.returncode == 1
    assert re.search(
        r"tasks are done; run the same tokenize command with --world-size 3 and --rank 1$", sentence(missing)
    )
    assert missing.stdout.startswith("rank 1 of 3: ")
    assert "0 of 3" not in missing.stdout and "2 of 3" not in missing.stdout
    assert identities(out, journal_of(out)) == published

    again = tokenmill(*arguments(corpus, out, 1, 3))
    assert again.returncode == 0, again.stderr
    assert re.search(r"continuing: \d+ tasks are already done", again.stderr)
    now = identities(out)
    assert {name: now[name] for name in published} == published, "finishing wrote shards again"
    assert snapshot(out) == undisturbed


def let_work(ranks: list[subprocess.Popen[str]], out: Path, num_tasks: int) -> None:
    """Wait until they have done this many tasks, or one of them has nothing left to do."""
    wanted = len(journal_of(out)) + num_tasks
    wait_for(lambda: len(journal_of(out)) >= wanted or any(process.poll() is not None for process in ranks))


def test_eight_kills_at_random_and_changing_numbers_of_ranks_change_nothing(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    rng = random.Random(8)
    out = tmp_path / "out"
    kills = 0
    while kills < 8:
        world_size = rng.choice([2, 3])
        ranks = [start(*arguments(corpus, out, rank, world_size)) for rank in range(world_size)]
        let_work(ranks, out, rng.randint(0, 12))
        time.sleep(rng.uniform(0.0, 0.1))
        for process in ranks:
            if process.poll() is None:
                kills += 1
                process.kill() if rng.random() < 0.5 else os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate(timeout=30)
            assert "Traceback" not in errors
        if (out / "manifest.json").exists():
            assert finish_store(out).num_documents
            run_rank(corpus, out, 0, 2)
            assert snapshot(out) == undisturbed
            shutil.rmtree(out)
    for rank in (0, 1):
        run_rank(corpus, out, rank, 2)
    assert snapshot(out) == undisturbed


def test_several_that_finish_at_once_are_harmless(halves: Path, corpus: Path, undisturbed: dict[str, bytes]) -> None:
    before = identities(halves)
    commands = [["finish", str(halves)]] * 2 + [arguments(corpus, halves, rank, 2) for rank in (0, 1)]
    said = end_all([start(*command) for command in commands])
    assert all("Next: tokenmill inspect" in output for output in said)
    assert snapshot(halves) == undisturbed
    now = identities(halves)
    assert {name: now[name] for name in before} == before, "finishing wrote shards again"


def test_a_rank_is_asked_of_slurm_on_the_command_line(corpus: Path, tmp_path: Path) -> None:
    command = arguments(corpus, tmp_path / "out", 0, 2)[:-4]
    done = tokenmill(*command, "--rank", "slurm", env={**SLURM_ARRAY, "SLURM_ARRAY_TASK_COUNT": "90"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 2 of 90: ")
    refused = tokenmill(*command, "--rank", "1")
    assert refused.returncode == 2
    assert sentence(refused) == "--rank 1 is one of several; say how many with --world-size"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rank": "pbs"}, "--rank: Invalid enum value 'pbs'; expected slurm, kubernetes, or a number"),
        ({"rank": -1, "world_size": 2}, "--rank -1: expected a whole number from 0 on"),
        ({"rank": "-1", "world_size": 2}, "--rank -1: expected a whole number from 0 on"),
        ({"rank": 1, "world_size": 0}, "--world-size 0: expected a whole number from 1 on"),
        (
            {"rank": 1, "world_size": 2, "overwrite": True},
            "--overwrite would make every rank remove the work of the others",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(tm.UsageError, match=re.escape(message)):
        Request.from_flags({"inputs": ["a"], "out": "b", "tokenizer": "bytes", **flags})


def test_the_documented_kubernetes_job_makes_a_store(corpus: Path, tmp_path: Path) -> None:
    """Each pod's command, with the environment that an Indexed Job gives it, in a folder instead of the volume."""
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    job = yaml.safe_load(
        next(block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "batch/v1" in block)
    )
    assert job["spec"]["completionMode"] == "Indexed"
    # Kubernetes accepts pod failure policies and limits per index with this restart policy only.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    container = job["spec"]["template"]["spec"]["containers"][0]
    asked = [*container["command"][1:], *container["args"]]
    small = {
        "/data/corpus": f"{corpus}/**",
        "/data/tok": tmp_path / "tok",
        "/data/tokenizer": "bytes",
        "8": "1",
        "14GB": "1GB",
    }
    words = [str(small.get(word, word)) for word in asked]
    pods = [
        start(*words, "--on-error", "skip", env={**os.environ, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["spec"]["completions"])
    ]
    end_all(pods)
    assert tm.open(tmp_path / "tok").num_documents


# One after another, in this process.


def test_the_number_of_ranks_may_change_on_the_way(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_rank(corpus, out, 3, 4)
    assert first.manifest is None and first.num_own > 0
    published = identities(out, journal_of(out))
    assert run_rank(corpus, out, 1, 2).manifest is None
    last = run_rank(corpus, out, 0, 2)
    assert last.manifest is not None
    now = identities(out)
    assert {name: now[name] for name in published} == published
    assert snapshot(out) == undisturbed
    sizes = [attempt["world_size"] for attempt in json.loads((out / "run.json").read_bytes())["attempts"]]
    assert sizes == [4, 2, 2]


def test_a_plain_run_does_what_ranks_have_left(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    run_rank(corpus, tmp_path / "out", 0, 3)
    tokenize_here(f"{corpus}/**", tmp_path / "out", **here())
    assert snapshot(tmp_path / "out") == undisturbed


def test_one_of_one_is_a_plain_run(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    assert run_rank(corpus, tmp_path / "out", 0, 1).manifest is not None
    assert snapshot(tmp_path / "out") == undisturbed


def test_a_rank_without_a_share_says_so(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(60, 9)))
    flags = {"task_bytes": "5kB"}
    done = tokenmill(*arguments(path, out, 2, 3), "--task-bytes", "5kB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "rank 2 of 3 has no task in this run; of all ranks, 0 of 2 tasks\nThe last rank to end"
    )
    status = read_status(out)
    assert [rank.state for rank in status.ranks] == ["not begun", "not begun", "done"], "it leaves word of itself"
    with pytest.raises(Incomplete, match="with --world-size 3 and --rank N, for N in 0-1"):
        finish_store(out)
    assert run_rank(path, out, 0, 3, **flags).num_own == 1
    assert ranks_that_are(read_status(out), "done") == [0, 2]
    assert run_rank(path, out, 1, 3, **flags).manifest is not None
    whole = snapshot(out)
    # As after a kill right after the manifest.
    (out / ".rank-0-of-3.lock").touch()
    (out / ".rank-7-of-9.workers.lock").touch()
    assert run_rank(path, out, 2, 3, **flags).observer is None, "the store is finished"
    assert snapshot(out) == whole


def test_python_gets_the_store_from_the_last_rank_and_nothing_from_others(corpus: Path, tmp_path: Path) -> None:
    flags = here()
    assert tm.tokenize(f"{corpus}/**", tmp_path / "out", rank=0, world_size=2, **flags) is None
    with pytest.raises(tm.StoreError, match="is an unfinished run; run the same .* that tokenmill status .*out names"):
        tm.open(tmp_path / "out")
    # A string, as in os.environ.
    store = tm.tokenize(f"{corpus}/**", tmp_path / "out", rank="1", world_size=2, **flags)
    assert isinstance(store, tm.TokenStore)


class ContradictingThreads(Contradicting, ThreadExecutor):
    pass


def test_an_engine_that_every_gate_contradicts_is_the_reference_in_the_manifest(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(60, 9)))
    asked = {"inputs": [str(path)], "out": str(out), "world_size": 2, **here(tokenizer=str(tiny_tokenizer))}
    for rank in (0, 1):
        outcome = run(Request.from_flags({**asked, "rank": rank}), Silence(), ContradictingThreads())
    assert outcome.manifest is not None and outcome.manifest.engine.parity is not None
    assert outcome.manifest.engine.name == "huggingface"
    assert outcome.manifest.engine.parity.num_mismatches == 1


def test_finish_needs_no_inputs_and_copies_nothing(
    halves: Path, corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    plan = halves / ".tasks" / "plan.json"
    # As on a machine that does not see the inputs.
    plan.write_bytes(plan.read_bytes().replace(str(corpus).encode(), b"/nowhere"))
    before = identities(halves)
    assert finish_store(halves).num_documents
    now = identities(halves)
    assert {name: now[name] for name in before} == before
    assert snapshot(halves) == undisturbed
    assert finish_store(halves).num_documents, "a finished store is left alone"
    assert identities(halves) == now


def test_finish_names_what_is_missing_task_by_task(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(tm.StoreError, match="does not exist; make a store with"):
        finish_store(out)
    run_rank(corpus, out, 0, 2)
    removed = sorted(journal_of(out))[0]
    (out / ".tasks" / f"{removed}.json").unlink()
    done = tokenmill("finish", out)
    assert done.returncode == 1
    assert "run the same tokenize command with --world-size 2 and --rank N, for N in 0-1" in sentence(done)
    lines = done.stdout.splitlines()
    assert lines[0] == f"rank 0 of 2: 1 task not done: {removed}"
    assert any(re.fullmatch(r"rank 1 of 2: \d+ tasks not done: .*\d{5}-\d{4} to \d{5}-\d{4}.*", line) for line in lines)
    assert "rank 1 of 2: c.jsonl.gz not read to its end" in lines
    assert not (out / "manifest.json").exists()


@pytest.fixture
def for_others(corpus: Path) -> Iterator[Path]:
    """A folder that other users may read but not write, with a run of which one rank is done."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run_rank(corpus, out, 0, 2)
        Path(folder).chmod(0o755)
        out.chmod(0o555)
        yield out
        out.chmod(0o755)


def said_to_others(action: Callable[[], Any]) -> str:
    """Call a function without the rights of root, in a process of its own, and return its error."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()
        except tm.TokenmillError as error:
            os.write(sending, "\n".join([str(error), *getattr(error, "details", [])]).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_finish_lists_what_is_missing_in_a_read_only_directory(for_others: Path) -> None:
    before = snapshot(for_others)
    said = said_to_others(lambda: finish_store(for_others))
    assert f"{for_others} is not complete: " in said and "\nrank 1 of 2: " in said
    (for_others / ".tasks").chmod(0o700)
    said = said_to_others(lambda: finish_store(for_others))
    assert said.startswith(f"{for_others} cannot be read: Permission denied; ask its owner")
    for_others.chmod(0o700)
    for look in (finish_store, read_status):
        assert said_to_others(lambda look=look: look(for_others)).startswith(f"{for_others} cannot be read: Perm")  # type: ignore[misc]
    assert snapshot(for_others) == before


def test_a_complete_run_in_a_read_only_directory_is_reported(halves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.pipeline.journal.finish.os.access", lambda *_: False)
    with pytest.raises(tm.StoreError, match="has all of its tasks but is read-only here; run tokenmill finish"):
        finish_store(halves)


def test_a_file_is_no_store_to_finish(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for look in (finish_store, read_status):
        with pytest.raises(tm.StoreError, match="a is a file; expected the directory of a token store"):
            look(tmp_path / "a")


def test_leftovers_of_a_finish_killed_after_the_manifest_are_removed_by_the_next(
    halves: Path, undisturbed: dict[str, bytes]
) -> None:
    finish_store(halves)
    for name in (".turn.lock", ".rank-1-of-2.lock"):
        (halves / name).touch()
    with hold(halves, ".turn.lock"):
        finish_store(halves)
        assert (halves / ".turn.lock").exists(), "somebody has it"
    assert not (halves / ".rank-1-of-2.lock").exists()
    finish_store(halves)
    assert snapshot(halves) == undisturbed
    (halves / ".tasks").mkdir()
    (halves / ".tasks" / "gate.json").touch()
    finish_store(halves)
    assert snapshot(halves) == undisturbed


def test_finish_does_not_believe_entries_whose_shards_are_gone(
    halves: Path, corpus: Path, undisturbed: dict[str, bytes]
) -> None:
    shard = sorted((halves / "train").glob("*.bin"))[0]
    shard.unlink()
    with pytest.raises(Incomplete, match="is not complete: 28 of 29 tasks are done") as caught:
        finish_store(halves)
    (line,) = caught.value.details
    rank = int(re.fullmatch(rf"rank (\d) of 2: 1 task not done: {shard.name[6:16]}", line)[1])  # type: ignore[index]
    assert run_rank(corpus, halves, 1 - rank, 2).manifest is None
    assert run_rank(corpus, halves, rank, 2).manifest is not None
    assert snapshot(halves) == undisturbed


def test_too_many_rejects_of_all_ranks_are_too_many(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rank in (0, 1, 2):
        run_rank(corpus, out, rank, 4, max_errors=1)
    with pytest.raises(
        tm.TokenmillError, match="2 records of all ranks could not be tokenized, more than --max-errors 1"
    ):
        run_rank(corpus, out, 3, 4, max_errors=1)
    assert [rank.state for rank in read_status(out).ranks] == ["done", "done", "done", "stopped"]
    said = " ".join(draw(out).split())
    assert "It said: 2 records of all ranks could not be tokenized, more than --max-errors 1;" in said
    assert "All ranks have ended" not in said
    finished = tokenmill("finish", out)
    assert finished.returncode == 0, finished.stderr
    assert (
        "2 rejects.\nThe store leaves out the documents that could not be tokenized; they are listed in "
        in finished.stdout
    )
    assert len(rejects_of(out)) == 2


def test_ranks_may_have_copies_of_small_inputs_with_times_of_their_own(tmp_path: Path) -> None:
    """The whole content is known to be the same. Otherwise each rank would repeat the tasks of the others."""
    out = tmp_path / "out"
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.jsonl").write_bytes(jsonl(make_texts(120, 10)))
        (tmp_path / str(rank) / "b.jsonl.gz").write_bytes(compress(jsonl(make_texts(150, 11)), "gz"))
        for path in (tmp_path / str(rank)).iterdir():
            os.utime(path, (1_000_000_000 + rank, 1_000_000_000 + rank))
    assert run_rank(tmp_path / "0", out, 0, 2).manifest is None
    plan, published = (out / ".tasks" / "plan.json").read_bytes(), identities(out, journal_of(out))
    assert run_rank(tmp_path / "1", out, 0, 2).manifest is None, "the same rank, on the other machine"
    assert (out / ".tasks" / "plan.json").read_bytes() == plan
    assert run_rank(tmp_path / "1", out, 1, 2).manifest is not None
    now = identities(out)
    assert {name: now[name] for name in published} == published
    tokenize_here(tmp_path / "0", tmp_path / "plain", **here())
    assert snapshot(out) == snapshot(tmp_path / "plain")


def test_ranks_refuse_a_large_input_with_another_time(tmp_path: Path) -> None:
    """Its fingerprint covers a sample: only an equal modification time proves that the rest is unchanged."""
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(["x" * 999_000 + str(number) for number in range(9)]))
    run_rank(path, out, 0, 2, task_bytes="3MB")
    before = snapshot(out)
    os.utime(path)
    for rank in (0, 1):
        with pytest.raises(
            tm.StoreError, match=r"a\.jsonl has another modification time for rank .*\(rsync -a, cp -p\)"
        ):
            run_rank(path, out, rank, 2, task_bytes="3MB")
    assert snapshot(out) == before, "nothing of the other ranks' work was undone"
    tokenize_here(path, out, **here(task_bytes="3MB"))
    tokenize_here(path, tmp_path / "plain", **here(task_bytes="3MB"))
    assert snapshot(out) == snapshot(tmp_path / "plain"), "a run without ranks does it again"


def test_ranks_with_other_flags_or_inputs_are_refused(corpus: Path, tmp_path: Path) -> None:
    run_rank(corpus, tmp_path / "out", 0, 2)
    advice = f"Use another directory, or remove {tmp_path / 'out'} and start all ranks again"
    with pytest.raises(tm.StoreError, match=f"--seed 0; this run has 3. {re.escape(advice)}"):
        run_rank(corpus, tmp_path / "out", 1, 2, seed=3)
    with pytest.raises(tm.StoreError, match="14 inputs; this run has 1"):
        run_rank(corpus / "a.jsonl", tmp_path / "out", 1, 2)


def test_the_rest_of_a_store_that_was_being_overwritten_is_refused(corpus: Path, tmp_path: Path) -> None:
    run_rank(corpus, tmp_path / "out", 0, 2)
    (tmp_path / "out" / ".tasks" / "plan.json").unlink()
    with pytest.raises(tm.StoreError, match=r"being overwritten; remove it \(rm -r .*\), then start all ranks again"):
        run_rank(corpus, tmp_path / "out", 1, 2)


# Which processes may run at the same time.


def hold(folder: Path, name: str) -> Any:
    folder.mkdir(exist_ok=True)
    lock = (folder / name).open("w+b", buffering=0)
    lock.write(b"4242 elsewhere")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@pytest.mark.parametrize(
    ("held", "rank", "holder"),
    [
        (".lock", 1, "another run"),
        (".rank-1-of-2.lock", 1, "rank 1 of 2"),
        (".rank-0-of-3.lock", 1, "rank 0 of 3"),
        (".rank-0-of-2.lock", None, "rank 0 of 2"),
    ],
)
def test_a_run_and_ranks_a_rank_twice_and_ranks_of_other_numbers_exclude_each_other(
    held: str, rank: int | None, holder: str, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with hold(out, held):
        message = f"{out} is in use by {holder} (process 4242 on elsewhere); wait for it, or choose another directory"
        with pytest.raises(tm.StoreError, match=re.escape(message)):
            run_rank(corpus, out, rank, 2) if rank is not None else tokenize_here(f"{corpus}/**", out, **here())
        assert [path.name for path in out.iterdir()] == [held]


def test_ranks_of_one_number_do_not_exclude_each_other(corpus: Path, tmp_path: Path) -> None:
    with hold(tmp_path / "out", ".rank-0-of-2.lock"):
        assert run_rank(corpus, tmp_path / "out", 1, 2).num_own > 0


def test_a_rank_waits_for_the_workers_of_its_killed_predecessor(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".rank-1-of-2.workers.lock").open("w+b") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_SH)
        with ThreadPoolExecutor(1) as pool:
            rank = pool.submit(run_rank, corpus, out, 1, 2)
            time.sleep(0.5)
            assert not (out / ".tasks").exists(), "it did not wait"
            fcntl.flock(orphan, fcntl.LOCK_UN)
            assert rank.result(60).num_own > 0


def test_a_rank_removes_only_its_own_leftovers(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_rank(corpus, out, 0, 2)
    left: dict[int, list[Path]] = {}
    for rank in (0, 1):
        mark = f"rank-{rank}-of-2-0f1e2d3c"
        left[rank] = [
            out / "train" / f"shard-00000-0000.bin.{mark}.1f.tmp",
            out / ".tasks" / f"00000-0000.rejects.jsonl.{mark}.1f.tmp",
            out / ".tasks" / "spool" / mark / "slot-0",
        ]
        for path in left[rank]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
    theirs = Share(1, 2).of(Journal(out).saved_plan().plan).tasks[0]
    orphan = out / "train" / f"shard-{theirs.name}.bin"
    orphan.write_bytes(b"published by rank 1, which is about to enter it")
    (out / ".rank-2-of-3.lock").write_bytes(b"1")
    (out / "tokenizer" / "bytes.json.0f1e2d3c4b5a6978.tmp").write_bytes(b"half")
    run_rank(corpus, out, 0, 2)
    assert not any(path.exists() for path in left[0])
    assert all(path.exists() for path in left[1])
    assert orphan.exists()
    assert run_rank(corpus, out, 1, 2).manifest is not None
    assert snapshot(out) == undisturbed
    assert leftovers(out) == []


def test_without_locks_ranks_still_make_the_same_store_and_say_what_to_mind(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    said: list[str] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(Silence, "say", lambda self, text, style="": said.append(text))
    with ThreadPoolExecutor(4) as pool:
        # Each rank twice at the same time, as if a machine was wrongly assumed to be dead.
        runs = [pool.submit(_run_or_refuse, corpus, tmp_path / "out", rank) for rank in (0, 1, 0, 1)]
        assert [done.exception() for done in runs] == [None] * 4
    assert any("is on a file system without locks" in text for text in said)
    run_rank(corpus, tmp_path / "out", 0, 2)
    run_rank(corpus, tmp_path / "out", 1, 2)
    assert {
        name: data for name, data in snapshot(tmp_path / "out").items() if not name.endswith(".lock")
    } == undisturbed


def _run_or_refuse(corpus: Path, out: Path, rank: int) -> None:
    """A rank whose files another one may remove: it then ends with a sentence, and is started again."""
    with suppress(tm.TokenmillError):
        run_rank(corpus, out, rank, 2)


def test_of_many_that_create_a_file_one_succeeds_and_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    contents = [bytes([65 + number]) * 100_000 for number in range(8)]
    barrier = threading.Barrier(8)

    def create(content: bytes) -> bool:
        barrier.wait()
        return create_durably(path, content)

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, contents))
    assert sum(created) == 1
    assert path.read_bytes() == contents[created.index(True)]
    assert os.listdir(tmp_path) == ["plan.json"]


# Status of ranks.


def test_status_adds_ranks_up_and_says_which_to_start(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_rank(corpus, out, 0, 3)
    with hold(out, ".rank-2-of-3.lock"):
        status = read_status(out)
        assert status.state == "running"
        assert [rank.state for rank in status.ranks] == ["done", "not begun", "running"]
        shown = draw(out)
    assert re.search(r"ranks +3: 1 done, 1 not begun, 1 running", shown)
    assert "4242 on elsewhere" in shown
    assert "for RANK in 1." in " ".join(shown.split())
    assert 0 < status.last.fraction < 1  # type: ignore[union-attr]
    assert status.num_documents == sum(rank.last.num_documents for rank in status.ranks if rank.last)
    run_rank(corpus, out, 1, 3)
    assert "for RANK in 2." in " ".join(draw(out).split())
    run_rank(corpus, out, 2, 3)
    assert read_status(out).state == "finished"


def test_a_finished_store_has_all_tasks_whatever_ranks_have_made_them(tmp_path: Path) -> None:
    """One rank of two has begun; of four, those with work left have continued."""
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(400, 12)))
    run_rank(path, out, 0, 2)
    plan, done = Journal(out).saved_plan().plan, journal_of(out)
    idle = [rank for rank in range(4) if all(task.name in done for task in Share(rank, 4).of(plan).tasks)]
    assert idle
    for rank in set(range(4)) - set(idle):
        run_rank(path, out, rank, 4)
    assert re.search(rf"tasks +{len(plan.tasks)} done", draw(out))


def test_the_last_rank_says_which_figures_are_its_own(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(60, 9)))
    first = tokenmill(*arguments(path, out, 0, 2), "--task-bytes", "5kB")
    assert first.stdout.startswith("rank 0 of 2: 1 task done; of all ranks, 1 of 2 tasks\n")
    last = tokenmill(*arguments(path, out, 1, 2), "--task-bytes", "5kB")
    assert re.search(r"^train .* documents, 2 shards$", last.stdout, re.M)
    assert re.search(r"^val .* 1 shard$|^val .* 2 shards$", last.stdout, re.M)
    for name in ("time", "memory"):
        assert re.search(rf"^{name} .*, rank 1 of 2 alone$", last.stdout, re.M)
    again = tokenmill(*arguments(path, out, 1, 2), "--task-bytes", "5kB", "--dry-run")
    assert again.stdout.endswith("These are figures of the whole run on this machine, not of one rank.\n")


def test_status_of_a_run_whose_ranks_have_all_ended_says_how_to_finish_it(halves: Path) -> None:
    status = read_status(halves)
    assert status.state == "stopped" and [rank.state for rank in status.ranks] == ["done", "done"]
    assert f"All ranks have ended. Next: tokenmill finish {halves}" in draw(halves).replace("\n", " ").replace(
        "  ", " "
    )


def test_status_and_finish_name_many_ranks_as_sbatch_takes_them() -> None:
    assert join_ranks([6, 0, 1, 2, 9, 8]) == "0-2,6,8-9"
    assert join_ranks([3]) == "3"


@pytest.fixture
def shared_by_many(tmp_path: Path) -> Path:
    """A run of 3,000 tasks and some streams that 512 ranks have begun and none of which is done."""
    out = tmp_path / "many"
    out.mkdir()
    plan = make_plan_of([], [5] * 600)
    tasks = [Task(input=0, number=2 * n, spans=[Span(0)], bytes=10) for n in range(3000)]
    Journal(out).begin(SavedPlan({}, msgspec.structs.replace(plan, tasks=tasks)))
    attempt = msgspec.structs.replace(make_attempt(completed=False), rank=5, world_size=512)
    (out / ".tasks" / "progress-rank-5-of-512.json").write_bytes(msgspec.json.encode([attempt]))
    return out


def test_missing_tasks_of_many_ranks_are_listed_in_a_few_lines(shared_by_many: Path) -> None:
    with hold(shared_by_many, ".rank-7-of-512.lock"), pytest.raises(Incomplete) as caught:
        finish_store(shared_by_many)
    assert str(caught.value).endswith(
        "is not complete: 0 of at least 3,000 tasks are done; run the same tokenize command with --world-size 512 and "
        "--rank N, for N in 0-6,8-511"
    )
    details = caught.value.details
    assert len(details) <= 16 and re.fullmatch(r"and \d+ more ranks", details[-1])
    assert re.fullmatch(r"rank 0 of 512: \d tasks not done: (\d{5}-\d{4}, ){3}\d{5}-\d{4} and \d more", details[0])
    assert max(map(len, details)) < 120
    assert "for RANK in 0-511." in " ".join(draw(shared_by_many).split())


# What ranks read of each other, and what must be the same for all.


def test_only_the_last_rank_reads_what_others_have_entered(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of entries are enough to know that something is missing; there may be hundreds of thousands."""
    read: list[str] = []
    record = Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, name: (read.append(name), record(self, name))[1])
    for rank in (0, 1):
        outcome = run_rank(corpus, tmp_path / "out", rank, 3)
        assert outcome.manifest is None and outcome.completion is not None
        assert set(outcome.completion.done) == journal_of(tmp_path / "out")
        assert read == []
    assert run_rank(corpus, tmp_path / "out", 2, 3).manifest is not None
    assert read
    assert snapshot(tmp_path / "out") == undisturbed


def test_only_the_last_rank_fetches_what_others_have_entered_in_a_bucket(
    corpus: Path, s3: str, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls: list[int] = []
    pull = Mirror.pull
    monkeypatch.setattr(Mirror, "pull", lambda self, *_, **__: (pulls.append(rank), pull(self, *_, **__))[1])
    for rank in (0, 1, 2):
        asked = {
            "inputs": [f"{corpus}/**" if corpus.is_dir() else str(corpus)],
            "out": f"{s3}/tok",
            "rank": rank,
            "world_size": 3,
            **here(),
        }
        outcome = run(Request.from_flags(asked), Silence(), ThreadExecutor())
        assert (outcome.manifest is not None) == (rank == 2)
    assert pulls == [0, 1, 2, 2], "one at the start, and a second at the end of the last"
    bucket, prefix = split_url(f"{s3}/tok")
    assert bucket.read(f"{prefix}/manifest.json") == undisturbed["manifest.json"]


def test_ranks_in_a_bucket_need_the_same_engine_too(tmp_path: Path, s3: str, tiny_tokenizer: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(make_texts(120, 9)))
    asked = {"inputs": [str(path)], "out": f"{s3}/tok", "world_size": 2, **here(tokenizer=str(tiny_tokenizer))}
    run(Request.from_flags({**asked, "rank": 0}), Silence(), ThreadExecutor())
    with pytest.raises(tm.StoreError, match=rf"^{s3}/tok was begun with gigatoken .* remove {s3}/tok and start all"):
        run(Request.from_flags({**asked, "rank": 1, "engine": "huggingface"}), Silence(), ThreadExecutor())
    outcome = run(Request.from_flags({**asked, "rank": 1}), Silence(), ThreadExecutor())
    assert outcome.manifest is not None and outcome.manifest.engine.name == "gigatoken"


def test_ranks_with_another_engine_are_refused_with_both(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(120, 9)))
    flags = {"tokenizer": str(tiny_tokenizer)}
    run_rank(path, out, 0, 2, **flags, engine="huggingface")
    before = snapshot(out)
    refusal = r"out was begun with huggingface [\d.]+, and rank 1 of 2 has gigatoken [\d.]+; give all ranks the same"
    with pytest.raises(tm.StoreError, match=refusal):
        run_rank(path, out, 1, 2, **flags)
    assert snapshot(out).items() >= {n: d for n, d in before.items() if "progress" not in n}.items()
    manifest = run_rank(path, out, 1, 2, **flags, engine="huggingface").manifest
    assert manifest is not None and manifest.engine.name == "huggingface" and manifest.engine.parity is None


def test_ranks_with_another_version_are_refused_with_both(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_rank(corpus, out, 0, 2)
    gate = out / ".tasks" / "gate.json"
    record = msgspec.json.decode(gate.read_bytes(), type=GateRecord)
    gate.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, versions={"pyarrow": "0.1"})))
    with pytest.raises(tm.StoreError, match=r"was begun with pyarrow 0\.1, and rank 1 of 2 has pyarrow \d\d"):
        run_rank(corpus, out, 1, 2)
    assert read_status(out).ranks[1].reason is not None
    gate.write_bytes(b"{")
    assert run_rank(corpus, out, 1, 2).manifest is not None, "what cannot be read is written again"


def test_a_run_that_continues_with_another_engine_says_so_and_names_the_one_that_was_compared(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(make_texts(120, 9)))
    said: list[str] = []
    monkeypatch.setattr(Silence, "say", lambda self, text, style="": said.append(text))
    run_rank(path, out, 0, 2, tokenizer=str(tiny_tokenizer))
    store = tokenize_here(path, out, **here(tokenizer=str(tiny_tokenizer), engine="huggingface"))
    (note,) = [text for text in said if "tasks were made with" in text]
    assert re.fullmatch(r"\d tasks were made with gigatoken [\d.]+; the others are made with huggingface [\d.]+", note)
    assert store.manifest.engine.name == "gigatoken" and store.manifest.engine.parity is not None
