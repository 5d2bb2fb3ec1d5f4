"""The tables and bars that all commands print with rich, in one style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["make_bar", "make_facts", "make_table"]

HEAD = "bold cyan"


def make_facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values in two columns, without heads."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=HEAD, no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)
    return table


def make_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), gap: int = 2, title: str = ""
) -> Table:
    """Rows below their heads. Columns are numbers, aligned right, except those that `left` names."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style=HEAD)
    table.title, table.title_justify = title or None, "left"
    for head in heads:
        if head in left:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def make_bar(fraction: float, width: int) -> Table:
    """A progress bar on a line of its own; a bare rich bar would not end its line."""
    table = Table.grid()
    table.add_row(ProgressBar(total=1.0, completed=fraction, width=width))
    return table
