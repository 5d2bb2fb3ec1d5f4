"""`status`: how a run goes or went, seen from outside: from any terminal, while it runs, after it died.

A running process is known by the lock it holds, not by its number, which may belong to another
program by now. Reading takes nothing from the run and changes nothing.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokenmill.errors import StoreError
from tokenmill.monitoring import render_machine
from tokenmill.pipeline.observer import AttemptInfo, RunInfo
from tokenmill.progress import Snapshot, format_bytes, format_count, format_seconds
from tokenmill.store.manifest import MANIFEST, Manifest, decode_sealed, read_manifest

__all__ = ["Status", "read_status", "render_status"]

State = Literal["finished", "running", "stopped"]

BAR_COLUMNS = 78
QUIET_SECONDS = 15.0
"""A running attempt writes its progress every second; silence for this long is worth a word."""
STYLES: dict[State, str] = {"finished": "bold green", "running": "bold cyan", "stopped": "bold yellow"}


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a store, finished or not."""

    folder: str
    state: State
    pid: int | None = None
    """The process that holds the store while it runs."""
    attempts: list[AttemptInfo] = []
    """Earlier ones first; the last one is the one that runs, if any does and has begun to work."""
    is_starting: bool = False
    """The running process has not begun to work: it reads its inputs and checks its engine."""
    seconds_silent: float = 0.0
    num_documents: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    notes: list[str] = []

    @property
    def last(self) -> Snapshot | None:
        """The last moment of the last attempt."""
        return self.attempts[-1].last if self.attempts else None


def read_status(folder: Path) -> Status:
    """Find out where a store stands; a directory that is none is a `StoreError`."""
    if not folder.is_dir():
        raise StoreError(f"{folder} does not exist; make a store with: tokenmill tokenize INPUT -o {folder}")
    holder = _lock_holder(folder)
    if (folder / MANIFEST).exists():
        return _read_finished(folder, read_manifest(folder))
    if not (folder / ".tasks").is_dir() and holder is None:
        if (folder / MANIFEST).exists():
            # It was finished between the two looks.
            return _read_finished(folder, read_manifest(folder))
        raise StoreError(f"{folder} is not a token store: it has neither {MANIFEST} nor an unfinished run")
    attempts = _read_attempts(folder)
    last = attempts[-1] if attempts else None
    moment = last.last if last else None
    is_running = holder is not None
    return Status(
        folder=str(folder),
        state="running" if is_running else "stopped",
        pid=holder,
        attempts=attempts,
        is_starting=is_running and (last is None or last.pid != holder),
        seconds_silent=max(0.0, time.time() - last.started - last.last.seconds) if last else 0.0,
        num_documents=moment.num_documents if moment else 0,
        num_tokens=moment.num_tokens if moment else 0,
        num_rejects=moment.num_rejects if moment else 0,
    )


def _read_finished(folder: Path, manifest: Manifest) -> Status:
    path = folder / "run.json"
    attempts: list[AttemptInfo] = []
    notes = []
    try:
        attempts = decode_sealed(path.read_bytes(), RunInfo, path).attempts
    except FileNotFoundError:
        notes.append("no run.json: how the run went is not known")
    except (StoreError, UnicodeDecodeError):
        notes.append("run.json is damaged: how the run went is not known")
    return Status(
        folder=str(folder),
        state="finished",
        attempts=attempts,
        num_documents=manifest.num_documents,
        num_tokens=manifest.num_tokens,
        num_rejects=manifest.num_rejects,
        notes=notes,
    )


def _read_attempts(folder: Path) -> list[AttemptInfo]:
    try:
        return msgspec.json.decode((folder / ".tasks" / "progress.json").read_bytes(), type=list[AttemptInfo])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []


def _lock_holder(folder: Path) -> int | None:
    """The process that holds the store, 0 if it holds it and does not say which; None: nobody does."""
    try:
        with (folder / ".lock").open("rb", buffering=0) as file:
            try:
                # Shared and given back at once: it can only be had when no run is there to be disturbed.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read(32).decode("ascii", "replace").strip()
                return int(text) if text.isdecimal() else 0
    except OSError:
        pass
    return None


