"""The journal of an unfinished run: `OUT/.tasks/`.

It holds what the run was asked to do (`plan.json`), what the parity gate found (`gate.json`), one small file per
finished task, and the rejects of that task. A task's entry is written after its shards are durable and named, so an
entry proves the shards; a shard without an entry is made again. The directory goes when the manifest is written.

Ranks of one run share a journal. Every file in it gets its name in one step and depends on the run alone, so it does
not matter who writes it, or that two do; what only one process may touch has that attempt's mark in its name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.errors import StoreError
from tokenmill.files import create_durably, sync_directory, write_durably
from tokenmill.pipeline.locking import sweep_locks, try_lock
from tokenmill.pipeline.mirroring import Mirror
from tokenmill.pipeline.plan import InputFile, Plan
from tokenmill.pipeline.sharing import WHOLE, Share
from tokenmill.store.manifest import ParityInfo, ShardInfo, TokenizerInfo

__all__ = ["GateRecord", "Journal", "SavedPlan", "StoredReject", "TaskRecord"]


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
    stamps: list[int]
    """What these had when it was planned."""
    shards: dict[str, ShardInfo]
    num_documents_in: int
    num_bytes: int
    rejects: dict[str, int]
    num_lines: int
    counts_lines: bool
    """Lines of its rejects count from the start of its span, which later tasks must add up."""
    num_rerouted: int
    num_parsed: int

    def file_sizes(self) -> dict[str, int]:
        """The files of its shards and their sizes."""
        return {f"{s.name}{suffix}": file.bytes for s in self.shards.values() for suffix, file in s.files.items()}

    def modified(self, inputs: Sequence[InputFile]) -> set[int]:
        """Which of its inputs were touched since."""
        return {number for number, then in zip(self.inputs, self.stamps, strict=True) if inputs[number].stamp != then}


class SavedPlan(msgspec.Struct, frozen=True):
    """What a run was asked to do, as far as it decides the bytes of the store."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def inputs(self) -> list[InputFile]:
        """The inputs as they were when the run began."""
        return self.plan.inputs


class GateRecord(msgspec.Struct, frozen=True):
    """What the manifest will say of tokenizer and engine; the same from every rank."""

    tokenizer: TokenizerInfo
    engine: str
    version: str
    parity: ParityInfo | None
    versions: dict[str, str] = {}
    """Of other packages that decide the bytes of a store."""

    def differences(self, other: GateRecord) -> list[tuple[str, str]]:
        """The engine and packages that two processes do not have in common: what this one has, and the other."""
        pairs = [(f"{self.engine} {self.version}", f"{other.engine} {other.version}")]
        pairs += [(f"{n} {v}", f"{n} {other.versions.get(n, v)}") for n, v in self.versions.items()]
        return [(mine, theirs) for mine, theirs in pairs if mine != theirs]


class _StreamEnd(msgspec.Struct, frozen=True):
    """Which tasks a stream gave, by number, and the stamp of its input."""

    numbers: list[int]
    stamp: int


