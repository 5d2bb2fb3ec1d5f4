"""`status` on a terminal: the state, a bar, the figures, and what to do next, in 80 columns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from rich.console import Group, RenderableType
from rich.text import Text

from tokenmill.arguments import is_remote
from tokenmill.display.monitor import render_machine
from tokenmill.display.tables import make_bar, make_facts, make_table
from tokenmill.formatting import format_bytes, format_count, format_seconds, plural
from tokenmill.machine import is_full
from tokenmill.pipeline.journal.attempts import AttemptInfo
from tokenmill.pipeline.plan.ranks import Share, join_ranks
from tokenmill.tools.status import QUIET_SECONDS, RankState, RankStatus, State, Status

__all__ = ["render_status"]

BAR_COLUMNS = 78
MOST_RANKS = 16
STYLES: dict[State, str] = {"finished": "bold green", "running": "bold cyan", "stopped": "bold yellow"}


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
            rates = (moment.text_per_second, moment.tokens_per_second)
            if status.state == "running" and not status.is_starting:
                rates = (moment.text_rate, moment.token_rate)
            speed = f"{format_bytes(rates[0])}/s of text, {format_count(rates[1])} tokens/s"
            yield "speed", f"{speed}, mostly {moment.bottleneck}; start-up {moment.startup_seconds:.1f} s"
    of_records = plural(status.num_documents, status.records_name.removesuffix("s"))
    counted = f"{of_records}, {plural(status.num_tokens, 'token')}, {plural(status.num_rejects, 'reject')}"
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
        done = speed = ""
        if rank.last is not None:
            rate = rank.last.text_rate if rank.state == "running" else rank.last.text_per_second
            done, speed = f"{rank.last.fraction:.0%}", f"{rate / 1e6:.0f}"
        process = f"{rank.pid or ''} {f'on {rank.host}' if rank.host else ''}".strip()
        rows.append((str(rank.rank), rank.state, done, speed, process))
    table = make_table(("rank", "state", "done", "MB/s", "process"), rows, left=("state", "process"))
    hidden = Text(f"and {len(ranks) - len(shown)} more", style="dim")
    return table if len(shown) == len(ranks) else Group(table, hidden)


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
    moment = status.last
    if status.state == "finished":
        return f"Next: tokenmill inspect {quote(status.folder)}"
    if status.ranks:
        return _advise_ranks(status)
    if status.state == "running":
        return "You may stop it at any moment: the same command resumes it."
    how = f"at {100 * moment.fraction:.0f}%" if moment and moment.num_tasks_done else "before its first task was done"
    command = status.attempts[-1].command if status.attempts else ""
    again = f"run: {command}" if command else "run the same tokenize command again."
    return f"Stopped {how}. {_describe_end(status)}To resume, {again}"


def _advise_ranks(status: Status) -> str:
    """Say which ranks to start, and why those that ended early did so."""
    idle = [rank.rank for rank in status.ranks if rank.state in ("stopped", "not begun")]
    if not idle and status.state == "running":
        return "You may stop it at any moment: the same commands resume it."
    if not idle:
        return f"All ranks have ended. Next: tokenmill finish {quote(status.folder)}"
    reason = min((rank.reason for rank in status.ranks if rank.reason is not None), default=None)
    said = "" if reason is None else f"It said: {reason.rstrip('.')}. "
    flags = f"--rank RANK --world-size {len(status.ranks)}"
    return f"{said}To resume, run the same tokenize command with {flags}, for RANK in {join_ranks(idle)}."


def _describe_end(status: Status) -> str:
    """Say what ended the last attempt: its own message, or that it left none."""
    last = status.attempts[-1] if status.attempts else None
    if last is None or last.cause is not None:
        return f"It said: {last.cause}. " if last is not None else ""
    if not is_remote(status.folder) and is_full(Path(status.folder)):
        return "It could not say why, and its disk is full: make room first. "
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.started + last.last.seconds))
    return f"It was killed, or the machine went down, at about {at}: it could not say why. "
