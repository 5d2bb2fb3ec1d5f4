"""Stopping and resuming: the same command resumes, another one is refused, a finished store stays as it is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.support.running import (
    compress,
    jsonl,
    rejects_of,
    sentence,
    snapshot,
    start,
    texts_of,
    tokenize_here,
    tokenmill,
    wait_for,
    write_parquet,
)
from tokenmill.engines import EngineChoice, load_tokenizer
from tokenmill.formatting import plural
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.journal import Journal, SavedPlan
from tokenmill.pipeline.journal.resume import RunState, begin_or_resume
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.pipeline.plan.tasks import Plan
from tokenmill.pipeline.request import Request

TASK_BYTES = 400


def make_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"document {number} {rng.getrandbits(300):x}" for number in range(count)]


def journal_of(out: Path) -> set[str]:
    """The finished tasks of an unfinished run."""
    return {path.stem for path in (out / ".tasks").glob("[0-9]*-[0-9]*.json")}


def identities(out: Path, tasks: set[str] | None = None) -> dict[str, tuple[int, int]]:
    """Inode and time of every published file, or of those of some tasks: they change when a file is written again."""
    return {
        str(path.relative_to(out)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(out.rglob("*"))
        if path.is_file()
        and (tasks is None or path.name.removeprefix("shard-").split(".")[0] in tasks)
        and ".tasks" not in path.parts
    }


def leftovers(out: Path) -> list[str]:
    names = [path.name for path in out.rglob("*")]
    return [name for name in names if name.endswith((".tmp", ".lock")) or name.startswith("slot-")]


# Runs that are stopped from outside, in the middle.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plain file that is some 120 tasks."""
    path = tmp_path_factory.mktemp("plain") / "a.jsonl"
    path.write_bytes(jsonl(make_texts(450, 1)))
    return path


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compressed file that is some 120 tasks."""
    path = tmp_path_factory.mktemp("stream") / "a.jsonl.zst"
    path.write_bytes(compress(jsonl(make_texts(450, 2)), "zst"))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, bytes]]:
    """The store of an undisturbed run."""
    known: dict[Path, dict[str, bytes]] = {}

    def run(path: Path) -> dict[str, bytes]:
        if path not in known:
            out = tmp_path_factory.mktemp("undisturbed")
            tm.tokenize(path, out, tokenizer="bytes", task_bytes=TASK_BYTES, workers=2)
            known[path] = snapshot(out)
        return known[path]

    return run


def arguments(path: Path, out: Path) -> list[str]:
    return ["tokenize", str(path), "-o", str(out), "--tokenizer", "bytes", "--task-bytes", str(TASK_BYTES)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_run_that_was_stopped_continues_and_repeats_nothing(
    number: signal.Signals,
    kind: str,
    request: pytest.FixtureRequest,
    undisturbed: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    path = request.getfixturevalue(kind)
    out = tmp_path / "out"
    process = start(*arguments(path, out), "--workers", "2")
    wait_for(lambda: len(journal_of(out)) >= 10 or process.poll() is not None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert not (out / "manifest.json").exists(), "the run was faster than its test"
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        last = errors.splitlines()[-1]
        assert f"stopped by {number.name}; run the same command again to continue" in last
        assert leftovers(out) == []
    done = journal_of(out)
    published = identities(out, done)
    assert len(done) >= 10
    again = tokenmill(*arguments(path, out), "--workers", "2")
    assert again.returncode == 0, again.stderr
    assert f"continuing: {plural(len(done), 'task')} {'is' if len(done) == 1 else 'are'} already done" in again.stderr
    assert identities(out, done) == published
    assert leftovers(out) == []
    assert snapshot(out) == undisturbed(path)


def test_a_second_run_at_once_is_refused_with_the_first_ones_process(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = start(*arguments(plain, out), "--workers", "1")
    wait_for(lambda: journal_of(out))
    first.send_signal(signal.SIGSTOP)  # or a slow machine would finish it before the second one starts
    second = tokenmill(*arguments(plain, out))
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1
    assert f"{out} is in use by another run (process {first.pid})" in sentence(second)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert leftovers(out) == []


# Runs that stopped by themselves: a bad line at the end leaves a store with finished tasks.


class Stopped:
    """A folder with inputs and an unfinished store of them, which a test may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.flags: dict[str, Any] = {"tokenizer": "bytes", "task_bytes": TASK_BYTES, "workers": 1}

    @property
    def inputs(self) -> list[str]:
        return [str(path) for path in sorted(self.folder.iterdir()) if path.name != "out"]

    def run(self, **flags: Any) -> tm.TokenStore:
        return tokenize_here(flags.pop("inputs", self.inputs), self.out, **{**self.flags, **flags})


