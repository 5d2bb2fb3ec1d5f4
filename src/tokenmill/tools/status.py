"""`status`: how a run is doing or how it ended, from any terminal.

A running process is recognised by the lock it holds, not by its process number, which another program may have by now.
A bucket has no locks; there, a process runs as long as it reports. Reading the status does not disturb the run.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Snapshot
from tokenmill.errors import StoreError
from tokenmill.formatting import format_bytes, plural
from tokenmill.machine import is_full
from tokenmill.pipeline.journal.attempts import AttemptInfo, RunInfo, read_attempts
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.journal.locks import Holder, find_directory, find_holders, is_lock
from tokenmill.pipeline.journal.mirror import find_unentered, pulled
from tokenmill.pipeline.plan.ranks import Share, divide
from tokenmill.pipeline.plan.tasks import Plan
from tokenmill.pipeline.settings import supervision_of
from tokenmill.regular_files import UnfitFile
from tokenmill.store.manifest import MANIFEST, Manifest, decode_sealed, read_manifest, read_sealed

__all__ = ["QUIET_SECONDS", "RankState", "RankStatus", "State", "Status", "find_status", "read_status"]

State = Literal["finished", "running", "stopped"]
RankState = Literal["running", "done", "stopped", "not begun"]

NOTHING = f"it has neither {MANIFEST} nor an unfinished run"
QUIET_SECONDS = 15.0
"""A running attempt writes its progress every second; the status mentions a longer silence."""
SILENT_SECONDS = 90.0
"""To a bucket it writes every ten seconds, and may have to retry."""
SUMMED = (
    *("done_bytes", "resumed_bytes", "num_text_bytes", "num_documents", "num_tokens", "num_rejects"),
    *("num_workers", "memory_bytes", "memory_limit", "input_rate", "text_rate", "token_rate"),
)


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank of a run that several processes share."""

    rank: int
    state: RankState
    pid: int | None = None
    host: str = ""
    last: Snapshot | None = None
    reason: str | None = None
    """Why it ended early, in a sentence."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a store, finished or not."""

    folder: str
    state: State
    pid: int | None = None
    """The process that holds the lock of the store."""
    attempts: list[AttemptInfo] = []
    """The oldest first. If a run has begun to work, the last one is its own."""
    is_starting: bool = False
    """Whether the running process still reads its inputs and checks its engine."""
    seconds_silent: float = 0.0
    num_documents: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    records_name: str = "documents"
    """What the documents are called: those of preference data are pairs."""
    ranks: list[RankStatus] = []
    """Empty if the run is not shared."""
    all_ranks: Snapshot | None = None
    """The last snapshots of all ranks, added up."""
    notes: list[str] = []

    @property
    def last(self) -> Snapshot | None:
        """The last snapshot of the last attempt, or of all ranks."""
        return self.all_ranks or (self.attempts[-1].last if self.attempts else None)


def read_status(store: str | Path) -> Status:
    """Read the status of a store in a directory or a bucket; raise `StoreError` if it is not a store."""
    if isinstance(store, str) and is_remote(store):
        with pulled(store, is_outline=True) as (folder, mirror):
            status = _read_status(folder, _heard_of(read_attempts(folder)))
            notes = [*status.notes, *_describe_orphans(status.state, mirror.names())]
            return msgspec.structs.replace(status, folder=mirror.url, notes=notes)
    folder = find_directory(store)
    return _read_status(folder, find_holders(folder))


def find_status(store: str | Path) -> Status | None:
    """Read the status of a store, or return None if no run has begun there: the place is missing or empty."""
    folder = Path(store)
    if not is_remote(store) and not folder.exists():
        return None
    try:
        return read_status(store)
    except StoreError as error:
        is_empty = is_remote(store) or (folder.is_dir() and all(is_lock(path.name) for path in folder.iterdir()))
        if not is_empty or NOTHING not in str(error):
            raise
        return None


def _describe_orphans(state: State, names: dict[str, int]) -> Iterator[str]:
    """Describe the files that a stopped run has left in a bucket, and what happens to them."""
    orphans = find_unentered(names) if state == "stopped" else []
    if orphans:
        size = format_bytes(sum(names[name] for name in orphans))
        some = f"{plural(len(orphans), 'file')}, {size}"
        yield f"orphans of unfinished tasks: {some}; the next run writes them again or removes them"


def _heard_of(attempts: list[AttemptInfo]) -> list[Holder]:
    """The processes of a store in a bucket that have reported recently."""
    last = {attempt.share: attempt for attempt in attempts}.values()
    return [Holder(one.share, one.pid, one.host) for one in last if _is_heard(one, SILENT_SECONDS)]


def _read_status(folder: Path, holders: list[Holder]) -> Status:
    # Look for it before the manifest, because the run may finish in between.
    is_unfinished = (folder / ".tasks").is_dir() or bool(holders)
    if (folder / MANIFEST).exists():
        return _read_finished(folder, read_manifest(folder))
    if not is_unfinished:
        full = "; its disk is full" if is_full(folder) else ""
        raise StoreError(f"{folder} is not a token store: {NOTHING}{full}")
    attempts = read_attempts(folder)
    world_size = holders[0].share.world_size if holders else attempts[-1].world_size if attempts else 1
    if world_size > 1:
        return _read_shared(folder, attempts, holders, world_size)
    last = attempts[-1] if attempts else None
    pid = holders[0].pid if holders else None
    return Status(
        folder=str(folder),
        state="running" if holders else "stopped",
        pid=pid,
        attempts=attempts,
        is_starting=bool(holders) and (last is None or last.pid != pid),
        seconds_silent=_seconds_silent(last) if last else 0.0,
        records_name=_records_name(Journal(folder)),
        **_counts(last.last if last else None),
    )