def render_status(status: Status) -> RenderableType:
    """The state in one line, a bar, the figures, and what to do next; fits 80 columns."""
    title = Text.assemble((status.state, STYLES[status.state]), "  ", status.folder)
    parts: list[RenderableType] = [title]
    if status.state != "finished" and status.last is not None:
        # A bar alone does not end its line; in a table it does.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=1.0, completed=status.last.fraction, width=BAR_COLUMNS))
        parts.append(bar)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for name, value in _rows(status):
        table.add_row(name, Text(value))
    if status.state == "running" and status.last is not None and status.last.machine is not None:
        parts += [table, Text(), render_machine(status.last), Text()]
    else:
        parts.append(table)
    parts += [Text(_advice(status), style="bold" if status.state == "stopped" else "")]
    return Group(*parts)


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    moment = status.last
    if status.state == "running":
        yield "process", _describe_process(status)
    if moment is not None:
        done = f"{100 * moment.fraction:.1f}% of {format_bytes(moment.total_bytes)}"
        if status.state == "running" and not status.is_starting:
            left = moment.eta_seconds
            done += f", {'--:--' if left is None else format_seconds(left)} left"
        if status.state != "finished":
            yield "done", done
        speed = f"{moment.text_per_second / 1e6:.1f} MB/s, {format_count(moment.tokens_per_second)} tokens/s"
        yield "speed", f"{speed}, mostly {moment.bottleneck}"
    counted = f"{status.num_documents:,} documents, {status.num_tokens:,} tokens, {status.num_rejects:,} rejects"
    resumed = status.state != "finished" and moment is not None and moment.resumed_bytes
    yield "counts", f"{counted} in this attempt" if resumed else counted
    if moment is not None:
        workers = f", {moment.num_workers} workers busy" if status.state == "running" else ""
        peak = max(attempt.peak_memory_bytes for attempt in status.attempts)
        memory = f"{format_bytes(moment.memory_bytes)} now, " if status.state == "running" else ""
        yield "tasks", f"{moment.num_tasks_done:,} done{workers}"
        yield "memory", f"{memory}{format_bytes(peak)} at most, of {format_bytes(moment.memory_limit)}"
    if status.attempts:
        yield "attempts", _describe_attempts(status)
    for note in status.notes:
        yield "note", note


def _describe_process(status: Status) -> str:
    name = str(status.pid) if status.pid else "unknown"
    if status.is_starting:
        return f"{name}, starting: it reads the inputs and checks the engine"
    if status.attempts and status.attempts[-1].completed:
        return f"{name}, ending: it writes the manifest"
    if status.seconds_silent > QUIET_SECONDS:
        return f"{name}, not heard of for {format_seconds(status.seconds_silent)}"
    return name


def _describe_attempts(status: Status) -> str:
    seconds = sum(attempt.last.seconds for attempt in status.attempts)
    words = f"{len(status.attempts)}, {format_seconds(seconds)} in all"
    retried = sum(attempt.num_retried for attempt in status.attempts)
    recycled = sum(attempt.num_recycled for attempt in status.attempts)
    if retried:
        words += f", {retried} dead worker{'s' if retried > 1 else ''} replaced"
    if recycled:
        words += f", {recycled} cache{'s' if recycled > 1 else ''} recycled"
    return words


def _advice(status: Status) -> str:
    if status.state == "finished":
        return f"Next: tokenmill inspect {status.folder}"
    if status.state == "running":
        return "It may be stopped at any moment: the same command continues it."
    how = f"at {100 * status.last.fraction:.0f}%" if status.last else "before its first task was done"
    return f"Stopped {how}. {_describe_end(status)}To continue, run the same tokenize command again."


def _describe_end(status: Status) -> str:
    """What ended the last attempt: its own last words, or that it had none."""
    if not status.attempts:
        return ""
    last = status.attempts[-1]
    if last.reason is not None:
        return f"It said: {last.reason.rstrip('.')}. "
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.started + last.last.seconds))
    return f"It was killed, or the machine went down, at about {at}: it could not say why. "