@pytest.fixture(scope="module")
def _stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    stopped = Stopped(tmp_path_factory.mktemp("stopped"))
    texts = make_texts(40, 3)
    (stopped.folder / "a.jsonl").write_bytes(jsonl(texts[:12]))
    (stopped.folder / "b.jsonl.gz").write_bytes(compress(jsonl(texts[12:24]), "gz"))
    (stopped.folder / "c.txt").write_bytes(b"plain text\n" * 20)
    (stopped.folder / "z.jsonl").write_bytes(jsonl(texts[24:28]) + b"broken\n")
    with pytest.raises(tm.DataError, match=r"z\.jsonl line 5"):
        stopped.run()
    assert len(journal_of(stopped.out)) > 5
    return stopped


@pytest.fixture
def stopped(_stopped: Stopped, tmp_path: Path) -> Stopped:
    return Stopped(shutil.copytree(_stopped.folder, tmp_path / "stopped"))


def test_an_error_leaves_a_store_that_other_run_flags_continue(stopped: Stopped) -> None:
    done = journal_of(stopped.out)
    published = identities(stopped.out, done)
    assert published
    assert leftovers(stopped.out) == []
    store = stopped.run(workers=2, memory="2GB", batch_size=2, on_error="skip", max_errors=5)
    assert identities(stopped.out, done) == published
    assert store.manifest.num_documents_in == 12 + 12 + 20 + 5
    assert [(row["file"], row["line"]) for row in rejects_of(stopped.out)] == [("z.jsonl", 5)]
    fresh = tokenize_here(stopped.inputs, stopped.folder.parent / "fresh", **stopped.flags, on_error="skip")
    assert snapshot(fresh.path) == snapshot(stopped.out)


CHANGED_FLAGS = [
    ({"tokenizer": "tiny"}, r"tokenized with bytes \(\w{6}\); this run uses tiny \(\w{6}\)"),
    ({"text_key": "body"}, "--text-key 'text'; this run has 'body'"),
    ({"eos": False}, "--eos 256; this run has not set"),
    ({"bos": True}, "--bos not set; this run has 257"),
    ({"keep_keys": ["id"]}, r"--keep-keys \[\]; this run has \['id'\]"),
    ({"val_fraction": 0.5}, "--val-fraction 0.0; this run has 0.5"),
    ({"seed": 3}, "--seed 0; this run has 3"),
    ({"limit": 7}, "--limit not set; this run has 7"),
    ({"task_bytes": "1kB"}, "--task-bytes 400; this run has 1000"),
    ({"max_document_bytes": "1MB"}, "--max-document-bytes 256000000; this run has 1000000"),
]


def test_changed_content_flags_are_refused_with_both_values(stopped: Stopped, tiny_tokenizer: Path) -> None:
    before = snapshot(stopped.out)
    for flags, message in CHANGED_FLAGS:
        flags = {**flags, "tokenizer": str(tiny_tokenizer)} if "tokenizer" in flags else flags
        with pytest.raises(tm.StoreError, match=message) as caught:
            stopped.run(on_error="skip", **flags)
        assert "Use another directory, or --overwrite" in str(caught.value)
    assert snapshot(stopped.out) == before
    stopped.run(on_error="skip")
    finished = snapshot(stopped.out)
    for flags, message in CHANGED_FLAGS[1:]:
        with pytest.raises(tm.StoreError, match=message):
            stopped.run(on_error="skip", **flags)
    assert snapshot(stopped.out) == finished


