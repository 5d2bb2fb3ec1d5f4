"""Showing how a run goes: a live bar in a terminal, plain lines elsewhere, JSON lines, or nothing.

Everything here goes to stderr; results go to stdout.
"""

from __future__ import annotations

import json
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

__all__ = [
    "Display",
    "JsonLines",
    "Machine",
    "PlainLines",
    "Preparation",
    "Silence",
    "Snapshot",
    "TerminalBar",
    "WorkerMoment",
    "choose_display",
    "format_bytes",
    "show_safely",
]

LINE_SECONDS = 5.0
BAR_REFRESHES, MONITOR_REFRESHES = 4, 1
"""A second. Drawing a monitor takes 3 to 8 ms of a core that workers want; what it shows is not newer anyway."""
JOINERS = "\u200c\u200d"


class WorkerMoment(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is at."""

    name: str
    pid: int
    task: str
    """Empty where it waits for one."""
    input: str
    task_seconds: float
    bytes_per_second: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a run makes of its machine: for those who want to know why it is not faster."""

    cores: list[float]
    """How busy each core is, from 0 to 1."""
    disk_free: int
    stages: dict[str, float]
    """The part of all workers' time that each stage took."""
    workers: list[WorkerMoment]
    slowest_task: str
    slowest_input: str
    slowest_seconds: float
    """Of the tasks that are done; 0 before the first one is."""

    def line(self) -> str:
        """The machine in one line."""
        busy = sum(self.cores) / max(1, len(self.cores))
        stages = ", ".join(f"{name} {share:.0%}" for name, share in self.stages.items() if share >= 0.005)
        return f"{len(self.cores)} cores {busy:.0%} busy, {format_bytes(self.disk_free)} of disk free; {stages}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a run."""

    seconds: float
    total_bytes: int
    done_bytes: int
    resumed_bytes: int
    num_text_bytes: int
    num_documents: int
    num_tokens: int
    num_rejects: int
    num_workers: int
    num_tasks_done: int
    memory_bytes: int
    memory_limit: int
    bottleneck: str
    machine: Machine | None = None

    @property
    def fraction(self) -> float:
        """How much of the input is done, earlier attempts included."""
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 1.0

    @property
    def text_per_second(self) -> float:
        """Bytes of text tokenized per second by this attempt."""
        return self.num_text_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this attempt."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time left at the speed of this attempt; what was resumed cost it nothing."""
        done_now = self.done_bytes - self.resumed_bytes
        if done_now <= 0 or self.seconds <= 0:
            return None
        return (self.total_bytes - self.done_bytes) * self.seconds / done_now

    def line(self) -> str:
        """The moment in one line of under 80 columns of figures."""
        eta = "--:--" if self.eta_seconds is None else format_seconds(self.eta_seconds)
        parts = [
            f"{100 * self.fraction:5.1f}%",
            f"ETA {eta}",
            f"{self.text_per_second / 1e6:.0f} MB/s",
            f"{format_count(self.tokens_per_second)} tok/s",
            f"{format_count(self.num_documents)} docs",
        ]
        if self.num_rejects:
            parts.append(f"{self.num_rejects} rejects")
        return "  ".join(parts)

    def details(self) -> str:
        """The rest: memory, workers and which stage takes the time."""
        workers = f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"
        memory = f"{format_bytes(self.memory_bytes)} of {format_bytes(self.memory_limit)}"
        return f"{workers}, memory {memory}, mostly {self.bottleneck}"


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """One moment before a run, while its inputs are fetched or written down."""

    action: str
    """`fetching`"""
    what: str
    """`3 of 14 files`"""
    unit: str
    """`bytes`, or what else is counted."""
    seconds: float
    total: int
    """0 where nobody knows."""
    done: int
    machine: None = None

    @property
    def fraction(self) -> float:
        """How much is done."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time left at the speed so far."""
        return (self.total - self.done) * self.seconds / self.done if self.total and self.done else None

    def line(self) -> str:
        """The moment in one line."""
        share = f"{100 * self.fraction:5.1f}%  " if self.total else ""
        eta = "" if self.eta_seconds is None else f"ETA {format_seconds(self.eta_seconds)}  "
        amount = self._show(self.done) + (f" of {self._show(self.total)}" if self.total else "")
        return f"{self.action}  {share}{eta}{amount}  {self._show(self.done / max(self.seconds, 1e-3))}/s"

    def details(self) -> str:
        """The rest."""
        return self.what

    def _show(self, amount: float) -> str:
        return format_bytes(amount) if self.unit == "bytes" else f"{format_count(amount)} {self.unit}"


Draw = Callable[[Any, int], Any]
"""Draws a moment for a terminal of some width."""


class Display(Protocol):
    """Where a run shows itself."""

    def say(self, text: str, *, style: str = "") -> None:
        """Tell the user something once."""
        ...

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Show the moment."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class Silence:
    """Shows nothing."""

    def say(self, text: str, *, style: str = "") -> None:
        """Say nothing."""

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to end."""


class PlainLines:
    """A line now and then, for logs and pipes; a second one about the machine where that is wanted."""

    def __init__(self, *, tells_machine: bool = False) -> None:
        self._tells_machine = tells_machine
        self._last = time.monotonic() - LINE_SECONDS + 1.0
        self._unsaid: Snapshot | Preparation | None = None

    def say(self, text: str, *, style: str = "") -> None:
        """Print the text as it is."""
        print(text, file=sys.stderr, flush=True)

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Print a line every few seconds."""
        self._unsaid = snapshot
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._print(snapshot)

    def close(self) -> None:
        """Print that all is done, if it is and was not said yet."""
        if self._unsaid is not None and self._unsaid.fraction == 1.0:
            self._print(self._unsaid)

    def _print(self, snapshot: Snapshot | Preparation) -> None:
        self._unsaid = None
        print(f"{snapshot.line()}  ({snapshot.details()})", file=sys.stderr, flush=True)
        if self._tells_machine and snapshot.machine is not None:
            print(f"        {snapshot.machine.line()}", file=sys.stderr, flush=True)


class JsonLines:
    """One JSON object per event, for programs."""

    def __init__(self) -> None:
        self._last = 0.0
        self._unsaid: Snapshot | Preparation | None = None

    def say(self, text: str, *, style: str = "") -> None:
        """Print a message event."""
        level = "error" if "red" in style else "warning" if "yellow" in style else "info"
        self._print({"event": "message", "text": text, "level": level})

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Print a progress event about once a second."""
        self._unsaid = snapshot
        if time.monotonic() - self._last >= 1.0:
            self._last = time.monotonic()
            self._tell(snapshot)

    def close(self) -> None:
        """Print the last event, if all is done and it was not printed yet."""
        if self._unsaid is not None and self._unsaid.fraction == 1.0:
            self._tell(self._unsaid)

    def _tell(self, snapshot: Snapshot | Preparation) -> None:
        self._unsaid = None
        rates = {"fraction": snapshot.fraction, "eta_seconds": snapshot.eta_seconds}
        event = "progress" if isinstance(snapshot, Snapshot) else "preparation"
        self._print({"event": event, **msgspec.to_builtins(snapshot), **rates})

    def _print(self, event: dict[str, Any]) -> None:
        print(json.dumps({"time": round(time.time(), 3), **event}), file=sys.stderr, flush=True)


class TerminalBar:
    """Figures that stay in place: a bar and two lines, or what `draw` makes of a moment and a width."""

    def __init__(self, draw: Draw | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        refreshes = BAR_REFRESHES if draw is None else MONITOR_REFRESHES
        self._live = Live(console=self._console, refresh_per_second=refreshes, transient=True)
        self._started = False
        self._draw = draw or render

    def say(self, text: str, *, style: str = "") -> None:
        """Print above the bar."""
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Redraw."""
        if not self._started:
            self._live.start()
            self._started = True
        self._live.update(self._draw(snapshot, self._console.width))

    def close(self) -> None:
        """Take the bar away; the summary follows."""
        if self._started:
            self._live.stop()
            self._started = False


def render(snapshot: Snapshot | Preparation, width: int) -> Any:
    """The bar and its figures, for a terminal of a width."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    # Room for the ^C that a terminal writes behind it: a line that wraps would be left over when the bar goes.
    table.add_row(ProgressBar(total=1.0, completed=snapshot.fraction, width=max(10, min(width - 8, 72))))
    table.add_row(Text(snapshot.line(), style="bold"))
    table.add_row(Text(snapshot.details(), style="dim"))
    return table


def choose_display(*, log_json: bool = False, quiet: bool = False, draw: Draw | None = None) -> Display:
    """The display that fits where stderr goes; `draw` is for those who want to see more than a bar."""
    if quiet:
        return Silence()
    if log_json:
        return JsonLines()
    return TerminalBar(draw) if sys.stderr.isatty() else PlainLines(tells_machine=draw is not None)


def format_bytes(size: float) -> str:
    """`1.4 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_count(count: float) -> str:
    """`12.3M`."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 999.5:
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def format_seconds(seconds: float) -> str:
    """`1:02:03`, or `02:03` below an hour."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def show_safely(text: str) -> str:
    """The text with control and direction characters as visible symbols, fit for any terminal."""
    return text if text.isprintable() else "".join(_symbol(character) for character in text)


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs":
        return character
    return f"<{code:04X}>"