def _records_name(journal: Journal) -> str:
    """What an unfinished run counts: documents, pairs or prompts."""
    try:
        supervision = supervision_of(journal.saved_plan().settings)
    except StoreError:
        # The run has not made its plan.
        return "documents"
    return (supervision.holds if supervision is not None else None) or "documents"


def _counts(counted: Snapshot | Manifest | None) -> dict[str, Any]:
    """The documents, tokens and rejects of a store or a snapshot."""
    return {key: getattr(counted, key, 0) for key in ("num_documents", "num_tokens", "num_rejects")}


def _seconds_silent(attempt: AttemptInfo) -> float:
    return max(0.0, time.time() - (attempt.heard or attempt.started + attempt.last.seconds))


def _is_heard(attempt: AttemptInfo, patience: float = QUIET_SECONDS) -> bool:
    """Whether an attempt has not ended and has reported recently."""
    return attempt.completed is None and _seconds_silent(attempt) < patience


def _read_shared(folder: Path, attempts: list[AttemptInfo], holders: list[Holder], world_size: int) -> Status:
    """Add up the reports of the ranks that share a run."""
    journal = Journal(folder)
    try:
        plan = journal.saved_plan().plan
    except StoreError:
        # The run has not begun, or has just finished.
        plan = Plan([], [], [])
    parts = divide(plan, world_size)
    ranks = [_read_rank(Share(rank, world_size), parts[rank], attempts, holders) for rank in range(world_size)]
    total = sum(task.bytes for task in plan.tasks) + sum(plan.inputs[stream.input].bytes for stream in plan.streams)
    moments = [rank.last for rank in ranks if rank.last is not None]
    summed = _add_up(moments, total, len(journal.names())) if moments else None
    return Status(
        folder=str(folder),
        state="running" if any(rank.state == "running" for rank in ranks) else "stopped",
        attempts=attempts,
        is_starting=bool(holders) and not moments,
        ranks=ranks,
        all_ranks=summed,
        records_name=_records_name(journal),
        **_counts(summed),
    )


def _read_rank(share: Share, part: Plan, attempts: list[AttemptInfo], holders: list[Holder]) -> RankStatus:
    """Read the state of one rank. The lock of another machine may be invisible here, but its reports are not."""
    own = [attempt for attempt in attempts if attempt.share == share]
    last = own[-1] if own else None
    holder = next((holder for holder in holders if holder.share == share), None)
    state: RankState
    if holder is None and last is None:
        state = "not begun" if part.tasks or part.streams else "done"
    elif holder is not None or (last is not None and last.host != socket.gethostname() and _is_heard(last)):
        state = "running"
    else:
        state = "done" if last is not None and last.completed else "stopped"
    process = holder or last
    return RankStatus(
        rank=share.rank,
        state=state,
        pid=process.pid if process is not None else None,
        host=process.host if process is not None else "",
        last=last.last if last is not None else None,
        reason=last.reason if last is not None and state == "stopped" else None,
    )


def _add_up(moments: list[Snapshot], total_bytes: int, num_tasks_done: int) -> Snapshot:
    """One snapshot of all ranks. They work in parallel, so amounts add up and the time does not."""
    seconds = max(moment.seconds for moment in moments)
    sums = {key: sum(getattr(moment, key) for moment in moments) for key in SUMMED}
    return Snapshot(
        seconds=seconds,
        startup_seconds=seconds - max(moment.work_seconds for moment in moments),
        total_bytes=max(total_bytes, sum(moment.total_bytes for moment in moments)),
        num_tasks_done=num_tasks_done,
        bottleneck=Counter(moment.bottleneck for moment in moments).most_common(1)[0][0],
        **sums,
    )


def _read_finished(folder: Path, manifest: Manifest) -> Status:
    path = folder / "run.json"
    attempts: list[AttemptInfo] = []
    notes = []
    try:
        attempts = decode_sealed(read_sealed(path), RunInfo, path).attempts
    except FileNotFoundError:
        notes.append("no run.json: the history of the run is unknown")
    except (StoreError, UnfitFile):
        notes.append("run.json is damaged: the history of the run is unknown")
    shares = {attempt.share: attempt.last for attempt in attempts if attempt.share.world_size > 1}
    # If the number of ranks changed on the way, the ranks of the last number have resumed the work of the others.
    last = [moment for share, moment in shares.items() if share.world_size == attempts[-1].world_size]
    # Earlier ranks that were not restarted have done tasks, too; a task without a document has no shard.
    num_tasks = len({shard.name.partition("/")[2] for split in manifest.splits.values() for shard in split.shards})
    return Status(
        folder=str(folder),
        state="finished",
        attempts=attempts,
        all_ranks=_add_up(last, 0, max(num_tasks, sum(moment.num_tasks_done for moment in last))) if last else None,
        notes=notes,
        **_counts(manifest) | {"num_documents": manifest.num_records, "records_name": manifest.records_name},
    )