def _grow(folder: Path) -> None:
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b'{"text": "more"}\n')


def _rewrite(folder: Path) -> None:
    path = folder / "a.jsonl"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"document 3", b"Document 3"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _rename(folder: Path) -> None:
    (folder / "c.txt").rename(folder / "b.txt")


CHANGED_INPUTS: list[tuple[Callable[[Path], Any], str]] = [
    (_grow, r"a\.jsonl had \d+ bytes when .* was begun and has \d+ now"),
    (_rewrite, r"a\.jsonl has other content"),
    (lambda folder: (folder / "d.jsonl").touch(), r"4 inputs; this run has 5, with d\.jsonl added"),
    (lambda folder: (folder / "c.txt").unlink(), r"4 inputs; this run has 3, without c\.txt"),
    (_rename, r"4 inputs; this run has 4, without c\.txt"),
]


@pytest.mark.parametrize(("change", "message"), CHANGED_INPUTS, ids=["size", "content", "added", "removed", "renamed"])
def test_changed_inputs_are_refused_by_name(change: Callable[[Path], Any], message: str, stopped: Stopped) -> None:
    change(stopped.folder)
    before = snapshot(stopped.out)
    with pytest.raises(tm.StoreError, match=message):
        stopped.run(on_error="skip")
    assert snapshot(stopped.out) == before


def small_file(number: int) -> InputFile:
    name = f"{number:05d}.jsonl"
    return InputFile(
        path=f"/in/{name}", name=name, bytes=1, fingerprint="", mtime_ns=0, format="jsonl", compression="none"
    )


def prepare_small(files: list[InputFile]) -> Prepared:
    request, tokenizer = Request(inputs=["/in"], out="out", tokenizer="bytes"), load_tokenizer("bytes")
    return Prepared(request, tokenizer, EngineChoice("bytes", "bytes"), files, request.settings(tokenizer, files))


def test_one_of_very_many_inputs_that_is_gone_is_named_at_once(tmp_path: Path) -> None:
    files = [small_file(number) for number in range(20_000)]
    journal = Journal(tmp_path)
    journal.begin(SavedPlan(prepare_small(files).settings.flags(), Plan(files, [], [])))
    started = time.monotonic()
    with pytest.raises(tm.StoreError, match=r"20000 inputs; this run has 19999, without 00007\.jsonl"):
        begin_or_resume(journal, prepare_small(files[:7] + files[8:]), lambda files: Plan(files, [], []))
    assert time.monotonic() - started < 5


def test_a_run_keeps_the_order_that_a_reader_of_the_store_needs_and_saves_none(tmp_path: Path) -> None:
    files = [small_file(0)]
    journal, order = Journal(tmp_path), {"00000-0000": 3}
    for _ in ("begun", "resumed"):
        state = begin_or_resume(journal, prepare_small(files), lambda files: Plan(files, [], [], order), order=order)
        assert isinstance(state, RunState)
        assert state.plan.order == state.part.order == order
        assert journal.saved_plan().plan.order == {}


def test_inputs_in_another_order_are_refused(stopped: Stopped) -> None:
    with pytest.raises(tm.StoreError, match="in another order"):
        stopped.run(inputs=stopped.inputs[::-1], on_error="skip")


def test_a_touched_small_input_is_the_same_because_all_of_its_content_is(stopped: Stopped) -> None:
    done = journal_of(stopped.out)
    published = identities(stopped.out, done)
    for path in (stopped.folder / "a.jsonl", stopped.folder / "b.jsonl.gz", stopped.folder / "z.jsonl"):
        os.utime(path)
    store = stopped.run(on_error="skip")
    assert identities(stopped.out, done) == published
    assert store.manifest.num_documents_in == 12 + 12 + 20 + 5
    fresh = tokenize_here(stopped.inputs, stopped.folder.parent / "fresh", **stopped.flags, on_error="skip")
    assert snapshot(fresh.path) == snapshot(stopped.out)


