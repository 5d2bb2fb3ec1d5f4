"""How commands print: a progress bar on stderr, a console and JSON on stdout."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.display import Advance

__all__ = ["console", "exit_when_interrupted", "fail", "print_json", "progress"]

SIGNALLED = 128
"""A program that a signal ended exits with this and the number of the signal."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error on stderr and end the program."""
    bold, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{bold}error:{plain} {message}", file=sys.stderr)
    if code > SIGNALLED and any(not thread.daemon for thread in threading.enumerate()[1:]):
        # Python would wait for these threads, and one of them may be reading from a disk that does not answer.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def exit_when_interrupted() -> Iterator[None]:
    """Print what an interrupted run says. typer catches every `KeyboardInterrupt`, and would lose it."""
    from tokenmill.pipeline.signals import Interrupted

    try:
        yield
    except Interrupted as stopped:
        fail(str(stopped), SIGNALLED + stopped.signal_number)


@contextmanager
def progress() -> Iterator[Advance]:
    """Show a bar on stderr for stages of known size, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description:<20}"), BarColumn(30), TaskProgressColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance


def console() -> Console:
    """The console for tables and coloured text."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(value: Any) -> None:
    """Print one indented JSON object on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
