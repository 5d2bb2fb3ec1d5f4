"""Runs on a cluster: the same bytes as on this machine, after any loss.

One test starts Ray. The others use a cluster in this process, which gets the same orders; `make test-ray` has the
proofs with several nodes.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.inline import InlineCluster, local_store, request_of, run_inline
from tests.conftest import make_texts, write_jsonl
from tests.support.running import Contradicting, jsonl, sentence, snapshot, tokenmill
from tokenmill.display import Preparation, Silence, Snapshot
from tokenmill.errors import DataError, MissingDependencyError, TokenmillError, UsageError
from tokenmill.executors import ray as ray_executor
from tokenmill.executors.base import Call, CallEvent, Lost
from tokenmill.executors.ray import RayExecutor
from tokenmill.pipeline.journal import locks
from tokenmill.pipeline.plan import budget
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.workers import attempt, scheduler, worker
from tokenmill.pipeline.workers.messages import (
    Failed,
    Finished,
    GateSample,
    RunStream,
    RunTask,
    decode_answer,
    decode_order,
)

ROOT = Path(__file__).resolve().parents[2]


def make_corpus(folder: Path) -> Path:
    """Every kind of task: ranges, row groups, a stream with a document larger than tasks, and small files together."""
    import zstandard

    texts = make_texts(900, seed=5)
    path = write_jsonl(folder / "a.jsonl", texts[:400], id=list(range(400)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:100], b"{broken\n", *lines[100:]]))
    streamed = [*texts[400:600], "long " * 8000, *texts[600:800]]
    data = jsonl(streamed) + b'{"id": 3}\n'
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    pq.write_table(pa.table({"text": texts[800:] * 3, "id": list(range(300))}), folder / "c.parquet", row_group_size=20)
    for number in range(3):
        (folder / f"d{number}.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[number * 5 : number * 5 + 5])))
    return folder


FLAGS = {"task_bytes": "12kB", "on_error": "skip", "keep_keys": ["id"], "workers": 8}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    "flags",
    [{"val_fraction": 0.2, "seed": 3}, {"limit": 700}, {"tokenizer": "tiny", "special_tokens": "parse", "eos": False}],
    ids=["val", "limit", "special"],
)
def test_a_cluster_makes_the_files_that_workers_make(
    corpus: Path, tmp_path: Path, tiny_tokenizer: Path, flags: dict[str, Any]
) -> None:
    if "tokenizer" in flags:
        flags = {**flags, "tokenizer": str(tiny_tokenizer)}
    request = request_of(corpus, tmp_path / "out", **FLAGS, **flags)
    cluster = InlineCluster()
    outcome = run_inline(request, cluster)
    assert snapshot(tmp_path / "out") == local_store(request, tmp_path / "local")
    assert outcome.manifest is not None
    assert outcome.manifest.rejects
    assert len([call for call in cluster.calls if call.name.startswith("00001 part")]) > 1


def test_the_parts_of_a_stream_share_its_tasks(corpus: Path, tmp_path: Path) -> None:
    """Only as many parts as save time: each part reads all of the stream."""
    cluster = InlineCluster()
    flags = {**FLAGS, "workers": 30, "task_bytes": "2kB", "keep_keys": []}
    run_inline(request_of(corpus / "b.jsonl.zst", tmp_path / "out", **flags), cluster)
    orders = [decode_order(call.payload) for call in cluster.calls[1:]]
    assert [(work.part, work.num_parts) for work in orders if isinstance(work, RunStream)] == [
        (part, scheduler.MOST_PARTS) for part in range(scheduler.MOST_PARTS)
    ]


def test_many_streams_are_read_once_each(tmp_path: Path) -> None:
    for number in range(4):
        data = gzip.compress(jsonl(make_texts(100, seed=number)))
        (tmp_path / f"{number}.jsonl.gz").write_bytes(data)
    cluster = InlineCluster()
    run_inline(request_of([f"{tmp_path}/*.gz"], tmp_path / "out", task_bytes="3kB", workers=4), cluster)
    assert sorted(call.name for call in cluster.calls[1:]) == [f"0000{number} part 0" for number in range(4)]


def test_the_gate_comes_first_then_the_largest_and_never_more_at_once_than_workers(tmp_path: Path) -> None:
    for number, size in enumerate((20, 200, 60)):
        write_jsonl(tmp_path / f"{number}.jsonl", ["word " * 50] * size)
    cluster = InlineCluster()
    run_inline(request_of([f"{tmp_path}/*.jsonl"], tmp_path / "out", task_bytes="54kB", workers=1), cluster)
    assert [call.name for call in cluster.calls] == ["the parity gate", "00001-0000", "00002-0000", "00000-0000"]
    assert cluster.most_in_flight == 1


class Watched(Silence):
    """A display that records messages and snapshots."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.lines: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self.lines.append(text)

    def update(self, snapshot: Snapshot | Preparation) -> None:
        if isinstance(snapshot, Snapshot):
            self.snapshots.append(snapshot)