def test_a_touched_large_input_is_read_again_and_others_are_not(tmp_path: Path) -> None:
    inputs, out = [str(tmp_path / f"{name}.jsonl") for name in "abc"], tmp_path / "out"
    Path(inputs[0]).write_bytes(jsonl(["x" * 999_000 + str(number) for number in range(9)]))
    Path(inputs[1]).write_bytes(jsonl(["y" * 2_999_900]))
    Path(inputs[2]).write_bytes(jsonl(make_texts(3, 4)) + b"broken\n")
    flags: dict[str, Any] = {"tokenizer": "bytes", "task_bytes": "3MB", "workers": 1}
    with pytest.raises(tm.DataError, match="line 4"):
        tokenize_here(inputs, out, **flags)
    done = journal_of(out)
    assert done == {"00000-0000", "00000-0001", "00000-0002", "00001-0000"}
    published = identities(out, done)
    for path in inputs:
        os.utime(path)
    tokenize_here(inputs, out, **flags, on_error="skip")
    now = identities(out, done)
    redone = {name for name in now if now[name] != published[name]}
    assert redone == {name for name in now if name.startswith("train/shard-00000")}


def test_a_large_input_that_was_changed_between_samples_is_read_again(tmp_path: Path) -> None:
    """Above 8 MiB a fingerprint covers a sample, so the modification time decides which tasks are repeated."""
    path = tmp_path / "a.jsonl"
    data = bytearray(jsonl(["x" * 999_000 + str(number) for number in range(9)]) + b"broken\n")
    path.write_bytes(data)
    flags: dict[str, Any] = {"tokenizer": "bytes", "task_bytes": "3MB", "workers": 1}
    with pytest.raises(tm.DataError, match="line 10"):
        tokenize_here(path, tmp_path / "out", **flags)
    assert len(journal_of(tmp_path / "out")) == 2
    at = 200_000
    data[at] = ord("y")
    path.write_bytes(data)
    store = tokenize_here(path, tmp_path / "out", **flags, on_error="skip")
    assert "y" in texts_of(store)[0]
    fresh = tokenize_here(path, tmp_path / "fresh", **flags, on_error="skip")
    assert snapshot(fresh.path) == snapshot(store.path)


def test_a_large_input_that_was_modified_after_the_store_was_finished_is_reported(tmp_path: Path) -> None:
    """Between the samples of a fingerprint, only the modification time shows a change."""
    path, small, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out"
    data = bytearray(jsonl(["x" * 999_000 + str(number) for number in range(9)]))
    path.write_bytes(data)
    small.write_bytes(jsonl(["small"]))
    arguments = ["tokenize", path, small, "-o", out, "--tokenizer", "bytes"]
    assert tokenmill(*arguments).returncode == 0
    again = tokenmill(*arguments)
    assert (again.returncode, "modified" in again.stderr) == (0, False)
    data[200_000] = ord("y")
    path.write_bytes(data)
    small.touch()
    again = tokenmill(*arguments)
    assert again.returncode == 0
    assert f"{out} is already finished" in again.stdout
    said = [line for line in again.stderr.splitlines() if not line.endswith(" ...")]
    assert len(said) == 1
    assert said[0].startswith(f"{path} was modified after {out} was finished; its size and a sample")
    data[70_000] = ord("y")
    path.write_bytes(data)
    assert "other content than when" in sentence(tokenmill(*arguments))


def test_shards_that_went_missing_from_an_unfinished_store_are_made_again(stopped: Stopped) -> None:
    shards = sorted((stopped.out / "train").glob("*.bin"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-2])
    stopped.run(on_error="skip")
    fresh = tokenize_here(stopped.inputs, stopped.folder.parent / "fresh", **stopped.flags, on_error="skip")
    assert snapshot(fresh.path) == snapshot(stopped.out)


