"""The journal of an unfinished run: `OUT/.tasks/`.

It holds the plan and settings of the run (`plan.json`), the result of the parity gate (`gate.json`), one small file
per finished task, and the rejects of that task. A task's entry is written after its shards are durable and named, so
an entry proves the shards; a shard without an entry is made again. The manifest replaces the directory.

Ranks of one run share a journal. Every file in it is renamed into place and depends on the run alone, so any rank may
write it, even two at the same time. If only one attempt may touch a file, the name of the file contains that attempt.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.errors import StoreError
from tokenmill.files import create_durably, sync_directory, write_durably
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.locks import lock_if_possible, sweep_locks
from tokenmill.pipeline.journal.mirror import Mirror, file_sizes
from tokenmill.pipeline.parity import SampledText
from tokenmill.pipeline.plan.ranks import WHOLE, Share
from tokenmill.pipeline.plan.tasks import Plan
from tokenmill.regular_files import UnfitFile, read_regular
from tokenmill.store.manifest import ParityInfo, ShardInfo, TokenizerInfo
from tokenmill.text_batch import Reject

__all__ = ["GateRecord", "Journal", "SavedPlan", "StoredReject", "TaskEntry", "TaskRecord"]


class StoredReject(Reject, frozen=True, kw_only=True, omit_defaults=True):
    """A reject as its task records it; `line` counts from the start of the task's span."""

    input: int


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The journal entry of a finished task: its shards, rejects and counts."""

    name: str
    input: int
    number: int
    inputs: list[int]
    stamps: list[int]
    """The stamps of these inputs when the task was planned."""
    shards: dict[str, ShardInfo]
    num_documents_in: int
    num_bytes: int
    rejects: dict[str, int]
    reject_bytes: int | None = None
    """The size of the file of its rejects; None in entries of tokenmill 0.1."""
    num_lines: int
    counts_lines: bool
    """Whether lines of its rejects count from the start of its span; lines of earlier tasks must be added."""
    num_rerouted: int
    num_parsed: int
    num_compared: int = 0
    """How many of its documents are compared with the reference."""
    compared_bytes: int = 0

    def modified(self, inputs: Sequence[InputFile]) -> set[int]:
        """Return which of its inputs were modified since."""
        return {number for number, then in zip(self.inputs, self.stamps, strict=True) if inputs[number].stamp != then}


class TaskEntry(TaskRecord, frozen=True, kw_only=True):
    """The record of a task as the journal keeps it: with the texts to compare, which few readers need."""

    sample: list[SampledText] = []


class SavedPlan(msgspec.Struct, frozen=True):
    """The plan and the content settings of a run, which together decide the bytes of the store."""

    settings: dict[str, Any]
    plan: Plan
    tokenizer: str = "another tokenizer"
    """Its name, for messages."""


class GateRecord(msgspec.Struct, frozen=True):
    """The tokenizer, engine and parity for the manifest; every rank must find the same."""

    tokenizer: TokenizerInfo
    engine: str
    version: str
    parity: ParityInfo | None
    versions: dict[str, str] = {}
    """Versions of other packages that affect the bytes of a store."""

    def differences(self, other: GateRecord) -> list[tuple[str, str]]:
        """Pair the versions of engine and packages that differ: this record's and the other's."""
        pairs = [(f"{self.engine} {self.version}", f"{other.engine} {other.version}")]
        pairs += [(f"{n} {v}", f"{n} {other.versions.get(n, v)}") for n, v in self.versions.items()]
        return [(mine, theirs) for mine, theirs in pairs if mine != theirs]


class _StreamEnd(msgspec.Struct, frozen=True):
    """The numbers of all tasks of a stream, and the stamp of its input."""

    numbers: list[int]
    stamp: int


class Journal:
    """Reads and writes `OUT/.tasks/`, for a run or for one rank of it; `attempt` is a unique word.

    With a `mirror`, the store is in a bucket, which has the authoritative journal; files of a task go there first.
    """

    def __init__(self, folder: Path, share: Share = WHOLE, attempt: str = "", mirror: Mirror | None = None) -> None:
        self.mirror = mirror
        self.store = folder
        self.folder = folder / ".tasks"
        self.share = share
        self.attempt = attempt
        self.attempt_name = "-".join(filter(None, (share.name, attempt)))
        """The part of a file name that reserves the file for this attempt."""
        self.spool = self.folder / "spool" / self.attempt_name
        """A folder for files that only this attempt uses, such as the text of streams."""

    def exists(self) -> bool:
        """Whether the directory has an unfinished run."""
        return (self.folder / "plan.json").is_file()

    def begin(self, plan: SavedPlan) -> bool:
        """Save the plan before the first task; return False if another rank has just saved it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_directory(self.store)
        return self._create("plan.json", plan)

    def amend(self, plan: SavedPlan) -> None:
        """Replace the saved plan because inputs were modified since the run began."""
        self._write("plan.json", plan)

    def _write(self, name: str, entry: msgspec.Struct) -> None:
        data = msgspec.json.encode(entry)
        if self.mirror is not None:
            self.mirror.put(f"{self.folder.name}/{name}", data)
        write_durably(self.folder / name, data)

    def _create(self, name: str, entry: msgspec.Struct) -> bool:
        """Write a file and return True; return False if it exists. A bucket decides for all machines."""
        data = msgspec.json.encode(entry)
        if self.mirror is None:
            return create_durably(self.folder / name, data)
        there = self.mirror.create(f"{self.folder.name}/{name}", data)
        write_durably(self.folder / name, there or data)
        return there is None

    def saved_plan(self) -> SavedPlan:
        """Read the saved plan of the run."""
        try:
            return msgspec.json.decode(read_regular(self.folder / "plan.json"), type=SavedPlan)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"{self.folder / 'plan.json'} is damaged ({reason}); start again with --overwrite"
            ) from None

    def save_gate(self, record: GateRecord) -> None:
        """Save the result of the gate for the manifest."""
        self._write("gate.json", record)

    def save_gate_once(self, record: GateRecord) -> GateRecord | None:
        """Save the result of the gate and return None; if an attempt has saved one before, return that."""
        if self._create("gate.json", record):
            return None
        known = self.gate()
        if known is None:
            # It is damaged.
            self.save_gate(record)
        return known

    def gate(self) -> GateRecord | None:
        """Read the result of the gate, if it has run."""
        return _read(self.folder / "gate.json", GateRecord)

    def commit(self, record: TaskEntry) -> None:
        """Write the entry of a task whose shards are durable."""
        data = msgspec.json.encode(record)
        if self.mirror is not None:
            self._commit_to(self.mirror, record, data)
        write_durably(self.folder / f"{record.name}.json", data)

    def _commit_to(self, mirror: Mirror, record: TaskRecord, data: bytes) -> None:
        """Upload the files of a task, then create its entry, then remove the local shards."""
        made = list(record.shards.values())
        shards = file_sizes(made)
        rejects = [f"{self.folder.name}/{self.rejects_path(record.name).name}"] if record.rejects else []
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

    def receive(self, record: TaskEntry) -> None:
        """Store an entry that another machine made; a shared directory already has it."""
        if self.mirror is not None:
            (self.folder / f"{record.name}.json").write_bytes(msgspec.json.encode(record))

    def files(self) -> set[str]:
        """List the names of all files in the journal, of all ranks; none if the run is finished."""
        if self.mirror is not None:
            return self.mirror.journal_names()
        with suppress(FileNotFoundError):
            return set(os.listdir(self.folder))  # noqa: PTH208
        return set()

    def names(self) -> list[str]:
        """List the tasks that have an entry, in input order."""
        names = (path.stem for path in self.folder.glob("[0-9]*-[0-9]*.json"))
        return sorted(names, key=lambda name: [int(part) for part in name.split("-")])

    def has_entry(self, name: str) -> bool:
        """Whether a task has a local entry."""
        return (self.folder / f"{name}.json").exists()

    def record(self, name: str) -> TaskRecord | None:
        """Read the local entry of a task; None if it is missing or damaged, or not the entry of this task."""
        record = _read(self.folder / f"{name}.json", TaskRecord)
        # The files that it names may be removed, so they must be this task's.
        is_own = (
            record is not None
            and record.name == name
            and all(
                shard.name == f"{split}/shard-{name}" and not any("/" in suffix for suffix in shard.files)
                for split, shard in record.shards.items()
            )
        )
        return record if is_own else None

    def sample(self, name: str) -> list[SampledText]:
        """Read the texts that a finished task sends to be compared."""
        entry = _read(self.folder / f"{name}.json", TaskEntry)
        return entry.sample if entry is not None else []

    def published(self, name: str) -> TaskRecord | None:
        """Read the current entry of a task, from the bucket if the store is in one."""
        if self.mirror is None:
            return self.record(name)
        data = self.mirror.read(f"{self.folder.name}/{name}.json")
        return msgspec.json.decode(data, type=TaskRecord) if data is not None else None

    def records(self, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[TaskRecord]:
        """Yield the entries of finished tasks whose names are wanted, in input order."""
        for name in self.names():
            record = self.record(name) if wanted(name) else None
            if record is not None:
                yield record

    def forget(self, record: TaskRecord) -> None:
        """Remove the entry, the rejects and the local shards of a task, so that it runs again."""
        if self.mirror is not None:
            self.mirror.delete([f"{self.folder.name}/{record.name}.json"])
        (self.folder / f"{record.name}.json").unlink(missing_ok=True)
        self.rejects_path(record.name).unlink(missing_ok=True)
        for name in file_sizes(record.shards.values()):
            (self.store / name).unlink(missing_ok=True)

    def is_whole(self, record: TaskRecord) -> bool:
        """Whether all shard files of a task, and the file of its rejects, exist with the right sizes."""
        files = file_sizes(record.shards.values())
        if record.rejects and record.reject_bytes is not None:
            files[f"{self.folder.name}/{self.rejects_path(record.name).name}"] = record.reject_bytes
        if self.mirror is not None:
            return all(self.mirror.has(name, size) for name, size in files.items())
        try:
            return all((self.store / name).stat().st_size == size for name, size in files.items())
        except OSError:
            return False

    def clear(self) -> None:
        """Remove all entries and shards but keep the folder, which marks the directory as a token store."""
        for path in self.folder.glob("*.json*"):
            path.unlink()
            if self.mirror is not None:
                self.mirror.delete([f"{self.folder.name}/{path.name}"])
        self.sweep_all([])

    def rejects_path(self, name: str) -> Path:
        """The file that keeps the rejects of a task until they are joined."""
        return self.folder / f"{name}.rejects.jsonl"

    @contextmanager
    def large_document_lock(self) -> Iterator[None]:
        """Let one worker at a time encode a document that exceeds a worker's share of memory."""
        self.spool.mkdir(parents=True, exist_ok=True)
        with (self.spool / "large-document.lock").open("wb") as file:
            lock_if_possible(file, fcntl.LOCK_EX)
            yield

    def end_stream(self, input: int, numbers: list[int], stamp: int) -> None:
        """Record that a stream was read to its end, so that a resumed run need not read it again."""
        self._write(self._stream_path(input).name, _StreamEnd(numbers, stamp))

    def reopen_stream(self, input: int) -> None:
        """Remove the record that a stream was read to its end, before it is read again.

        The last tasks of a damaged stream are withdrawn at its end; after a kill, they must not count as finished.
        """
        if self.mirror is not None:
            self.mirror.delete([f"{self.folder.name}/{self._stream_path(input).name}"])
        self._stream_path(input).unlink(missing_ok=True)

    def ended_stream(self, input: int) -> list[int] | None:
        """Return the task numbers of a stream; None if it was not read to its end."""
        end = _read(self._stream_path(input), _StreamEnd)
        return end.numbers if end is not None else None

    def ended_streams(self, inputs: Sequence[InputFile]) -> dict[int, list[int]]:
        """Map each input whose stream was read to its end, and not modified since, to its task numbers."""
        found = {}
        for path in self.folder.glob("stream-*.json"):
            end, number = _read(path, _StreamEnd), int(path.stem.removeprefix("stream-"))
            if end is not None and number < len(inputs) and inputs[number].stamp == end.stamp:
                found[number] = end.numbers
        return found

    def _stream_path(self, input: int) -> Path:
        return self.folder / f"stream-{input:05d}.json"

    def sweep(self, done: Iterable[TaskRecord] | None = None) -> None:
        """Remove the leftovers of killed attempts: temporary files, spooled text, shards of tasks that are not done.

        Without `done`, these are the tasks without an entry. A rank removes only files with names of its own attempts:
        another rank may be running and may be about to write the entry of a shard that has none yet.
        """
        if self.share.is_whole:
            self.sweep_all(self.records() if done is None else done)
        else:
            self.sweep_own()

    def sweep_all(self, done: Iterable[TaskRecord]) -> None:
        """Remove the leftovers of all ranks; no rank may be running."""
        shards = {record.name: [shard.name for shard in record.shards.values()] for record in done}
        shutil.rmtree(self.folder / "spool", ignore_errors=True)
        for folder in (self.folder, self.store, self.store / "tokenizer"):
            for path in folder.glob("*.tmp"):
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.rejects.jsonl"):
            if path.name.removesuffix(".rejects.jsonl") not in shards:
                path.unlink(missing_ok=True)
        known = {name for names in shards.values() for name in names}
        for split in ("train", "val"):
            for path in (self.store / split).glob("shard-*"):
                if path.name.endswith(".tmp") or f"{split}/{path.name.split('.')[0]}" not in known:
                    path.unlink(missing_ok=True)

    def sweep_own(self) -> None:
        """Remove the temporary files and spooled text of this rank's attempts."""
        owner = self.share.name
        for path in (self.folder / "spool").glob(f"{owner}-*"):
            shutil.rmtree(path, ignore_errors=True)
        for folder in (self.folder, self.store / "train", self.store / "val"):
            for path in folder.glob(f"*.{owner}-*.tmp"):
                path.unlink(missing_ok=True)

    def sweep_finished(self) -> None:
        """Remove the leftovers of a run that was killed after it wrote the manifest."""
        self.remove()
        for path in self.store.glob("*.tmp"):
            path.unlink(missing_ok=True)
        sweep_locks(self.store)

    def remove(self) -> None:
        """Remove the journal of a finished run, also from the bucket."""
        if self.mirror is not None:
            self.mirror.remove_orphans()
        shutil.rmtree(self.folder, ignore_errors=True)


EntryT = TypeVar("EntryT", bound=msgspec.Struct)


def _read(path: Path, kind: type[EntryT]) -> EntryT | None:
    """Read an entry; None if it is missing or damaged."""
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except (FileNotFoundError, UnfitFile, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