def test_progress_comes_from_within_tasks_and_adds_up(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FAR_NOTE_SECONDS", 0.0)
    display = Watched()
    outcome = run_inline(request_of(corpus, tmp_path / "out", **FLAGS), InlineCluster(), display)
    last = display.snapshots[-1]
    assert outcome.manifest is not None
    assert (last.num_documents, last.num_tokens) == (outcome.manifest.num_documents, outcome.manifest.num_tokens)
    assert last.num_rejects == outcome.manifest.num_rejects
    done = [moment.done_bytes for moment in display.snapshots]
    assert done == sorted(done)
    assert done[-1] == last.total_bytes
    assert last.memory_bytes > 10_000_000
    assert last.num_tasks_done == len(list((tmp_path / "out/train").glob("*.bin")))


def test_an_error_in_a_task_is_the_sentence_that_a_worker_says(corpus: Path, tmp_path: Path) -> None:
    request = request_of(corpus / "a.jsonl", tmp_path / "out", **{**FLAGS, "on_error": "fail"})
    with pytest.raises(DataError) as on_cluster:
        run_inline(request, InlineCluster())
    with pytest.raises(DataError) as here:
        local_store(request, tmp_path / "local")
    assert str(on_cluster.value) == str(here.value)
    assert str(here.value).startswith(f"{corpus}/a.jsonl line 101: ")


def test_paths_in_errors_are_as_the_user_finds_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^corpus/a\.jsonl line 101: "):
        run_inline(request_of(Path("corpus/a.jsonl"), Path("out"), **{**FLAGS, "on_error": "fail"}), InlineCluster())


def test_more_rejects_than_allowed_end_the_run(corpus: Path, tmp_path: Path) -> None:
    request = request_of(corpus, tmp_path / "out", **FLAGS, max_errors=1)
    with pytest.raises(TokenmillError, match=r"2 records could not be tokenized, more than --max-errors 1"):
        run_inline(request, InlineCluster())


class ContradictingCluster(Contradicting, InlineCluster):
    pass


def test_a_difference_falls_back_to_the_reference(corpus: Path, tmp_path: Path, tiny_tokenizer: Path) -> None:
    display = Watched()
    request = request_of(corpus, tmp_path / "out", **FLAGS, tokenizer=str(tiny_tokenizer))
    outcome = run_inline(request, ContradictingCluster(), display)
    assert any("gigatoken differs from huggingface on 1 of" in line for line in display.lines)
    assert outcome.manifest is not None
    assert outcome.manifest.engine.name == "huggingface"
    shards = [name for name in snapshot(tmp_path / "out") if name.endswith(".bin")]
    local_store(request, tmp_path / "local")
    for name in shards:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_a_task_that_is_lost_too_often_is_named_and_the_same_command_continues(corpus: Path, tmp_path: Path) -> None:
    request = request_of(corpus, tmp_path / "out", **FLAGS)
    with pytest.raises(TokenmillError) as error:
        run_inline(request, InlineCluster(losses={"00002-0002": 1}))
    assert str(error.value) == (
        f"task 00002-0002 of c.parquet was lost with process {os.getpid()} on here, the last of 1 attempt; give it more "
        "and run the same command again to continue"
    )
    cluster = InlineCluster()
    run_inline(request, cluster)
    assert len(cluster.calls) < 20
    assert snapshot(tmp_path / "out") == local_store(request, tmp_path / "local")


def test_a_stream_that_makes_progress_between_losses_is_resumed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FAR_NOTE_SECONDS", 0.0)
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    display = Watched()
    request = request_of(corpus, tmp_path / "out", **{**FLAGS, "workers": 1})
    cluster = InlineCluster(losses={"00001 part 0": 3})
    run_inline(request, cluster, display)
    assert sum("resuming after its last finished task" in line for line in display.lines) == 3
    assert not list((tmp_path / "temp").iterdir())
    assert snapshot(tmp_path / "out") == local_store(request, tmp_path / "local")


class Losing(InlineCluster):
    """Loses every call except the gate before it has done anything."""

    def wait(self, timeout: float) -> list[CallEvent]:
        if self.calls[-1].name == "the parity gate":
            return super().wait(timeout)
        return [Lost(self.calls[-1], "was lost", "look around")]


def test_a_stream_that_makes_no_progress_is_named(corpus: Path, tmp_path: Path) -> None:
    request = request_of(corpus / "b.jsonl.zst", tmp_path / "out", **{**FLAGS, "workers": 1, "keep_keys": []})
    with pytest.raises(TokenmillError, match=r"^reading b\.jsonl\.zst was lost; look around and run the same command"):
        run_inline(request, Losing())


class Deserting(InlineCluster):
    """Ends the run as a killed driver would: without withdrawing its orders."""

    def wait(self, timeout: float) -> list[CallEvent]:
        if len(self.calls) > 8:
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_calls_of_a_killed_run_publish_nothing_into_the_next(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SEEN_SECONDS", 0.0)
    request = request_of(corpus, tmp_path / "out", **{**FLAGS, "workers": 4})
    deserted = Deserting()
    with pytest.raises(KeyboardInterrupt):
        run_inline(request, deserted)
    orphans = [call for call in deserted.calls if call.name != "the parity gate"]
    assert orphans
    run_inline(request, InlineCluster())
    finished = snapshot(tmp_path / "out")
    assert finished == local_store(request, tmp_path / "local")
    for call in orphans:
        message = answer(call)
        assert isinstance(message, Failed)
        assert "does not see" in str(message.arguments[0])
    assert snapshot(tmp_path / "out") == finished


def answer(call: Call) -> GateSample | Finished | Failed:
    return decode_answer(worker.run_call(lambda _: None, call.context, call.payload))


def begin(corpus: Path, out: Path) -> list[Call]:
    """The calls for tasks of a run that has just begun."""
    cluster = Deserting()
    with pytest.raises(KeyboardInterrupt):
        run_inline(request_of(corpus, out, **FLAGS), cluster)
    return [call for call in cluster.calls if isinstance(decode_order(call.payload), RunTask)]


def test_a_call_looks_who_has_the_store_before_it_publishes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = begin(corpus, tmp_path / "out")[-1]
    own = worker._find_worker(call.context)
    tokenize = own._tokenize

    def tokenize_while_another_begins(task: Any) -> Any:
        output = tokenize(task)
        locks.claim(own.place, "another")
        return output

    before = snapshot(tmp_path / "out")
    monkeypatch.setattr(own, "_tokenize", tokenize_while_another_begins)
    message = answer(call)
    assert isinstance(message, Failed)
    assert "taken over by another run" in str(message.arguments[0])
    assert snapshot(tmp_path / "out").keys() - before.keys() <= {".workers.lock"}
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_machine_that_does_not_see_the_store_says_so(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SEEN_SECONDS", 0.0)
    call = begin(corpus, tmp_path / "out")[0]
    job = msgspec.msgpack.decode(call.context, type=Job)
    context = msgspec.msgpack.encode(msgspec.structs.replace(job, store=str(tmp_path / "elsewhere")))
    message = answer(replace(call, context=context))
    assert isinstance(message, Failed)
    assert "must be on storage that all machines of the cluster share" in str(message.arguments[0])
    assert not (tmp_path / "elsewhere").exists()


def test_a_machine_that_does_not_see_an_input_says_so(corpus: Path, tmp_path: Path) -> None:
    call = begin(corpus, tmp_path / "out")[0]
    (corpus / "a.jsonl").rename(tmp_path / "moved.jsonl")
    (corpus / "c.parquet").rename(tmp_path / "moved.parquet")
    message = answer(call)
    assert isinstance(message, Failed)
    assert "is not there on" in str(message.to_error())


def test_a_machine_with_another_version_says_so(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = begin(corpus, tmp_path / "out")[0]
    monkeypatch.setattr(worker._here, "worker", None)
    monkeypatch.setattr(worker, "package_version", lambda name: "0.0.7" if name == "pyarrow" else "1")
    message = answer(call)
    assert isinstance(message, Failed)
    assert "install the same version on all machines of the cluster" in str(message.arguments[0])


def test_a_run_waits_for_room_in_a_cluster_says_so_and_gives_up_in_the_end(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(budget, "GIVE_UP_SECONDS", 0.3)
    display = Watched()
    with pytest.raises(TokenmillError, match="no machine of the cluster has room for a task"):
        run_inline(request_of(corpus, tmp_path / "out", on_error="skip"), InlineCluster(0), display)
    assert sum("waiting for a machine of the cluster" in line for line in display.lines) == 1


def test_a_machine_that_is_too_small_is_a_sentence_at_once(corpus: Path, tmp_path: Path) -> None:
    cluster = InlineCluster(0)
    cluster.may_grow = False
    cluster.memory_per_call = 900_000_000_000
    with pytest.raises(UsageError, match=r"no room for a task that asks for 900.00 GB of memory; ask for less"):
        run_inline(request_of(corpus, tmp_path / "out"), cluster)


def test_memory_and_workers_decide_what_a_task_asks_for(corpus: Path, tmp_path: Path) -> None:
    cluster = InlineCluster(3)
    run_inline(request_of(corpus, tmp_path / "a", on_error="skip", memory="6GB", workers=2), cluster)
    assert {call.memory_bytes for call in cluster.calls} == {3_000_000_000}
    cluster = InlineCluster(3)
    run_inline(request_of(corpus, tmp_path / "b", on_error="skip"), cluster)
    assert {call.memory_bytes for call in cluster.calls} == {int(0.6 * (4 << 30))}
    with pytest.raises(UsageError, match=r"50 MB of memory are too little for a task .* it needs \d+ MB"):
        run_inline(request_of(corpus, tmp_path / "c", memory="100MB", workers=2), InlineCluster(3))


@pytest.mark.parametrize("flags", [{"rank": 0, "world_size": 2}, {"affinity": True}, {"profile": "p.txt"}])
def test_flags_of_the_local_executor_are_refused(corpus: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^--{next(iter(flags))} is for the local executor"):
        run_inline(request_of(corpus, tmp_path / "out", **flags), InlineCluster())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_cpus_per_task": 0}, "num_cpus_per_task 0 must be positive"),
        ({"max_retries": -1}, "max_retries -1 must be at least 0"),
        ({"memory_per_task": 0}, "memory_per_task 0 must be positive"),
        ({"memory_per_task": "lots"}, "memory_per_task 'lots' is not a size; write it like 1GB, 512MiB or 200000"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        RayExecutor(**arguments)
    assert str(error.value) == message


def test_without_ray_the_extra_is_named(corpus: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['ray'] = None; from tokenmill.cli import main; main()"
    arguments = ["tokenize", str(corpus), "-o", str(tmp_path / "out"), "--tokenizer", "bytes", "--executor", "ray"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert sentence(done) == "--executor ray needs a package that is not installed: pip install 'tokenmill[ray]'"


@pytest.mark.parametrize("by_config", [False, True])
def test_a_cluster_that_does_not_answer_is_a_sentence_within_seconds(
    corpus: Path, tmp_path: Path, by_config: bool
) -> None:
    (tmp_path / "run.yaml").write_text("executor: ray\n")
    chosen = ["--config", tmp_path / "run.yaml"] if by_config else ["--executor", "ray"]
    started = time.monotonic()
    done = tokenmill(
        *("tokenize", corpus, "-o", tmp_path / "out", "--tokenizer", "bytes"),
        *chosen,
        env={"RAY_ADDRESS": "127.0.0.1:1"},
    )
    assert sentence(done) == (
        "no Ray cluster answers at 127.0.0.1:1: Connection refused; start one there with: ray start --head, or unset "
        "RAY_ADDRESS for one on this machine"
    )
    assert time.monotonic() - started < 20


def test_a_finished_store_needs_no_cluster(corpus: Path, tmp_path: Path) -> None:
    request = request_of(corpus, tmp_path / "out", on_error="skip")
    run_inline(request, InlineCluster())
    done = tokenmill(
        *(
            "tokenize",
            f"{corpus}/**",
            "-o",
            tmp_path / "out",
            "--tokenizer",
            "bytes",
            "--on-error",
            "skip",
            "--executor",
            "ray",
        ),
        env={"RAY_ADDRESS": "127.0.0.1:1"},
    )
    assert done.returncode == 0
    assert "is already finished" in done.stdout


def test_an_unknown_executor_is_a_sentence(corpus: Path, tmp_path: Path) -> None:
    done = tokenmill("tokenize", corpus, "-o", tmp_path / "out", "--tokenizer", "bytes", "--executor", "dask")
    assert sentence(done) == "--executor: Invalid enum value 'dask'; expected one of local, ray"


@pytest.mark.timeout(250)
def test_ray_on_this_machine_makes_the_files_that_workers_make(corpus: Path, tmp_path: Path) -> None:
    """Answers, notes, losses and retries of calls, then a whole store during which a process is killed."""
    module = "tests.cluster.ray_here"
    arguments = [sys.executable, "-m", "tests.cluster.loopback", sys.executable, "-m", module, corpus]
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        here = [*map(str, arguments), str(folder)]
        done = subprocess.run(here, cwd=ROOT, capture_output=True, text=True, timeout=120)
        # Ray gives up after half a minute when the machine is very busy.
        if "cannot start a Ray cluster" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all as it should be"


def test_a_missing_ray_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tokenmill\[ray\]'"):
        RayExecutor()
