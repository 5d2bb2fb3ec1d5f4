"""`inspect`: what a store holds: totals, document lengths, single documents and training rows."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from tokenmill.display.notebook import render_html
from tokenmill.errors import UsageError
from tokenmill.load_any import make_rows
from tokenmill.store.remote_store import open_store
from tokenmill.store.store import TokenStore
from tokenmill.tools.inspect.document_view import document_json, render_document, render_row, row_json
from tokenmill.tools.inspect.overview import overview_json, render_overview

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.loaders.load_settings import RowFlags

__all__ = [
    "Inspection",
    "document_json",
    "inspect",
    "overview_json",
    "render_document",
    "render_overview",
    "render_row",
    "row_json",
]

COLUMNS = 100


class Inspection:
    """A part of a store: it prints itself in a terminal and in a notebook, and `as_json` has its plain values."""

    def __init__(self, draw: Callable[[], Any], describe: Callable[[], dict[str, Any]]) -> None:
        self._draw, self._describe = draw, describe

    def as_json(self) -> dict[str, Any]:
        """Plain values, as `tokenmill inspect --json` prints them."""
        return self._describe()

    @cached_property
    def _drawn(self) -> Any:
        return self._draw()

    def __rich__(self) -> Any:
        return self._drawn

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), width=get_terminal_size((COLUMNS, 0)).columns, highlight=False, force_jupyter=False
        )
        console.print(self._drawn)
        written: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in written.splitlines())

    def _repr_html_(self) -> str:
        return render_html(self._drawn, COLUMNS)


def inspect(
    store: str | Path | TokenStore,
    *,
    document: int | None = None,
    row: int | None = None,
    split: str = "train",
    max_tokens: int = 200,
    seq_len: int = 2048,
    **rows: Unpack[RowFlags],
) -> Inspection:
    """Show totals and document lengths of a store, one document with its tokens and ids, or one training row.

    `rows` are `packing`, `long_documents`, `max_documents`, `align`, `shuffle` and `seed`, with the defaults of `load`.
    """
    if row is not None and document is not None:
        raise UsageError("pass either --row N or --document N, not both")
    opened = store if isinstance(store, TokenStore) else open_store(store)
    if row is not None:
        made = make_rows(opened.split(split), seq_len=seq_len, **rows)
        return Inspection(
            partial(render_row, opened, made, row, max_tokens=max_tokens), partial(row_json, opened, made, row)
        )
    if document is not None:
        draw = partial(render_document, opened, document, split, max_tokens=max_tokens)
        return Inspection(draw, partial(document_json, opened, document, split))
    return Inspection(partial(render_overview, opened), partial(overview_json, opened))
