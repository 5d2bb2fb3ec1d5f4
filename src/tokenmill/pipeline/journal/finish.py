"""Finish a run: turn the journal of tasks into the manifest.

Shards already have their names, so this copies and renames nothing. It joins the rejects in input order and writes the
manifest last. It needs only the journal, so any process on any machine can finish a run that many ranks share.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.engines import Tokenizer, open_tokenizer
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.files import sync_directory, write_durably
from tokenmill.formatting import plural
from tokenmill.pipeline.input_file import InputFile, check_unchanged
from tokenmill.pipeline.journal.attempts import read_attempts, write_run_file
from tokenmill.pipeline.journal.journal import GateRecord, Journal, SavedPlan, StoredReject, TaskRecord
from tokenmill.pipeline.journal.locks import Holder, find_directory, find_holders, sweep_locks, taking_turns
from tokenmill.pipeline.journal.mirror import pulled
from tokenmill.pipeline.journal.samples import compare_rest, start_parity_check
from tokenmill.pipeline.parity import ParityCheck
from tokenmill.pipeline.plan.ranks import Share, join_ranks, membership, ownership
from tokenmill.pipeline.plan.tasks import Plan
from tokenmill.pipeline.text_field import field_is_missing, missing_field
from tokenmill.readers import READERS
from tokenmill.regular_files import MOST_JSON_BYTES, open_regular
from tokenmill.remote.paths import input_path
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

__all__ = [
    "Completion",
    "Incomplete",
    "describe_gate",
    "finish",
    "finish_store",
    "list_missing",
    "package_version",
    "read_completion",
]

REJECTS = "rejects.jsonl"
ENTRY = re.compile(r"(\d+-\d+)\.json")
MOST_LINES = 16
MOST_NAMES = 4


class Incomplete(StoreError):
    """A run that cannot be finished yet; `details` lists what is missing, one line per rank."""

    def __init__(self, message: str, details: list[str]) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Completion:
    """Which tasks of a plan are done, and which are not."""

    done: list[str]
    missing: list[str]
    """Tasks without an entry, with an input that was modified since, or with a missing shard."""
    unread: list[str]
    """Streams that have not been read to the end; their number of tasks is unknown."""
    records: list[TaskRecord] = field(default_factory=list)
    """The entries of finished tasks, if they were read."""

    @property
    def is_complete(self) -> bool:
        """Whether the manifest can be written."""
        return not self.missing and not self.unread

    def __str__(self) -> str:
        num_tasks = len(self.done) + len(self.missing)
        if not num_tasks and self.unread:
            return "no task"
        return f"{len(self.done):,} of {'at least ' if self.unread else ''}{plural(num_tasks, 'task')}"


def list_missing(files: Collection[str], plan: Plan) -> Completion | None:
    """List what is missing by the names of the journal's files alone; None if they cover the plan.

    Every rank checks this when it ends. Reading the entries of a large run takes minutes, so only the last rank does.
    """
    missing = [task.name for task in plan.tasks if f"{task.name}.json" not in files]
    unread = [stream.name for stream in plan.streams if f"stream-{stream.name}.json" not in files]
    if not missing and not unread:
        return None
    is_known = membership(plan)
    names = (match[1] for match in map(ENTRY.fullmatch, files) if match is not None)
    return Completion([name for name in names if is_known(name)], missing, unread)


def read_completion(journal: Journal, plan: Plan) -> Completion:
    """Look up every task of a plan in the journal; if all have entries, check that their shards exist, too."""
    ended = journal.ended_streams(plan.inputs)
    expected = [task.name for task in plan.tasks]
    for stream in plan.streams:
        expected += map(stream.task_name, ended.get(stream.input, []))
    unread = Plan(plan.inputs, [], [stream for stream in plan.streams if stream.input not in ended])
    wanted, is_unread = set(expected), membership(unread)
    entered = journal.records(lambda name: name in wanted or is_unread(name))
    records = [record for record in entered if not record.modified(plan.inputs)]
    if not unread.streams and len(records) == len(expected):
        # Other ranks may have written them.
        if journal.mirror is not None:
            journal.mirror.names()
        records = [record for record in records if journal.is_whole(record)]
    done = {record.name: record for record in records}
    missing = [name for name in expected if name not in done]
    return Completion(list(done), missing, [stream.name for stream in unread.streams], records)


def describe_gate(tokenizer: Tokenizer, engine: str, parity: ParityInfo | None) -> GateRecord:
    """Describe tokenizer, engine and parity for the manifest; a reference engine has no parity result."""
    files = {name: FileInfo(len(data), hash_bytes(data)) for name, data in sorted(tokenizer.files.items())}
    info = TokenizerInfo(tokenizer.name, tokenizer.kind, tokenizer.sha256, tokenizer.vocab_size, files)
    is_compared = parity is not None and (parity.num_documents or parity.num_awkward)
    versions = {name: package_version(name) for name in ("tokenmill", "pyarrow")}
    return GateRecord(info, engine, package_version(engine), parity if is_compared else None, versions)


def finish(journal: Journal, saved: SavedPlan, records: list[TaskRecord]) -> Manifest:
    """Write rejects.jsonl and the manifest from the journal, then remove the journal; all tasks must be done."""
    gate = journal.gate()
    if gate is None:
        raise StoreError(f"{journal.folder} has no result of the parity gate; run the same tokenize command again")
    rejects = sum((Counter(record.rejects) for record in records), Counter[str]())
    if rejects:
        _check_kept(journal, records, rejects, saved.plan.inputs)
    journal.sweep_all(records)
    store = journal.store
    files = {}
    if rejects:
        files[REJECTS] = _join_rejects(journal, records, saved.plan.inputs)
    settings = saved.settings
    splits = {}
    for name in ["train", "val"] if settings["val-fraction"] > 0 else ["train"]:
        shards = [record.shards[name] for record in records if name in record.shards]
        splits[name] = SplitInfo(sum(s.num_documents for s in shards), sum(s.num_tokens for s in shards), shards)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        dtype=dtype_for(gate.tokenizer.vocab_size),
        tokenizer=gate.tokenizer,
        engine=EngineInfo(
            name=gate.engine,
            version=gate.version,
            parity=_add_tasks(gate.parity, records),
            num_rerouted=sum(record.num_rerouted for record in records),
        ),
        special_tokens=SpecialTokensInfo(
            bos_id=settings["bos"],
            eos_id=settings["eos"],
            in_text=settings["special-tokens"],
            num_parsed=sum(record.num_parsed for record in records),
        ),
        splits=splits,
        num_documents_in=sum(record.num_documents_in for record in records),
        num_rejects=sum(rejects.values()),
        rejects=dict(sorted(rejects.items())),
        files=files,
        settings=settings,
        inputs=[InputInfo(file.name, file.bytes, file.fingerprint) for file in saved.plan.inputs],
        holds="pairs" if "chosen-key" in settings else "prompts" if "prompts-only" in settings else msgspec.UNSET,
    )
    per_record = 2 if manifest.holds == "pairs" else 1
    assert manifest.num_documents_in == manifest.num_documents // per_record + manifest.num_rejects
    data = encode_sealed(manifest)
    if len(data) > MOST_JSON_BYTES:
        raise StoreError(
            f"{store} would have a manifest of {len(data):,} bytes, and at most {MOST_JSON_BYTES:,} are read; make "
            "several stores of these inputs, which can be opened as one"
        )
    if journal.mirror is not None:
        journal.mirror.finish(store, data)
    write_durably(store / MANIFEST, data)
    journal.remove()
    sweep_locks(store)
    return msgspec.json.decode(data, type=Manifest)


def _add_tasks(parity: ParityInfo | None, records: list[TaskRecord]) -> ParityInfo | None:
    """Add the documents that were compared while the tasks ran."""
    if parity is None:
        return None
    num_documents = sum(record.num_compared for record in records)
    num_bytes = sum(record.compared_bytes for record in records)
    return msgspec.structs.replace(parity, num_later_documents=num_documents, num_later_bytes=num_bytes)


def _check_kept(
    journal: Journal, records: list[TaskRecord], rejects: Mapping[str, int], inputs: list[InputFile]
) -> None:
    """Raise if every document was rejected, or if no record of a file has the text: that would look like a success."""
    if not any(record.shards for record in records):
        reason = min(rejects, key=lambda name: (-rejects[name], name))
        first = _first_reject(journal, records, reason)
        raise TokenmillError(
            f"all {sum(rejects.values()):,} documents were rejected, {rejects[reason]:,} of them as {reason}, so there "
            f"is no store; {inputs[first.input].shown}: {first.detail}; with other flags, run again with --overwrite"
        )
    of_one_file = (record for record in records if len(record.inputs) == 1)
    for number, parts in groupby(of_one_file, key=lambda record: record.input):
        own = list(parts)
        if any(record.shards for record in own):
            continue
        missing = field_is_missing(sum((Counter(record.rejects) for record in own), Counter[str]()))
        if missing is not None:
            raise missing_field(inputs[number], _first_reject(journal, own, missing).detail)


def _first_reject(journal: Journal, records: Iterable[TaskRecord], reason: str) -> StoredReject:
    path = next(journal.rejects_path(record.name) for record in records if reason in record.rejects)
    with open_regular(path) as lines:
        stored = (msgspec.json.decode(line, type=StoredReject) for line in lines)
        return next(reject for reject in stored if reject.reason == reason)


def finish_store(store: str | Path) -> Manifest:
    """Write the manifest of a run whose tasks are all done; its inputs need not exist on this machine.

    A finished store stays as it is. Ranks may still be running: they have no work left and find the store finished.
    """
    if isinstance(store, str) and is_remote(store):
        with pulled(store) as (folder, mirror):
            return _finish_run(Journal(folder, mirror=mirror))
    return _finish_run(Journal(find_directory(store)))


def _finish_run(journal: Journal) -> Manifest:
    store = journal.store
    is_finished, is_writable = (store / MANIFEST).exists(), os.access(store, os.W_OK)
    if is_finished and not (is_writable and journal.folder.exists()):
        # A run that was killed right after it wrote the manifest may have left some.
        sweep_locks(store)
        return read_manifest(store)
    if not is_finished and not journal.exists():
        return read_manifest(store)
    with taking_turns(store) if is_writable else nullcontext():
        if (store / MANIFEST).exists():
            if is_writable:
                journal.sweep_finished()
            return read_manifest(store)
        saved = journal.saved_plan()
        completion = read_completion(journal, saved.plan)
        holders = find_holders(store)
        if completion.is_complete and not is_writable:
            raise StoreError(
                f"{store} has all of its tasks but is read-only here; run tokenmill finish where it can be written"
            )
        if not completion.is_complete or any(holder.share.is_whole for holder in holders):
            raise _describe_missing(journal, saved.plan, completion, holders)
        check_unchanged(file for file in saved.plan.inputs if input_path(file.path).exists())
        compare_rest(journal, completion.records, saved.plan.inputs, lambda: _start_parity_check(journal, saved))
        write_run_file(store, read_attempts(store), saved.plan.inputs)
        return finish(journal, saved, completion.records)


def _start_parity_check(journal: Journal, saved: SavedPlan) -> ParityCheck:
    if journal.mirror is not None:
        journal.mirror.pull_tokenizer(journal.store)
    tokenizer = open_tokenizer(journal.store / "tokenizer", name="tokenizer")
    return start_parity_check(tokenizer, saved.settings["special-tokens"])


def _describe_missing(journal: Journal, plan: Plan, completion: Completion, holders: list[Holder]) -> Incomplete:
    """Say which ranks have which tasks left; the number of ranks is that of the ranks that run now, or ran last."""
    store = journal.store
    attempts = read_attempts(store)
    size = holders[0].share.world_size if holders else attempts[-1].world_size if attempts else 1
    message = f"{store} is not complete: {completion} {'is' if str(completion) == 'no task' else 'are'} done; "
    missing = _describe_ranges(plan, completion, ownership(plan, size))
    if size == 1:
        advice = f"wait for {holders[0]}" if holders else "run the same tokenize command again to do the rest"
        return Incomplete(message + advice, missing.get(0, []))
    running = {holder.share.rank: str(holder) for holder in holders}
    idle = join_ranks(rank for rank in missing if rank not in running)
    advice = "wait for them"
    if idle:
        which = f"--rank {idle}" if idle.isdecimal() else f"--rank N, for N in {idle}"
        advice = f"run the same tokenize command with --world-size {size} and {which}"
    details = {rank: [f"{running.get(rank, Share(rank, size))}: {line}" for line in missing[rank]] for rank in missing}
    return Incomplete(message + advice, _shorten(details))


def _shorten(details: dict[int, list[str]]) -> list[str]:
    """Keep the lines of the first ranks, and count the other ranks."""
    lines: list[str] = []
    is_long = sum(map(len, details.values())) > MOST_LINES
    for number, rank in enumerate(sorted(details)):
        if is_long and len(lines) + len(details[rank]) >= MOST_LINES:
            return [*lines, f"and {len(details) - number:,} more ranks"]
        lines += details[rank]
    return lines


def _describe_ranges(plan: Plan, completion: Completion, owner: Callable[[str], int]) -> dict[int, list[str]]:
    """List what each rank has left in one or two lines; consecutive tasks of an input form a range."""
    ranges: dict[int, list[list[str]]] = defaultdict(list)
    for name in completion.missing:
        own = ranges[owner(name)]
        if own and _follows(own[-1][-1], name):
            own[-1].append(name)
        else:
            own.append([name])
    lines: dict[int, list[str]] = defaultdict(list)
    for rank, own in ranges.items():
        count = sum(map(len, own))
        shown = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in own]
        lines[rank].append(f"{count:,} task{'s' if count > 1 else ''} not done: {_enumerate(shown)}")
    unread: dict[int, list[str]] = defaultdict(list)
    names = {stream.name: plan.inputs[stream.input].name for stream in plan.streams}
    for name in completion.unread:
        unread[owner(name)].append(names[name])
    for rank, own_files in unread.items():
        ends = "its end" if len(own_files) == 1 else "their ends"
        lines[rank].append(f"{_enumerate(own_files)} not read to {ends}")
    return lines


def _enumerate(words: list[str]) -> str:
    shown = ", ".join(words[:MOST_NAMES])
    return shown if len(words) <= MOST_NAMES else f"{shown} and {len(words) - MOST_NAMES:,} more"


def _follows(before: str, name: str) -> bool:
    (input, number), (next_input, next_number) = before.split("-"), name.split("-")
    return input == next_input and int(number) + 1 == int(next_number)


def _join_rejects(journal: Journal, records: list[TaskRecord], inputs: list[InputFile]) -> FileInfo:
    """Write one line per reject in input order, with line numbers that count from the start of the input."""
    target = journal.store / REJECTS
    temporary = target.with_suffix(f".jsonl.{os.urandom(8).hex()}.tmp")
    lines_before: Counter[int] = Counter()
    with temporary.open("wb") as out:
        for record in records:
            path = journal.rejects_path(record.name)
            if record.rejects:
                with open_regular(path) as stored:
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
    unit = READERS[file.format].unit
    number = reject.position if unit == "row" else reject.line + lines_before
    row[unit] = number + 1 if reject.line >= 0 else None
    if unit == "line":
        # For an array, positions count bytes of the lines that the reader made of it, which the user never sees.
        row["byte"] = reject.position
    row |= {"reason": reject.reason, "detail": reject.detail}
    if reject.num_documents > 1:
        row["documents"] = reject.num_documents
    return msgspec.json.encode(row) + b"\n"


def package_version(engine: str) -> str:
    """Look up the installed version of the library that an engine uses."""
    package = {"huggingface": "tokenizers", "bytes": "tokenmill", "wordcache": "tokenmill"}.get(engine, engine)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
