"""Show how a run progresses: a live bar in a terminal, plain lines elsewhere, JSON lines, or nothing.

Displays write to stderr; results go to stdout. rich is imported only by the displays and tables that need it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import msgspec

from tokenmill.arguments import one_of
from tokenmill.display.snapshot import Machine, Preparation, Snapshot, WorkerMoment

__all__ = [
    "Advance",
    "Display",
    "DisplayName",
    "Draw",
    "Machine",
    "Preparation",
    "Silence",
    "Snapshot",
    "WorkerMoment",
    "as_display",
    "choose_display",
    "ignore_progress",
    "render",
]

LINE_SECONDS, EVENT_SECONDS = 5.0, 1.0
BAR_REFRESHES, MONITOR_REFRESHES = 4, 1
"""Per second. Drawing the monitor takes 3 to 8 ms of a core that workers need, and its figures change once a second."""

DisplayName = Literal["auto", "monitor", "json", "quiet"]
"""How a Python program names a display; the flags of the command line have the same names."""
Draw = Callable[[Any, int], Any]
"""Draws a snapshot for a terminal of the given width."""
Advance = Callable[[str, int, int], None]
"""Receives the progress of a tool: the stage, how much of it is done, and its total."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """An `Advance` that shows nothing."""


class Display(Protocol):
    """Where a run shows its progress and its messages."""

    def say(self, text: str, *, style: str = "") -> None:
        """Show a message once."""
        ...

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Show the current progress."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


class Silence:
    """A display that shows nothing."""

    def say(self, text: str, *, style: str = "") -> None:
        """Ignore the message."""

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Ignore the progress."""

    def close(self) -> None:
        """Do nothing."""


class _Periodic:
    """Prints a snapshot every few seconds, and also the last one if the run is complete."""

    def __init__(self, seconds: float, first_after: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic() - seconds + first_after
        self._unprinted: Snapshot | Preparation | None = None
        self._completed: type | None = None
        """What was printed as complete; nothing more is to be said of it."""

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Print the snapshot if the last one is old enough; print a step as it begins."""
        if isinstance(snapshot, Preparation) and snapshot.is_step:
            self._print(snapshot)
            return
        if snapshot.fraction == 1.0 and self._completed is type(snapshot):
            return
        self._unprinted = snapshot
        if time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._unprinted = None
            self._completed = type(snapshot) if snapshot.fraction == 1.0 else None
            self._print(snapshot)

    def close(self) -> None:
        """Print the last snapshot if it is complete and was not printed."""
        if self._unprinted is not None and self._unprinted.fraction == 1.0:
            self._completed = type(self._unprinted)
            self._print(self._unprinted)
            self._unprinted = None

    def _print(self, snapshot: Snapshot | Preparation) -> None:
        raise NotImplementedError


class PlainLines(_Periodic):
    """A line every few seconds, for logs and pipes; on request a second one about the machine."""

    def __init__(self, *, shows_machine: bool = False) -> None:
        super().__init__(LINE_SECONDS, first_after=1.0)
        self._shows_machine = shows_machine

    def say(self, text: str, *, style: str = "") -> None:
        """Print the message."""
        print(text, file=sys.stderr, flush=True)

    def _print(self, snapshot: Snapshot | Preparation) -> None:
        details = snapshot.details()
        self.say(f"{snapshot.line()}  ({details})" if details else f"{snapshot.line()} ...")
        if self._shows_machine and snapshot.machine is not None:
            self.say(f"        {snapshot.machine.line()}")


class JsonLines(_Periodic):
    """One JSON object per event, for programs."""

    def __init__(self) -> None:
        super().__init__(EVENT_SECONDS, first_after=0.0)

    def say(self, text: str, *, style: str = "") -> None:
        """Print a message event."""
        level = "error" if "red" in style else "warning" if "yellow" in style else "info"
        self._write({"event": "message", "text": text, "level": level})

    def _print(self, snapshot: Snapshot | Preparation) -> None:
        if isinstance(snapshot, Preparation) and snapshot.is_step:
            self._write({"event": "step", "action": snapshot.action})
            return
        rates = {"fraction": snapshot.fraction, "eta_seconds": snapshot.eta_seconds}
        event = "progress" if isinstance(snapshot, Snapshot) else "preparation"
        self._write({"event": event, **msgspec.to_builtins(snapshot), **rates})

    def _write(self, event: dict[str, Any]) -> None:
        print(json.dumps({"time": round(time.time(), 3), **event}), file=sys.stderr, flush=True)


class TerminalBar:
    """A live bar and two lines of figures, or whatever `draw` makes of a snapshot."""

    def __init__(self, draw: Draw | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        refreshes = BAR_REFRESHES if draw is None else MONITOR_REFRESHES
        self._live = Live(console=self._console, refresh_per_second=refreshes, transient=True)
        self._draw = draw or render

    def say(self, text: str, *, style: str = "") -> None:
        """Print the message above the bar."""
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Redraw the bar; the first snapshot starts it."""
        self._live.start()
        self._live.update(self._draw(snapshot, self._console.width))

    def close(self) -> None:
        """Remove the bar, if it was started; the command prints a summary in its place."""
        self._live.stop()


def render(snapshot: Snapshot | Preparation, width: int) -> Any:
    """Draw the bar and its figures for a terminal of the given width."""
    from rich.console import Group
    from rich.text import Text

    from tokenmill.display.tables import make_bar

    if isinstance(snapshot, Preparation) and snapshot.is_step:
        from rich.spinner import Spinner

        return Spinner("line", snapshot.line())
    # Leave room for the ^C that a terminal echoes: a line that wraps would not be cleared with the bar.
    bar = make_bar(snapshot.fraction, max(10, min(width - 8, 72)))
    return Group(bar, Text(snapshot.line(), style="bold"), Text(snapshot.details(), style="dim"))


def choose_display(*, log_json: bool = False, quiet: bool = False, draw: Draw | None = None) -> Display:
    """Choose the display that fits stderr; `draw` replaces the usual bar."""
    if quiet:
        return Silence()
    if log_json:
        return JsonLines()
    if sys.stderr.isatty():
        return TerminalBar(draw)
    if is_notebook():
        from tokenmill.display.notebook import NotebookBar

        return NotebookBar(draw or render)
    return PlainLines(shows_machine=draw is not None)


def as_display(display: Display | DisplayName) -> Display:
    """The display that a Python program names, or the one that it made itself."""
    if not isinstance(display, str):
        return display
    one_of(display, get_args(DisplayName), "display")
    draw: Draw | None = None
    if display == "monitor":
        from tokenmill.display.monitor import draw_monitor as draw
    return choose_display(log_json=display == "json", quiet=display == "quiet", draw=draw)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; a shell of IPython in a terminal has no kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