class Journal:
    """Reads and writes `OUT/.tasks/`, for a run or for one rank of it; `attempt` is a word that nobody else has.

    With a `mirror` the store is in a bucket: what counts of the journal is there, and a task's files go there first.
    """

    def __init__(self, folder: Path, share: Share = WHOLE, attempt: str = "", mirror: Mirror | None = None) -> None:
        self.mirror = mirror
        self.store = folder
        self.folder = folder / ".tasks"
        self.share = share
        self.attempt = attempt

    @property
    def mark(self) -> str:
        """What is in the names of files that only this attempt may touch."""
        return "-".join(part for part in (self.share.name, self.attempt) if part)

    def exists(self) -> bool:
        """Whether there is an unfinished run here."""
        return (self.folder / "plan.json").is_file()

    def begin(self, plan: SavedPlan) -> bool:
        """Write down what the run is to do, before any of it is done; False if another rank has just done so."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_directory(self.store)
        data = msgspec.json.encode(plan)
        there = self.mirror.create(f"{self.folder.name}/plan.json", data) if self.mirror is not None else None
        return create_durably(self.folder / "plan.json", there or data) and there is None

    def amend(self, plan: SavedPlan) -> None:
        """Write down that inputs were touched since the run began."""
        self._write("plan.json", plan)

    def _write(self, name: str, entry: msgspec.Struct) -> None:
        data = msgspec.json.encode(entry)
        if self.mirror is not None:
            self.mirror.put(f"{self.folder.name}/{name}", data)
        write_durably(self.folder / name, data)

    def saved_plan(self) -> SavedPlan:
        """What the run that began here was asked to do."""
        try:
            return msgspec.json.decode((self.folder / "plan.json").read_bytes(), type=SavedPlan)
        except (msgspec.MsgspecError, OSError) as error:
            raise StoreError(
                f"{self.folder / 'plan.json'} is damaged ({error}); start again with --overwrite"
            ) from None

    def keep_gate(self, record: GateRecord) -> None:
        """Remember what the gate found, for whoever writes the manifest."""
        self._write("gate.json", record)

    def enter_gate(self, record: GateRecord) -> GateRecord:
        """Remember what the gate found, unless that is known already; gives what is known."""
        data = msgspec.json.encode(record)
        if self.mirror is None:
            create_durably(self.folder / "gate.json", data)
        else:
            there = self.mirror.create(f"{self.folder.name}/gate.json", data)
            write_durably(self.folder / "gate.json", there or data)
        known = self.gate()
        if known is None:
            self.keep_gate(record)
        return known or record

    def gate(self) -> GateRecord | None:
        """What the gate found, if it was held."""
        return _read(self.folder / "gate.json", GateRecord)

    def commit(self, record: TaskRecord) -> None:
        """Enter a task whose shards are durable."""
        data = msgspec.json.encode(record)
        if self.mirror is not None:
            self._commit_to(self.mirror, record, data)
        write_durably(self.folder / f"{record.name}.json", data)

    def _commit_to(self, mirror: Mirror, record: TaskRecord, data: bytes) -> None:
        """Upload the files of a task whole, then create its entry; the files are not needed here any more."""
        shards = record.file_sizes()
        rejects = [f"{self.folder.name}/{self.rejects_path(record.name).name}"] if record.rejects else []
        made = list(record.shards.values())
        if mirror.is_wanted(made):
            mirror.upload(self.store, [*shards, *rejects])
        if mirror.is_wanted(made):
            mirror.commit(
                f"{self.folder.name}/{record.name}.json",
                data,
                lambda there: msgspec.json.decode(there, type=TaskRecord).shards == record.shards,
            )
        for name in shards:
            (self.store / name).unlink()

    def receive(self, record: TaskRecord) -> None:
        """Have an entry here that another machine made; a directory is shared, and has it."""
        if self.mirror is not None:
            (self.folder / f"{record.name}.json").write_bytes(msgspec.json.encode(record))

    def files(self) -> set[str]:
        """The names of its files as they are now, whoever made them; none where the run is finished."""
        if self.mirror is not None:
            return self.mirror.journal()
        try:
            with os.scandir(self.folder) as found:
                return {entry.name for entry in found}
        except FileNotFoundError:
            return set()

    def names(self) -> list[str]:
        """The tasks that have an entry, in input order."""
        names = (path.stem for path in self.folder.glob("[0-9]*-[0-9]*.json"))
        return sorted(names, key=lambda name: [int(part) for part in name.split("-")])

    def record(self, name: str) -> TaskRecord | None:
        """The entry of a task; one that cannot be read is no entry."""
        return _read(self.folder / f"{name}.json", TaskRecord)

    def published(self, name: str) -> TaskRecord | None:
        """The same as it is now, wherever it was made."""
        if self.mirror is None:
            return self.record(name)
        data = self.mirror.read(f"{self.folder.name}/{name}.json")
        return msgspec.json.decode(data, type=TaskRecord) if data is not None else None

    def records(self, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[TaskRecord]:
        """The finished tasks, or some of them by name, in input order."""
        for name in self.names():
            record = self.record(name) if wanted(name) else None
            if record is not None:
                yield record

    def forget(self, record: TaskRecord) -> None:
        """Take back a task, so that it is done again."""
        if self.mirror is not None:
            self.mirror.delete([f"{self.folder.name}/{record.name}.json"])
        (self.folder / f"{record.name}.json").unlink(missing_ok=True)
        self.rejects_path(record.name).unlink(missing_ok=True)

    def is_whole(self, record: TaskRecord) -> bool:
        """Whether the files of a task are still there, with their sizes."""
        files = record.file_sizes().items()
        if self.mirror is not None:
            return all(self.mirror.has(name, size) for name, size in files)
        try:
            return all((self.store / name).stat().st_size == size for name, size in files)
        except OSError:
            return False

    def clear(self) -> None:
        """Forget everything, but stay: without a journal the directory would count as somebody else's."""
        for path in self.folder.glob("*.json*"):
            path.unlink()
            if self.mirror is not None:
                self.mirror.delete([f"{self.folder.name}/{path.name}"])

    def rejects_path(self, name: str) -> Path:
        """Where a task keeps its rejects until they are joined."""
        return self.folder / f"{name}.rejects.jsonl"

    def slot(self, number: int) -> Path:
        """A file for decompressed text on its way from a feeder to a worker."""
        return self._spool() / f"slot-{number}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held by one worker at a time, for documents that do not fit a worker's share of memory."""
        with (self._spool() / "alone.lock").open("wb") as file:
            try_lock(file, fcntl.LOCK_EX)
            yield

    def _spool(self) -> Path:
        folder = self.folder / "spool" / self.mark
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def end_stream(self, input: int, numbers: list[int], stamp: int) -> None:
        """Note that a stream was read to its end, so that a resumed run need not read it again."""
        self._write(self._stream_path(input).name, _StreamEnd(numbers, stamp))

    def ended_stream(self, input: int) -> list[int] | None:
        """Which tasks a stream gave; None if it was not read to its end."""
        end = _read(self._stream_path(input), _StreamEnd)
        return end.numbers if end is not None else None

    def ended_streams(self, inputs: Sequence[InputFile]) -> dict[int, list[int]]:
        """Inputs whose stream was read to its end and that nobody has touched since, and which tasks they gave."""
        found = {}
        for path in self.folder.glob("stream-*.json"):
            end, number = _read(path, _StreamEnd), int(path.stem.removeprefix("stream-"))
            if end is not None and number < len(inputs) and inputs[number].stamp == end.stamp:
                found[number] = end.numbers
        return found

    def _stream_path(self, input: int) -> Path:
        return self.folder / f"stream-{input:05d}.json"

    def sweep(self, done: dict[str, TaskRecord]) -> None:
        """Remove what killed attempts left: temporary files, spooled text, shards without an entry.

        A rank removes what its own attempts left under their marks, and nothing else: another rank may be at work, and
        is about to enter what has no entry yet.
        """
        if self.share.is_whole:
            self.sweep_all(done)
        else:
            self.sweep_own()

    def sweep_all(self, done: dict[str, TaskRecord]) -> None:
        """The same for everybody's attempts, when nobody is at work."""
        shutil.rmtree(self.folder / "spool", ignore_errors=True)
        for folder in (self.folder, self.store, self.store / "tokenizer"):
            for path in folder.glob("*.tmp"):
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.rejects.jsonl"):
            if path.name.removesuffix(".rejects.jsonl") not in done:
                path.unlink(missing_ok=True)
        known = {shard.name for record in done.values() for shard in record.shards.values()}
        for split in ("train", "val"):
            for path in (self.store / split).glob("shard-*"):
                if path.name.endswith(".tmp") or f"{split}/{path.name.split('.')[0]}" not in known:
                    path.unlink(missing_ok=True)

    def sweep_own(self) -> None:
        """Remove what attempts of this rank left under their marks."""
        owner = self.share.name
        for path in (self.folder / "spool").glob(f"{owner}-*"):
            shutil.rmtree(path, ignore_errors=True)
        for folder in (self.folder, self.store / "train", self.store / "val"):
            for path in folder.glob(f"*.{owner}-*.tmp"):
                path.unlink(missing_ok=True)

    def sweep_finished(self) -> None:
        """Remove what a run leaves that was killed after the manifest was written."""
        self.remove()
        for path in self.store.glob("*.tmp"):
            path.unlink(missing_ok=True)
        sweep_locks(self.store)

    def remove(self) -> None:
        """The run is finished: the manifest says everything that is still of use."""
        if self.mirror is not None:
            self.mirror.collect()
        shutil.rmtree(self.folder, ignore_errors=True)


EntryT = TypeVar("EntryT", bound=msgspec.Struct)


def _read(path: Path, kind: type[EntryT]) -> EntryT | None:
    """An entry; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