def test_a_damaged_journal_is_named_or_done_again(stopped: Stopped) -> None:
    entry = next((stopped.out / ".tasks").glob("[0-9]*-[0-9]*.json"))
    entry.write_bytes(b"{")
    plan = stopped.out / ".tasks" / "plan.json"
    saved = plan.read_bytes()
    plan.write_bytes(saved[:-9])
    with pytest.raises(tm.StoreError, match=r"plan\.json is damaged .*--overwrite"):
        stopped.run(on_error="skip")
    plan.write_bytes(saved)
    assert stopped.run(on_error="skip").manifest.num_documents_in == 12 + 12 + 20 + 5


def test_an_attempt_that_finished_no_task_is_discarded(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """The advice of an error can be followed: it often names the flag to change."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one text", "another"]))
    out = tmp_path / "out"
    wrong = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", out, "--tokenizer", "bytes", "--text-key", "words")
    assert "--text-key text" in sentence(wrong)
    assert (out / ".tasks" / "plan.json").exists()
    right = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", out, "--tokenizer", tiny_tokenizer)
    assert right.returncode == 0, right.stderr
    assert tm.open(out).num_documents == 2


def test_too_many_errors_are_too_many_in_every_attempt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"broken\n" * 4 + jsonl(["x"]))
    flags: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "on_error": "skip"}
    for _ in range(2):
        with pytest.raises(tm.TokenmillError, match="4 records .* more than --max-errors 3"):
            tokenize_here(path, tmp_path / "out", **flags, max_errors=3)
    assert tokenize_here(path, tmp_path / "out", **flags, max_errors=4).manifest.num_rejects == 4


# Finished stores, and directories that are not stores.


def test_the_same_command_on_a_finished_store_says_so_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(make_texts(20, 4)) + b"broken\n")
    out = tmp_path / "out"
    command = [*arguments(path, out), "--on-error", "skip"]
    first = tokenmill(*command)
    assert first.returncode == 0, first.stderr
    before = identities(out)
    again = tokenmill(*command, "--workers", "1")
    assert again.returncode == 0
    assert again.stdout.startswith(f"{out} is already finished: 20 documents")
    assert "1 reject" in again.stdout
    os.utime(path)
    assert tokenmill(*command).returncode == 0
    assert identities(out) == before

    other = tokenmill(*command, "--no-eos")
    assert other.returncode == 1
    assert "--overwrite" in sentence(other)
    assert identities(out) == before
    other = tokenmill(*command, "--no-eos", "--overwrite", "--task-bytes", "1MB")
    assert other.returncode == 0, other.stderr
    store = tm.open(out)
    assert store.manifest.special_tokens.eos_id is None
    assert sorted(snapshot(out)) == sorted(
        [
            "manifest.json",
            "rejects.jsonl",
            "tokenizer/bytes.json",
            *(f"train/shard-00000-0000.{suffix}" for suffix in ("bin", "docs.parquet", "idx")),
        ]
    )


def test_a_finished_store_that_is_read_only_counts_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(["one", "two"]))
    tokenize_here(path, out, tokenizer="bytes")
    before = identities(out), out.stat().st_mtime_ns
    monkeypatch.setattr("tokenmill.pipeline.run.os.access", lambda *_: False)
    assert tokenize_here(path, out, tokenizer="bytes").num_documents == 2
    with pytest.raises(tm.StoreError, match="--seed 0; this run has 1"):
        tokenize_here(path, out, tokenizer="bytes", seed=1)
    assert (identities(out), out.stat().st_mtime_ns) == before


def test_leftovers_of_a_kill_after_the_manifest_are_removed(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x", "y"])
    out = tmp_path / "out"
    tokenize_here(path, out, tokenizer="bytes", workers=1)
    expected = snapshot(out)
    (out / ".tasks").mkdir()
    (out / ".tasks" / "plan.json").write_text("{}")
    (out / "run.json.tmp").write_text("{")
    (out / ".lock").write_text("1")
    tokenize_here(path, out, tokenizer="bytes", workers=1)
    assert snapshot(out) == expected


def test_a_lock_of_a_dead_process_and_its_temporary_files_do_not_block(stopped: Stopped) -> None:
    (stopped.out / ".lock").write_text("999999")
    (stopped.out / ".workers.lock").touch()
    (stopped.out / "manifest.json.4711.tmp").write_text("{")
    (stopped.out / "rejects.jsonl.tmp").write_text("{")
    (stopped.out / ".tasks" / "00003-0000.json.12.tmp").write_text("{")
    (stopped.out / ".tasks" / "spool").mkdir(exist_ok=True)
    (stopped.out / ".tasks" / "spool" / "slot-0").write_text("text")
    (stopped.out / "train" / "shard-00003-0000.bin.1f.tmp").write_bytes(b"12")
    (stopped.out / "train" / "shard-00003-0000.bin").write_bytes(b"published, but not in the journal")
    stopped.run(on_error="skip")
    fresh = tokenize_here(stopped.inputs, stopped.folder.parent / "fresh", **stopped.flags, on_error="skip")
    assert snapshot(fresh.path) == snapshot(stopped.out)


@pytest.mark.parametrize("overwrite", [False, True], ids=["continue", "overwrite"])
def test_a_directory_that_is_no_store_is_refused_and_left_alone(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    for name in ("foreign/notes.txt", "images/train/cat.png", "images/val/dog.png", "model/tokenizer/mine.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("precious")
    before = snapshot(tmp_path)
    for name in ("foreign", "images", "model"):
        with pytest.raises(tm.StoreError, match="is not empty and not a token store"):
            tokenize_here(path, tmp_path / name, tokenizer="bytes", overwrite=overwrite)
    with pytest.raises(tm.StoreError, match=r"a\.jsonl is a file"):
        tokenize_here(path, path, tokenizer="bytes", overwrite=overwrite)
    with pytest.raises(tm.StoreError, match="cannot be written"):
        tokenize_here(path, path / "below", tokenizer="bytes", overwrite=overwrite)
    assert snapshot(tmp_path) == before


def test_overwrite_leaves_files_that_are_not_the_stores_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    tokenize_here(path, tmp_path / "out", tokenizer="bytes", workers=1)
    (tmp_path / "out" / "notes.md").write_text("mine")
    (tmp_path / "out" / "train" / "notes.md").write_text("mine")
    tokenize_here(path, tmp_path / "out", tokenizer="bytes", workers=1, overwrite=True, eos=False)
    assert (tmp_path / "out" / "notes.md").exists()
    assert (tmp_path / "out" / "train" / "notes.md").exists()


def test_an_overwrite_that_was_killed_half_way_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(make_texts(20, 5)))
    out = tmp_path / "out"
    tokenize_here(path, out, tokenizer="bytes", task_bytes=TASK_BYTES, workers=1)
    expected = snapshot(out)
    # The manifest and some shards are already removed, the entries of an older run are not.
    (out / "manifest.json").unlink()
    (out / "train" / "shard-00000-0000.bin").unlink()
    (out / ".tasks").mkdir()
    (out / ".tasks" / "00000-0001.json").write_text("{}")
    tokenize_here(path, out, tokenizer="bytes", task_bytes=TASK_BYTES, workers=1)
    assert snapshot(out) == expected


@pytest.mark.parametrize("name", ["tokenizer/bytes.json", "train/shard-00000-0000.docs.parquet", "rejects.jsonl"])
def test_a_finished_store_that_lost_a_file_is_not_called_finished(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(["one", "two"]) + b"broken\n")
    flags: dict[str, Any] = {"tokenizer": "bytes", "on_error": "skip"}
    tokenize_here(path, out, **flags)
    expected = snapshot(out)
    os.truncate(out / name, 3)
    with pytest.raises(tm.StoreError, match=f"{name} has 3 bytes, and the manifest says .*--overwrite"):
        tokenize_here(path, out, **flags)
    (out / name).unlink()
    with pytest.raises(tm.StoreError, match=f"{name} is missing, and the manifest says .*--overwrite"):
        tokenize_here(path, out, **flags)
    tokenize_here(path, out, **flags, overwrite=True)
    assert snapshot(out) == expected


# Leftovers of a power failure: `tests/faults/power_cuts.py` tries all of them; these cases once failed.


@pytest.fixture
def with_rejects(tmp_path: Path) -> Stopped:
    """An unfinished store one of whose finished tasks has rejects."""
    stopped = Stopped(tmp_path / "stopped")
    stopped.folder.mkdir()
    data = jsonl(make_texts(4, 3)) + b"broken\n" + jsonl(make_texts(20, 4)) + b"broken\n"
    (stopped.folder / "a.jsonl").write_bytes(data)
    stopped.flags |= {"on_error": "skip"}
    with pytest.raises(tm.TokenmillError, match="more than --max-errors 1"):
        stopped.run(max_errors=1)
    assert list((stopped.out / ".tasks").glob("*.rejects.jsonl"))
    return stopped


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 30)], ids=["lost", "truncated"])
def test_a_task_whose_rejects_are_gone_is_done_again(damage: Callable[[Path], None], with_rejects: Stopped) -> None:
    damage(next((with_rejects.out / ".tasks").glob("*.rejects.jsonl")))
    with_rejects.run()
    assert [row["line"] for row in rejects_of(with_rejects.out)] == [5, 26]
    fresh = tokenize_here(with_rejects.inputs, with_rejects.folder.parent / "fresh", **with_rejects.flags)
    assert snapshot(fresh.path) == snapshot(with_rejects.out)


def order_of_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record which names are added and removed, and which directories are synced, from now on."""
    events: list[tuple[str, str]] = []
    fsync, replace, unlink, mkdir = os.fsync, os.replace, os.unlink, os.mkdir

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def record(kind: str, function: Callable[..., Any], name: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            events.append((kind, str(name(*arguments))))
            return function(*arguments, **options)

        return recorded

    monkeypatch.setattr(os, "fsync", record("sync", fsync, path_of))
    monkeypatch.setattr(os, "replace", record("rename", replace, lambda _, target: target))
    monkeypatch.setattr(os, "unlink", record("unlink", unlink, lambda path, **_: path))
    monkeypatch.setattr(os, "mkdir", record("mkdir", mkdir, lambda path, *_: path))
    return events


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of descriptors are in /proc")


@needs_proc
def test_directories_above_a_new_store_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "new" / "deep" / "out"
    path.write_bytes(jsonl(["one"]))
    events = order_of_events(monkeypatch)
    tokenize_here(path, out, tokenizer="bytes")
    for folder in (out, *list(out.parents)[:2]):
        assert events.index(("sync", str(folder.parent))) > events.index(("mkdir", str(folder)))


@needs_proc
def test_rejects_are_durable_before_the_entry_of_their_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(["one"]) + b"broken\n")
    events = order_of_events(monkeypatch)
    tokenize_here(path, out, tokenizer="bytes", on_error="skip")
    names = [(kind, Path(name).name) for kind, name in events]
    renamed = names.index(("rename", "00000-0000.rejects.jsonl"))
    assert ("sync", ".tasks") in names[renamed : names.index(("rename", "00000-0000.json"))]


@needs_proc
def test_an_overwrite_makes_the_end_of_the_manifest_durable_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(jsonl(["one"]))
    tokenize_here(path, out, tokenizer="bytes")
    events = order_of_events(monkeypatch)
    tokenize_here(path, out, tokenizer="bytes", seed=1, overwrite=True)
    marked = events.index(("mkdir", str(out / ".tasks")))
    gone = events.index(("unlink", str(out / "manifest.json")))
    shard = events.index(("unlink", str(out / "train" / "shard-00000-0000.bin")))
    assert ("sync", str(out)) in events[marked:gone]
    assert ("sync", str(out)) in events[gone:shard]
