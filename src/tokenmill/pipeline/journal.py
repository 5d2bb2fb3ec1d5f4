"""The journal of an unfinished run: `OUT/.tasks/`.

It holds what the run was asked to do (`plan.json`), one small file per finished task, and the
rejects of that task. A task's entry is written after its shards are durable and named, so an
entry proves the shards; a shard without an entry is removed and made again. The directory
goes when the manifest is written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tokenmill.errors import StoreError
from tokenmill.files import sync_directory, write_durably
from tokenmill.pipeline.plan import InputFile
from tokenmill.store.manifest import MANIFEST, ShardInfo

__all__ = ["Journal", "Lock", "SavedPlan", "StoredReject", "TaskRecord"]

ORPHAN_SECONDS = 15.0


class StoredReject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reject as its task knows it; `line` counts from the start of the task's span."""

    input: int
    position: int
    line: int
    reason: str
    detail: str
    num_documents: int = 1


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished task made."""

    name: str
    input: int
    number: int
    inputs: list[int]
    shards: dict[str, ShardInfo]
    num_documents_in: int
    num_bytes: int
    rejects: dict[str, int]
    num_lines: int
    counts_lines: bool
    """Lines of its rejects count from the start of its span, which later tasks must add up."""
    num_rerouted: int
    num_parsed: int


class SavedPlan(msgspec.Struct, frozen=True):
    """What a run was asked to do, as far as it decides the bytes of the store."""

    settings: dict[str, Any]
    inputs: list[InputFile]


class Journal:
    """Reads and writes `OUT/.tasks/`."""

    def __init__(self, folder: Path) -> None:
        self.store = folder
        self.folder = folder / ".tasks"

    def exists(self) -> bool:
        """Whether there is an unfinished run here."""
        return (self.folder / "plan.json").is_file()

    def begin(self, plan: SavedPlan) -> None:
        """Write down what the run is to do, before any of it is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_directory(self.store)
        write_durably(self.folder / "plan.json", msgspec.json.encode(plan))

    def saved_plan(self) -> SavedPlan:
        """What the run that began here was asked to do."""
        try:
            return msgspec.json.decode((self.folder / "plan.json").read_bytes(), type=SavedPlan)
        except (msgspec.MsgspecError, OSError) as error:
            raise StoreError(
                f"{self.folder / 'plan.json'} is damaged ({error}); start again with --overwrite"
            ) from None

    def commit(self, record: TaskRecord) -> None:
        """Enter a task whose shards are durable."""
        write_durably(self.folder / f"{record.name}.json", msgspec.json.encode(record))

    def records(self) -> Iterator[TaskRecord]:
        """The finished tasks, in input order; an entry that cannot be read is no entry."""
        for path in sorted(self.folder.glob("[0-9]*-[0-9]*.json"), key=_task_key):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=TaskRecord)
            except msgspec.MsgspecError:
                path.unlink()

    def forget(self, record: TaskRecord) -> None:
        """Take back a task, so that it is done again."""
        (self.folder / f"{record.name}.json").unlink(missing_ok=True)
        self.rejects_path(record.name).unlink(missing_ok=True)

    def forget_streams(self, inputs: Iterable[int]) -> None:
        """Take back that streams were read to their ends."""
        for input in inputs:
            (self.folder / f"stream-{input:05d}.json").unlink(missing_ok=True)

    def is_whole(self, record: TaskRecord) -> bool:
        """Whether the files of a task are still there, with their sizes."""
        files = {f"{s.name}{suffix}": file.bytes for s in record.shards.values() for suffix, file in s.files.items()}
        try:
            return all((self.store / name).stat().st_size == size for name, size in files.items())
        except OSError:
            return False

    def clear(self) -> None:
        """Forget everything, but stay: without a journal the directory would count as somebody else's."""
        for path in self.folder.glob("*.json*"):
            path.unlink()

    def rejects_path(self, name: str) -> Path:
        """Where a task keeps its rejects until they are joined."""
        return self.folder / f"{name}.rejects.jsonl"

    def slot(self, number: int) -> Path:
        """A file for decompressed text on its way from a feeder to a worker."""
        folder = self.folder / "spool"
        folder.mkdir(exist_ok=True)
        return folder / f"slot-{number}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held by one worker at a time, for documents that do not fit a worker's share of memory."""
        with (self.folder / "alone.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def end_stream(self, input: int, num_tasks: int) -> None:
        """Note that a stream was read to its end, so that a resumed run need not read it again."""
        write_durably(self.folder / f"stream-{input:05d}.json", msgspec.json.encode(num_tasks))

    def ended_streams(self) -> dict[int, int]:
        """Inputs whose stream was read to its end, and how many tasks they gave."""
        found = {}
        for path in self.folder.glob("stream-*.json"):
            found[int(path.stem.removeprefix("stream-"))] = int(msgspec.json.decode(path.read_bytes()))
        return found

    def sweep(self, done: dict[str, TaskRecord]) -> None:
        """Remove what a killed run left: temporary files, spooled text, shards without an entry."""
        shutil.rmtree(self.folder / "spool", ignore_errors=True)
        for path in (*self.folder.glob("*.tmp"), *self.store.glob("*.tmp")):
            path.unlink(missing_ok=True)
        for path in self.folder.glob("*.rejects.jsonl"):
            if path.name.removesuffix(".rejects.jsonl") not in done:
                path.unlink(missing_ok=True)
        known = {shard.name for record in done.values() for shard in record.shards.values()}
        for split in ("train", "val"):
            for path in (self.store / split).glob("shard-*"):
                if path.name.endswith(".tmp") or f"{split}/{path.name.split('.')[0]}" not in known:
                    path.unlink(missing_ok=True)

    def sweep_finished(self) -> None:
        """Remove what a run leaves that was killed after the manifest was written."""
        self.remove()
        for path in self.store.glob("*.tmp"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is finished: the manifest says everything that is still of use."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock_soon(file: BinaryIO) -> None:
    """Take a lock, trying twice: `tokenmill status` looks at it for an instant."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        time.sleep(0.1)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _task_key(path: Path) -> tuple[int, int]:
    input, number = path.stem.split("-")
    return int(input), int(number)


class Lock:
    """One run per directory, held by the process tree and gone with it.

    The parent holds `.lock`; every worker holds `.workers.lock` in shared mode, so that a
    new run waits until orphans of a killed one have ended and cannot publish any more.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._files: list[BinaryIO] = []

    def acquire(self) -> None:
        """Take the directory, or say who has it."""
        lock = self._open(".lock")
        try:
            _lock_soon(lock)
            if not _is_same_file(lock, self._store / ".lock"):
                # The run that had it has just ended and taken the file away.
                lock.close()
                self.acquire()
                return
        except OSError:
            lock.seek(0)
            holder = lock.read(32).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(
                f"{self._store} is in use by another run (process {holder}); wait for it, or choose another directory"
            ) from None
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
        workers = self._open(".workers.lock")
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            try:
                fcntl.flock(workers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{self._store} is still being written by workers of a killed run; end them first"
                    ) from None
                time.sleep(0.05)
        fcntl.flock(workers, fcntl.LOCK_UN)

    def join(self) -> None:
        """Called in a worker: hold the directory until this process ends."""
        fcntl.flock(self._open(".workers.lock"), fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go, and take the lock files away."""
        for name in (".workers.lock", ".lock"):
            (self._store / name).unlink(missing_ok=True)
        for file in self._files:
            file.close()
        self._files = []

    def _open(self, name: str) -> BinaryIO:
        file = (self._store / name).open("a+b", buffering=0)
        self._files.append(file)
        return file


def is_finished(folder: Path) -> bool:
    """Whether a directory holds a finished store."""
    return (folder / MANIFEST).is_file()
