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
from shlex import quote
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from tokenmill.arguments import is_remote
from tokenmill.display import Snapshot
from tokenmill.display.monitor import render_machine
from tokenmill.display.tables import make_bar, make_facts, make_table
from tokenmill.errors import StoreError
from tokenmill.formatting import format_bytes, format_count, format_seconds, plural
from tokenmill.pipeline.journal.attempts import AttemptInfo, RunInfo, read_attempts
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.journal.locks import Holder, find_directory, find_holders
from tokenmill.pipeline.journal.mirror import find_unentered, pulled
from tokenmill.pipeline.plan.ranks import Share, divide, join_ranks
from tokenmill.pipeline.plan.tasks import Plan
from tokenmill.regular_files import UnfitFile
from tokenmill.store.manifest import MANIFEST, Manifest, decode_sealed, read_manifest, read_sealed

__all__ = ["RankStatus", "Status", "read_status", "render_status"]

State = Literal["finished", "running", "stopped"]
RankState = Literal["running", "done", "stopped", "not begun"]

BAR_COLUMNS = 78
MOST_RANKS = 16
QUIET_SECONDS = 15.0
"""A running attempt writes its progress every second; the status mentions a longer silence."""
SILENT_SECONDS = 90.0
"""To a bucket it writes every ten seconds, and may have to retry."""
SUMMED = (
    *("done_bytes", "resumed_bytes", "num_text_bytes", "num_documents", "num_tokens", "num_rejects"),
    *("num_workers", "memory_bytes", "memory_limit"),
)
STYLES: dict[State, str] = {"finished": "bold green", "running": "bold cyan", "stopped": "bold yellow"}


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
    """What the documents are called: of a finished store of preference pairs, pairs."""
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


def _describe_orphans(state: State, names: dict[str, int]) -> Iterator[str]:
    """Describe the files that a stopped run has left in a bucket, and what happens to them."""
    orphans = find_unentered(names) if state == "stopped" else []
    if orphans:
        size = format_bytes(sum(names[name] for name in orphans))
        some = f"{plural(len(orphans), 'file')}, {size}"
        yield f"orphans of unfinished tasks: {some}; the next run writes them again or removes them"


def _heard_of(attempts: list[AttemptInfo]) -> list[Holder]:
    """The processes of a store in a bucket that have reported recently."""
    last = {attempt.share: attempt for attempt in attempts}
    running = (attempt for attempt in last.values() if _is_heard(attempt, SILENT_SECONDS))
    return [Holder(attempt.share, attempt.pid, attempt.host) for attempt in running]


