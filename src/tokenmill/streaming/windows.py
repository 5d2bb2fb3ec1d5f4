"""Rows of text that is still being tokenized: the first epoch comes in windows, later ones from the whole store.

A global shuffle needs to know the number of rows. Until it is known, rows are shuffled within *windows*: the next
shards in an order that the seed decides, about twice as many as in the window before. A window depends only on the
text and the seed. So the order of rows does not depend on the speed of tokenizing, and a place in it is one number,
as in every dataset.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from tokenmill.dataset.rows import Integers, PackedRows, ResolvedRows, Rows
from tokenmill.dataset.shuffle import distinct
from tokenmill.errors import UsageError
from tokenmill.pipeline.input_file import UnconfirmedText
from tokenmill.streaming.tokenized_text import TokenizedText

__all__ = ["WindowedRows"]

UNKNOWN = "the number of rows is known only when all text is tokenized; count steps instead"


class WindowedRows(Rows):
    """The windows of a source one after the other, then the later epochs of the whole store."""

    def __init__(self, source: TokenizedText, seq_len: int) -> None:
        self.seq_len, (self.max_documents, self.align) = seq_len, source.shape
        self.rows_per_batch = 1
        """Rows of a batch of all ranks, for the sentence about a damaged input."""
        self._source = source
        self._windows: list[Rows] = []
        self._ends: list[int] = []
        self._whole: Rows | None = None
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be sent to another process; the source makes the same windows again there.
        return {"seq_len": self.seq_len, "source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], state["seq_len"])  # type: ignore[misc]

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        """Whether the last window is known."""
        return self._source.has_ended

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Rows of the first epoch, as soon as their number is known."""
        if not self.is_known:
            raise UsageError(UNKNOWN)
        return self._num_ready

    def __len__(self) -> int:
        if not self.is_known:
            raise TypeError(UNKNOWN)
        return self.num_rows

    @property
    def bottleneck(self) -> str | None:  # type: ignore[override]
        """Tokenizing, if the trainer had to wait for it."""
        return "tokenizing; run `tokenmill tokenize` first" if self._source.has_waited else None

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        """Tokens of the windows so far."""
        return sum(rows.num_tokens for rows in self._windows)

    @property
    def _num_ready(self) -> int:
        return self._ends[-1] if self._ends else 0

    def wait_for(self, count: int) -> int:
        """Wait for the window with row `count - 1` of the first epoch, or for the last one."""
        with self._lock:
            while self._num_ready < count and not self._source.has_ended:
                try:
                    rows = self._source.next_window()
                except UnconfirmedText as error:
                    raise self._count_batches(error) from None
                if rows is not None:
                    self._windows.append(rows)
                    self._ends.append(self._num_ready + rows.num_rows)
            if self._source.has_ended and self._whole is None and count > self._num_ready:
                self._whole = self._source.whole()
            return self._num_ready

    def _count_batches(self, error: UnconfirmedText) -> UnconfirmedText:
        """Add to an error how many batches were made of the input before its damage was found."""
        first = self._source.first_window_of(error.path)
        num_rows = self._num_ready - (self._ends[first - 1] if first else 0)
        what = f"{-(-num_rows // self.rows_per_batch):,} batches" if self.rows_per_batch > 1 else f"{num_rows:,} rows"
        return UnconfirmedText(error.path, f"{error.reason}; up to {what} were made of this text before")

    def rows_of_epochs(self, epochs: Fraction) -> int:
        """Count the rows of some epochs; the first may be a few rows shorter, one for each window."""
        if epochs <= 1:
            return int(epochs * self.num_rows)
        self.wait_for(self.num_rows + 1)
        assert self._whole is not None
        return self.num_rows + int((epochs - 1) * self._whole.num_rows)

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Resolve the rows of each window, or of the whole store."""
        if not len(index):
            return []
        self.wait_for(int(index.max()) + 1)
        numbers = np.searchsorted(np.array(self._ends, np.int64), index, "right")
        found: list[ResolvedRows] = []
        for number in distinct(numbers):
            at = np.flatnonzero(numbers == number)
            rows, before = self._part(number)
            found += [resolved.among(at) for resolved in rows.resolve(index[at] - before)]
        return found

    def _part(self, number: int) -> tuple[Rows, int]:
        """Return the rows of a window and how many come before; after the last one, the second epoch of the whole."""
        if number < len(self._windows):
            return self._windows[number], self._ends[number] - self._windows[number].num_rows
        assert self._whole is not None
        return self._whole, self._num_ready - self._whole.num_rows

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Look in the windows so far, and in the whole store."""
        found = []
        for number in range(len(self._windows) + (self._whole is not None)):
            rows, before = self._part(number)
            first = 0 if number < len(self._windows) else rows.num_rows
            last = rows.num_rows if number < len(self._windows) else max(first, stop - before)
            found += [before + place for place in rows.where(leaf, row, last) if place >= first]
        return sorted(place for place in found if place < stop)

    def leaves(self) -> list[PackedRows]:
        """Return the packings of the windows so far, and of the whole store."""
        parts = [*self._windows, *([self._whole] if self._whole is not None else [])]
        return [leaf for rows in parts for leaf in rows.leaves()]

    def describe(self) -> dict[str, Any]:
        """Describe the text and the settings, but nothing that is known only later."""
        return {"kind": "stream", "seq_len": self.seq_len, **self._source.describe()}

    def title(self) -> str:
        """Return one line for the tree."""
        ready = f"{len(self._windows)} windows of {self._num_ready:,} rows"
        return f"stream: {ready}{'' if self.is_known else ' so far'}, {self.num_tokens:,} tokens"

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows of the first epoch."""
        index = 0
        while index < self.wait_for(index + 1):
            yield self[index]
            index += 1
