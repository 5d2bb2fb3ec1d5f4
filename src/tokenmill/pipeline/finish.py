"""Ending a run: the journal of tasks becomes the manifest.

Nothing is copied or renamed; shards already have their names. Rejects are joined in input
order, and the manifest is written last. The journal alone is enough, so that it does not matter
who ends a run that many processes share, or where.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import StoreError
from tokenmill.files import sync_directory, write_durably
from tokenmill.pipeline.journal import GateRecord, Journal, SavedPlan, StoredReject, TaskRecord
from tokenmill.pipeline.locking import Holder, find_holders, sweep_locks, taking_turns
from tokenmill.pipeline.mirroring import pulled
from tokenmill.pipeline.observer import read_attempts, write_run_file
from tokenmill.pipeline.plan import InputFile, Plan, check_unchanged
from tokenmill.pipeline.sharing import Share, divide, membership
from tokenmill.remote.paths import input_path, is_remote
from tokenmill.store.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    EngineInfo,
    FileInfo,
    InputInfo,
    Manifest,
    ParityInfo,
    SpecialTokensInfo,
    SplitInfo,
    TokenizerInfo,
    encode_sealed,
    hash_bytes,
    read_manifest,
)
from tokenmill.store.shard import dtype_for, hash_file

__all__ = ["Incomplete", "Stock", "describe_gate", "finish", "finish_store", "package_version", "take_stock"]

REJECTS = "rejects.jsonl"


class Incomplete(StoreError):
    """A run that cannot be finished yet; `details` say what is missing, a line for each rank."""

    def __init__(self, message: str, details: list[str]) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Stock:
    """How much of a plan is done."""

    records: list[TaskRecord]
    missing: list[str]
    """Tasks that nobody has done, whose inputs were touched since, or whose shards are gone."""
    unread: list[str]
    """Streams that nobody has read to their ends: how many tasks they have is not known."""

    @property
    def is_complete(self) -> bool:
        """Whether the manifest can be written."""
        return not self.missing and not self.unread

    @property
    def num_done(self) -> int:
        """Tasks that are done."""
        return len(self.records)

    @property
    def num_tasks(self) -> int:
        """Tasks that are known."""
        return len(self.records) + len(self.missing)


def take_stock(journal: Journal, plan: Plan) -> Stock:
    """Look up every task of a plan in the journal; if all are there, look at their shards too."""
    ended = journal.ended_streams(plan.inputs)
    expected = [task.name for task in plan.tasks]
    for stream in plan.streams:
        expected += map(stream.task_name, ended.get(stream.input, []))
    unread = Plan(plan.inputs, [], [stream for stream in plan.streams if stream.input not in ended])
    wanted, is_unread = set(expected), membership(unread)
    entered = journal.records(lambda name: name in wanted or is_unread(name))
    records = [record for record in entered if not record.modified(plan.inputs)]
    if not unread.streams and len(records) == len(expected):
        records = _with_shards(journal, records)
    done = {record.name for record in records}
    return Stock(records, [name for name in expected if name not in done], [stream.name for stream in unread.streams])


def _with_shards(journal: Journal, records: list[TaskRecord]) -> list[TaskRecord]:
    """Entries that others made are believed when their files are there."""
    if journal.mirror is not None:
        journal.mirror.names()
    return [record for record in records if journal.is_whole(record)]


def describe_gate(tokenizer: Tokenizer, engine: str, parity: ParityInfo | None) -> GateRecord:
    """What has to be remembered of a run for its manifest; a reference is not compared with itself."""
    files = {name: FileInfo(len(data), hash_bytes(data)) for name, data in sorted(tokenizer.files.items())}
    info = TokenizerInfo(tokenizer.name, tokenizer.kind, tokenizer.sha256, tokenizer.vocab_size, files)
    is_compared = parity is not None and (parity.num_documents or parity.num_awkward)
    return GateRecord(info, engine, package_version(engine), parity if is_compared else None)


def finish(journal: Journal, saved: SavedPlan, records: list[TaskRecord]) -> Manifest:
    """Write rejects.jsonl and the manifest from the journal, then remove the journal; every task has to be done."""
    gate = journal.gate()
    if gate is None:
        raise StoreError(f"{journal.folder} has no result of the parity gate; run the same tokenize command again")
    journal.sweep_all({record.name: record for record in records})
    store = journal.store
    rejects: Counter[str] = Counter()
    for record in records:
        rejects.update(record.rejects)
    files = {}
    if rejects:
        files[REJECTS] = _join_rejects(journal, records, saved.inputs)
    settings = saved.settings
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        dtype=dtype_for(gate.tokenizer.vocab_size),
        tokenizer=gate.tokenizer,
        engine=EngineInfo(
            name=gate.engine,
            version=gate.version,
            parity=gate.parity,
            num_rerouted=sum(record.num_rerouted for record in records),
        ),
        special_tokens=SpecialTokensInfo(
            bos_id=settings["bos"],
            eos_id=settings["eos"],
            in_text=settings["special-tokens"],
            num_parsed=sum(record.num_parsed for record in records),
        ),
        splits=_splits(records, settings),
        num_documents_in=sum(record.num_documents_in for record in records),
        num_rejects=sum(rejects.values()),
        rejects=dict(sorted(rejects.items())),
        files=files,
        settings=settings,
        inputs=[InputInfo(file.name, file.bytes, file.fingerprint) for file in saved.inputs],
    )
    assert manifest.num_documents_in == manifest.num_documents + manifest.num_rejects
    data = encode_sealed(manifest)
    if journal.mirror is not None:
        journal.mirror.finish(store, data)
    write_durably(store / MANIFEST, data)
    journal.remove()
    sweep_locks(store)
    return msgspec.json.decode(data, type=Manifest)


def finish_store(store: str | Path) -> Manifest:
    """Write the manifest of a run whose tasks are all done; its inputs need not be here.

    A finished store is left alone. Ranks may be running: with nothing left to do, they find the store finished.
    """
    if isinstance(store, str) and is_remote(store):
        with pulled(store) as (folder, mirror):
            return _finish_run(Journal(folder, mirror=mirror))
    folder = Path(store)
    if not folder.is_dir():
        raise StoreError(f"{store} does not exist; make a store with: tokenmill tokenize INPUT -o {store}")
    return _finish_run(Journal(folder))


def _finish_run(journal: Journal) -> Manifest:
    store = journal.store
    if not journal.exists():
        return read_manifest(store)
    with taking_turns(store):
        if (store / MANIFEST).exists():
            journal.sweep_finished()
            return read_manifest(store)
        saved = journal.saved_plan()
        stock = take_stock(journal, saved.plan)
        holders = find_holders(store)
        if not stock.is_complete or any(holder.share.is_whole for holder in holders):
            raise _describe_missing(journal, saved.plan, stock, holders)
        check_unchanged(file for file in saved.inputs if input_path(file.path).exists())
        write_run_file(store, read_attempts(store))
        return finish(journal, saved, stock.records)


def _describe_missing(journal: Journal, plan: Plan, stock: Stock, holders: list[Holder]) -> Incomplete:
    """Who has what to do, as far as it is known how many ranks there are: from those that run, or ran last."""
    store = journal.store
    attempts = read_attempts(store)
    size = holders[0].share.world_size if holders else attempts[-1].world_size if attempts else 1
    least = "at least " if stock.unread else ""
    message = f"{store} is not complete: {stock.num_done:,} of {least}{stock.num_tasks:,} tasks are done; "
    if size == 1:
        advice = f"wait for {holders[0]}" if holders else "run the same tokenize command again to do the rest"
        return Incomplete(message + advice, _list_missing(plan, stock))
    details, idle = [], []
    running = {holder.share: holder for holder in holders}
    for rank, part in enumerate(divide(plan, size)):
        share = Share(rank, size)
        missing = _list_missing(part, stock)
        if missing and share not in running:
            idle.append(f"--rank {rank}")
        details += [f"{running.get(share, share)}: {line}" for line in missing]
    advice = (
        f"run the same tokenize command with --world-size {size} and {', '.join(idle)}" if idle else "wait for them"
    )
    return Incomplete(message + advice, details)


def _list_missing(plan: Plan, stock: Stock) -> list[str]:
    """The tasks of a plan that are missing: those that follow each other as a range, by input."""
    is_own = membership(plan)
    missing = [name for name in stock.missing if is_own(name)]
    ranges: list[list[str]] = []
    for name in missing:
        if ranges and _follows(ranges[-1][-1], name):
            ranges[-1].append(name)
        else:
            ranges.append([name])
    lines = []
    if missing:
        shown = ", ".join(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in ranges)
        lines.append(f"{len(missing):,} task{'s' if len(missing) > 1 else ''} not done: {shown}")
    names = {stream.name: plan.inputs[stream.input].name for stream in plan.streams}
    return lines + [f"{names[name]} not read to its end" for name in stock.unread if name in names]


def _follows(before: str, name: str) -> bool:
    (input, number), (next_input, next_number) = before.split("-"), name.split("-")
    return input == next_input and int(number) + 1 == int(next_number)


def _splits(records: list[TaskRecord], settings: dict[str, Any]) -> dict[str, SplitInfo]:
    names = ["train", "val"] if settings["val-fraction"] > 0 else ["train"]
    splits = {}
    for name in names:
        shards = [record.shards[name] for record in records if name in record.shards]
        splits[name] = SplitInfo(sum(s.num_documents for s in shards), sum(s.num_tokens for s in shards), shards)
    return splits


def _join_rejects(journal: Journal, records: list[TaskRecord], inputs: list[InputFile]) -> FileInfo:
    """One line per reject in input order, with line numbers of the whole input."""
    target = journal.store / REJECTS
    temporary = target.with_suffix(f".jsonl.{os.urandom(8).hex()}.tmp")
    lines_before: Counter[int] = Counter()
    with temporary.open("wb") as out:
        for record in records:
            path = journal.rejects_path(record.name)
            if record.rejects:
                with path.open("rb") as stored:
                    for line in stored:
                        reject = msgspec.json.decode(line, type=StoredReject)
                        out.write(_render_reject(reject, inputs[reject.input], lines_before[record.input]))
            if record.counts_lines:
                lines_before[record.input] += record.num_lines
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(target)
    sync_directory(journal.store)
    with target.open("rb") as file:
        return hash_file(file)


def _render_reject(reject: StoredReject, file: InputFile, lines_before: int) -> bytes:
    row: dict[str, object] = {"file": file.name}
    if file.format == "parquet":
        row["row"] = reject.position + 1 if reject.line >= 0 else None
    elif file.format == "json":
        # Its bytes are those of the lines that were made of it, which nobody else has.
        row["element"] = reject.line + lines_before + 1 if reject.line >= 0 else None
    else:
        row["line"] = reject.line + lines_before + 1 if reject.line >= 0 else None
        row["byte"] = reject.position
    row |= {"reason": reject.reason, "detail": reject.detail}
    if reject.num_documents > 1:
        row["documents"] = reject.num_documents
    return msgspec.json.encode(row) + b"\n"


def package_version(engine: str) -> str:
    """The installed version of the library behind an engine."""
    package = {"huggingface": "tokenizers", "bytes": "tokenmill"}.get(engine, engine)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