def _read_status(folder: Path, holders: list[Holder]) -> Status:
    # Look for it before the manifest, because the run may finish in between.
    is_unfinished = (folder / ".tasks").is_dir() or bool(holders)
    if (folder / MANIFEST).exists():
        return _read_finished(folder, read_manifest(folder))
    if not is_unfinished:
        raise StoreError(f"{folder} is not a token store: it has neither {MANIFEST} nor an unfinished run")
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
        **_counts(last.last if last else None),
    )


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
    sums = {key: sum(getattr(moment, key) for moment in moments) for key in SUMMED}
    return Snapshot(
        seconds=max(moment.seconds for moment in moments),
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


def render_status(status: Status) -> RenderableType:
    """Draw the state, a bar, the figures, and what to do next, in 80 columns."""
    parts: list[RenderableType] = [Text.assemble((status.state, STYLES[status.state]), "  ", status.folder)]
    if status.state != "finished" and status.last is not None:
        parts.append(make_bar(status.last.fraction, BAR_COLUMNS))
    parts.append(make_facts(_rows(status)))
    if status.state != "finished" and status.ranks:
        parts += [Text(), _render_ranks(status.ranks), Text()]
    elif status.state == "running" and status.last is not None and status.last.machine is not None:
        parts += [Text(), render_machine(status.last), Text()]
    parts += [Text(_advice(status), style="bold" if status.state == "stopped" else "")]
    return Group(*parts)


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    moment = status.last
    if status.ranks:
        states = Counter(rank.state for rank in status.ranks)
        yield "ranks", f"{len(status.ranks)}: " + ", ".join(f"{count} {state}" for state, count in states.items())
    elif status.state == "running":
        yield "process", _describe_process(status)
    if moment is not None:
        done = f"{100 * moment.fraction:.1f}% of {format_bytes(moment.total_bytes)}"
        if status.state == "running" and not status.is_starting:
            left = moment.eta_seconds
            done += f", {'--:--' if left is None else format_seconds(left)} left"
        if status.state != "finished":
            yield "done", done
        if moment.num_text_bytes:
            speed = f"{moment.text_per_second / 1e6:.1f} MB/s, {format_count(moment.tokens_per_second)} tokens/s"
            yield "speed", f"{speed}, mostly {moment.bottleneck}"
    counted = (
        f"{status.num_documents:,} {status.records_name}, {status.num_tokens:,} tokens, {status.num_rejects:,} rejects"
    )
    resumed = status.state != "finished" and moment is not None and moment.resumed_bytes
    yield "counts", f"{counted} in this attempt" if resumed else counted
    if moment is not None:
        workers = f", {plural(moment.num_workers, 'worker')} busy"
        peak = _peak_memory(status.attempts)
        memory = f"{format_bytes(moment.memory_bytes)} now, " if status.state == "running" else ""
        yield "tasks", f"{moment.num_tasks_done:,} done{workers if status.state == 'running' else ''}"
        yield "memory", f"{memory}{format_bytes(peak)} at most, of {format_bytes(moment.memory_limit)}"
    if status.attempts:
        yield "attempts", _describe_attempts(status)
    for note in status.notes:
        yield "note", note


def _peak_memory(attempts: list[AttemptInfo]) -> int:
    """The peak memory of the run. Ranks run in parallel, so theirs adds up; attempts run one after another."""
    peaks: Counter[Share] = Counter()
    for attempt in attempts:
        peaks[attempt.share] = max(peaks[attempt.share], attempt.peak_memory_bytes)
    sizes = {share.world_size for share in peaks}
    return max(sum(peak for share, peak in peaks.items() if share.world_size == size) for size in sizes)


def _render_ranks(ranks: list[RankStatus]) -> RenderableType:
    """One line per rank; of many ranks, those that need attention, then the slowest."""
    places: list[RankState] = ["stopped", "not begun", "running", "done"]
    urgent = sorted(ranks, key=lambda rank: (places.index(rank.state), rank.last.fraction if rank.last else 0.0))
    shown = ranks if len(ranks) <= MOST_RANKS else urgent[:MOST_RANKS]
    rows = []
    for rank in shown:
        done, speed = (f"{rank.last.fraction:.0%}", f"{rank.last.text_per_second / 1e6:.0f}") if rank.last else ("", "")
        process = f"{rank.pid or ''} {f'on {rank.host}' if rank.host else ''}".strip()
        rows.append((str(rank.rank), rank.state, done, speed, process))
    table = make_table(("rank", "state", "done", "MB/s", "process"), rows, left=("state", "process"))
    if len(shown) == len(ranks):
        return table
    return Group(table, Text(f"and {len(ranks) - len(shown)} more", style="dim"))


def _describe_process(status: Status) -> str:
    name = str(status.pid) if status.pid else "unknown"
    if status.is_starting:
        return f"{name}, starting: it reads the inputs and checks the engine"
    if status.attempts and status.attempts[-1].completed:
        return f"{name}, ending: it writes the manifest"
    if status.seconds_silent > QUIET_SECONDS:
        return f"{name}, silent for {format_seconds(status.seconds_silent)}"
    return name


def _describe_attempts(status: Status) -> str:
    seconds = sum(attempt.last.seconds for attempt in status.attempts)
    ranks = {attempt.rank for attempt in status.attempts} if status.all_ranks is not None else {}
    words = f"{len(status.attempts)}{f' of {len(ranks)} ranks' if ranks else ''}, {format_seconds(seconds)} in all"
    if retried := sum(attempt.num_retried for attempt in status.attempts):
        words += f", {plural(retried, 'dead worker')} replaced"
    if recycled := sum(attempt.num_recycled for attempt in status.attempts):
        words += f", {plural(recycled, 'cache')} recycled"
    return words


def _advice(status: Status) -> str:
    if status.state == "finished":
        return f"Next: tokenmill inspect {quote(status.folder)}"
    if status.ranks:
        return _advise_ranks(status)
    if status.state == "running":
        return "You may stop it at any moment: the same command resumes it."
    moment = status.last
    how = f"at {100 * moment.fraction:.0f}%" if moment and moment.num_tasks_done else "before its first task was done"
    return f"Stopped {how}. {_describe_end(status)}To resume, run the same tokenize command again."


def _advise_ranks(status: Status) -> str:
    """Say which ranks to start, and why those that ended early did so."""
    idle = [rank.rank for rank in status.ranks if rank.state in ("stopped", "not begun")]
    if not idle and status.state == "running":
        return "You may stop it at any moment: the same commands resume it."
    if not idle:
        return f"All ranks have ended. Next: tokenmill finish {quote(status.folder)}"
    reasons = {rank.reason for rank in status.ranks if rank.reason is not None}
    said = f"It said: {min(reasons).rstrip('.')}. " if reasons else ""
    flags = f"--rank RANK --world-size {len(status.ranks)}"
    return f"{said}To resume, run the same tokenize command with {flags}, for RANK in {join_ranks(idle)}."


def _describe_end(status: Status) -> str:
    """Say what ended the last attempt: its own message, or that it left none."""
    if not status.attempts:
        return ""
    last = status.attempts[-1]
    if last.cause is not None:
        return f"It said: {last.cause}. "
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.started + last.last.seconds))
    return f"It was killed, or the machine went down, at about {at}: it could not say why. "
