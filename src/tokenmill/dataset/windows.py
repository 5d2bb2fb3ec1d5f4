"""Rows of text that is still being tokenized: the first epoch comes in windows, later ones from the whole store.

A global shuffle needs to know how many rows there are. Until that is known, rows are shuffled within
*windows*: the shards that come next, in an order that the seed decides, about twice as many as in the window
before. What is in a window depends on the text and the seed alone, so the order of rows is the same
however fast the text is tokenized, and a place in it is one number, as in every dataset.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from tokenmill.dataset.base import Choice, Integers, PackedRows, Rows
from tokenmill.dataset.permutation import distinct
from tokenmill.errors import UsageError

__all__ = ["WindowSource", "WindowedRows"]


class WindowSource(Protocol):
    """Where windows come from."""

    @property
    def has_ended(self) -> bool:
        """Whether the last window was given."""
        ...

    def next_window(self) -> Rows | None:
        """Wait for the rows of the next window; None behind the last one."""
        ...

    @property
    def was_waited_for(self) -> bool:
        """Whether a window was not there when it was asked for."""
        ...

    def whole(self) -> Rows:
        """All rows, when the last window was given."""
        ...

    def describe(self) -> dict[str, Any]:
        """Everything that decides which rows come, and in which order, as plain JSON."""
        ...


class WindowedRows(Rows):
    """The windows of a source one after the other; behind them, the later epochs of the whole."""

    def __init__(self, source: WindowSource, seq_len: int) -> None:
        self.seq_len = seq_len
        self._source = source
        self._windows: list[Rows] = []
        self._ends: list[int] = []
        self._whole: Rows | None = None
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # A lock belongs to a process; windows that are given once more are the same ones.
        return {"seq_len": self.seq_len, "source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], state["seq_len"])  # type: ignore[misc]

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        """Whether the last window is there."""
        return self._source.has_ended

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Rows of the first epoch, as soon as that is known."""
        if not self.is_known:
            raise UsageError("how many rows there are is known when all text is tokenized; count steps instead")
        return self._num_ready

    def __len__(self) -> int:
        if not self.is_known:
            raise TypeError("how many rows there are is known when all text is tokenized; count steps instead")
        return self.num_rows

    @property
    def bottleneck(self) -> str | None:  # type: ignore[override]
        """Tokenizing, if it was waited for."""
        return "tokenizing; run `tokenmill tokenize` first" if self._source.was_waited_for else None

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        """Tokens of the windows that are there."""
        return sum(rows.num_tokens for rows in self._windows)

    @property
    def _num_ready(self) -> int:
        return self._ends[-1] if self._ends else 0

    def wait_for(self, count: int) -> int:
        """Wait for the window that has row `count - 1` of the first epoch, or for the last one."""
        with self._lock:
            while self._num_ready < count and not self._source.has_ended:
                rows = self._source.next_window()
                if rows is not None:
                    self._windows.append(rows)
                    self._ends.append(self._num_ready + rows.num_rows)
            if self._source.has_ended and self._whole is None and count > self._num_ready:
                self._whole = self._source.whole()
            return self._num_ready

    def rows_of_epochs(self, epochs: Fraction) -> int:
        """The first epoch and so many more; the first one may be a few rows shorter, one for each window."""
        if epochs <= 1:
            return int(epochs * self.num_rows)
        self.wait_for(self.num_rows + 1)
        assert self._whole is not None
        return self.num_rows + int((epochs - 1) * self._whole.num_rows)

    def resolve(self, index: Integers) -> list[Choice]:
        """Ask each window, or the whole, for its rows."""
        if not len(index):
            return []
        self.wait_for(int(index.max()) + 1)
        numbers = np.searchsorted(np.array(self._ends, np.int64), index, "right")
        choices: list[Choice] = []
        for number in distinct(numbers):
            at = np.flatnonzero(numbers == number)
            rows, before = self._part(number)
            choices += [choice.among(at) for choice in rows.resolve(index[at] - before)]
        return choices

    def _part(self, number: int) -> tuple[Rows, int]:
        """The rows of a window, and how many come before them; behind the last one, the second epoch of the whole."""
        if number < len(self._windows):
            return self._windows[number], self._ends[number] - self._windows[number].num_rows
        assert self._whole is not None
        return self._whole, self._num_ready - self._whole.num_rows

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Ask the windows that are there, and the whole."""
        found = []
        for number in range(len(self._windows) + (self._whole is not None)):
            rows, before = self._part(number)
            first = 0 if number < len(self._windows) else rows.num_rows
            last = rows.num_rows if number < len(self._windows) else max(first, stop - before)
            found += [before + place for place in rows.where(leaf, row, last) if place >= first]
        return sorted(place for place in found if place < stop)

    def leaves(self) -> list[PackedRows]:
        """The packings of the windows that are there, and of the whole."""
        parts = [*self._windows, *([self._whole] if self._whole is not None else [])]
        return [leaf for rows in parts for leaf in rows.leaves()]

    def describe(self) -> dict[str, Any]:
        """The text and the settings; nothing that is known only later."""
        return {"kind": "stream", "seq_len": self.seq_len, **self._source.describe()}

    def title(self) -> str:
        """One line for the tree."""
        ready = f"{len(self._windows)} windows of {self._num_ready:,} rows"
        return f"stream: {ready}{'' if self.is_known else ' so far'}, {self.num_tokens:,} tokens"

    def __iter__(self) -> Iterator[Any]:
        """The rows of the first epoch."""
        index = 0
        while index < self.wait_for(index + 1):
            yield self[index]
            index += 1
