"""Parts of datasets and of stores: by position, or all but some documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.dataset.rows import DerivedRows, Integers, PackedRows, ResolvedRows, Rows, as_documents, as_rows
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource

__all__ = ["SlicedRows", "deny", "skip", "slice_", "take"]

ROWS_AT_ONCE = 1 << 16


def slice_(whole: Rows | Documents | TokenSource, start: int, stop: int) -> Any:
    """Return the rows or documents from `start` up to `stop`; of a store, those of its first split."""
    whole = _documents_or_rows(whole, "slice")
    start, stop = whole_number(start, "start"), whole_number(stop, "stop")
    return whole.slice(start, stop) if isinstance(whole, Documents) else SlicedRows(whole, start, stop)


def take(whole: Rows | Documents | TokenSource, count: int) -> Any:
    """Return the first `count` rows or documents."""
    return slice_(_documents_or_rows(whole, "take"), 0, whole_number(count, "count", 0))


def skip(whole: Rows | Documents | TokenSource, count: int) -> Any:
    """Return all but the first `count` rows or documents."""
    whole = _documents_or_rows(whole, "skip")
    return slice_(whole, whole_number(count, "count", 0), len(whole))


def deny(documents: Documents | TokenSource, numbers: Iterable[int]) -> Documents:
    """Return all documents but the given ones; the store on disk stays as it is."""
    return as_documents(documents, "deny").without(numbers)


def _documents_or_rows(whole: Any, verb: str) -> Rows | Documents:
    return as_documents(whole, verb) if isinstance(whole, (Documents, TokenSource)) else as_rows(whole, verb)


class SlicedRows(DerivedRows):
    """Some rows of another dataset.

    Every epoch has the same rows in the same order, those of the first epoch of the other dataset. If each epoch were
    sliced separately, a shuffle would move rows that were kept for validation into training.
    """

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(rows):
            raise UsageError(f"rows {start} to {stop} are not a part of {len(rows)} rows")
        super().__init__(rows)
        self._start = start
        self.num_rows = stop - start
        self.num_tokens = self._count_tokens()

    def _count_tokens(self) -> int:
        """Count the tokens: rows with lookahead are full, and the lengths of others are looked up."""
        if all(leaf.has_lookahead for leaf in self._rows.leaves()):
            return self.num_rows * self.seq_len
        total = 0
        for first in range(0, self.num_rows, ROWS_AT_ONCE):
            index = np.arange(first, min(first + ROWS_AT_ONCE, self.num_rows)) + self._start
            for resolved in self._rows.resolve(index):
                spans = resolved.rows.spans(resolved.numbers)
                lookahead = len(resolved.numbers) if resolved.rows.has_lookahead else 0
                total += int(spans.lengths.sum()) - lookahead
        return total

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Resolve as rows of the first epoch."""
        return self._rows.resolve(index % self.num_rows + self._start)

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Return the same places in every epoch."""
        inside = [n - self._start for n in self._rows.where(leaf, row, self._start + self.num_rows) if n >= self._start]
        return sorted(again for number in inside for again in range(number, stop, self.num_rows))

    def describe(self) -> dict[str, Any]:
        """Describe the slice and the rows it is of."""
        stop = self._start + self.num_rows
        return {"kind": "slice", "start": self._start, "stop": stop, "rows": self._rows.describe()}

    def title(self) -> str:
        """Return one line for the tree."""
        return f"rows {self._start:,} to {self._start + self.num_rows:,}: {plural(self.num_tokens, 'token')}"
