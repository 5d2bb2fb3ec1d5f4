"""What commands print with: a bar on stderr, a console and JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "print_json", "progress"]


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for stages of known size; nothing where stderr is no terminal."""
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
    """Where tables and coloured text go."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(value: Any) -> None:
    """One JSON object, indented, on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
