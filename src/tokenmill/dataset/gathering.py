"""Rows that lie in one stretch of memory each, and what all ways of copying rows share.

They are copied in C where that was compiled. Else short rows are gathered as opaque values by one indexing operation
(3-4 times the speed of an index per token), a few at a time, so that what is gathered is still in the CPU cache when it
is widened; long ones are copied by one slice each.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset import kernels
from tokenmill.dataset.base import Choice, Integers
from tokenmill.errors import StoreError
from tokenmill.store.mapping import everywhere, will_need, windows_everywhere

__all__ = ["IGNORED", "TOKENS_AT_ONCE", "Array", "Part", "WholePart", "as_array", "touch"]

IGNORED = -100
"""The target of a token that has none: what torch's cross entropy leaves out by default."""
LONG_ROW = 8192
"""From this many tokens on, a slice a row is faster than a gather."""
TOKENS_AT_ONCE = 1 << 16
"""128 KB of two-byte tokens and 1 MB of batches: they stay in the second-level cache."""

Array = npt.NDArray[Any]


class Part:
    """Rows of a block that are copied in the same way; `at` are their places in it, None for all of them."""

    def __init__(self, choices: list[Choice], num_rows: int) -> None:
        self._seq_len = choices[0].rows.seq_len
        self._sources = [choice.source for choice in choices]
        self._dtype = choices[0].source.dtype
        self._itemsize = self._dtype.itemsize
        self._order: Integers | None = None
        self._at: Integers | None = None
        if choices[0].at is not None:
            at = np.concatenate([choice.at for choice in choices if choice.at is not None])
            self._order = np.argsort(at, kind="stable")
            self._at = at[self._order] if len(at) < num_rows else None

    def _in_order(self, arrays: list[Integers]) -> Integers:
        """What choices say of their rows, one after the other, in the order of rows."""
        joined = np.concatenate(arrays)
        return joined if self._order is None else joined[self._order]

    def _range(self, start: int, stop: int) -> tuple[int, int, Any]:
        """Which of this part's rows lie in a range of the block, and where they go in it."""
        if self._at is None:
            return start, stop, slice(0, stop - start)
        low, high = np.searchsorted(self._at, (start, stop)).tolist()
        return low, high, self._at[low:high] - start

    def _might_not_fit(self, dtype: np.dtype[Any]) -> bool:
        """Whether a type holds fewer values than the tokens' own; loops ask once."""
        return not np.can_cast(self._dtype, dtype)

    def _check(self, tokens: Array, dtype: np.dtype[Any]) -> None:
        """Refuse tokens that a type cannot hold; they are looked at only where some might not fit."""
        if not self._might_not_fit(dtype):
            return
        bounds = np.iinfo(dtype)
        wrong = tokens[(tokens < bounds.min) | (tokens > bounds.max)]
        if wrong.size:
            names = " or ".join(dict.fromkeys(source.name for source in self._sources))
            raise StoreError(f"{names} has the id {wrong[0]}, which {dtype} cannot hold; pass dtype='int64'")

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Fill the rows of arrays that stand for a range of the block, as far as they are of this part."""
        raise NotImplementedError

    def will_need(self, start: int, stop: int) -> None:
        """Let the kernel read the rows of a range from disk."""
        raise NotImplementedError


class WholePart(Part):
    """Rows that are one span with the target of their last token behind it."""

    def __init__(self, choices: list[Choice], num_rows: int) -> None:
        super().__init__(choices, num_rows)
        self._width = self._seq_len + 1
        starts = [choice.rows.spans(choice.numbers).starts for choice in choices]
        addresses = self._in_order(
            [c.source.addresses(some, self._width) for c, some in zip(choices, starts, strict=True)]
        )
        # Rows across the end of a shard are copied by themselves; until then any mapped row stands in.
        apart = np.flatnonzero(addresses == 0)
        self._apart: list[int] = apart.tolist()
        self._all_apart = len(apart) == len(addresses)
        if len(apart):
            addresses[apart] = addresses.max()
            self._remember(choices, self._in_order(starts))
        self._indices = addresses // self._itemsize - 1

    def _remember(self, choices: list[Choice], starts: Integers) -> None:
        """Whose the rows are that are copied by themselves, and where they start."""
        owners = self._in_order([np.full(len(choice.numbers), n) for n, choice in enumerate(choices)])
        self._apart_documents = [choices[n].source for n in owners[self._apart].tolist()]
        self._apart_starts: list[int] = starts[self._apart].tolist()

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Copy the rows in a range, in C, by one gather or slice by slice."""
        low, high, places = self._range(start, stop)
        if low == high:
            return
        if not self._all_apart:
            if kernels.can_copy(self._dtype, inputs.dtype):
                rows = as_array(places)
                kernels.compiled.copy_rows(self._indices[low:high], self._itemsize, rows, inputs, targets)
            elif self._width < LONG_ROW:
                self._gather(low, high, places, inputs, targets)
            else:
                self._slice(low, high, places, inputs, targets)
        if len(self._apart):
            self._copy_apart(low, high, places, inputs, targets)

    def _gather(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        touch(self._dtype, self._indices[low:high])
        windows = windows_everywhere(self._width, self._itemsize)
        step = max(1, TOKENS_AT_ONCE // self._width)
        is_narrow = self._might_not_fit(inputs.dtype)
        for first in range(low, high, step):
            last = min(first + step, high)
            tokens = windows[self._indices[first:last]].view(self._dtype).reshape(last - first, self._width)
            to = _some(places, first - low, last - low)
            if is_narrow:
                self._check(tokens, inputs.dtype)
            inputs[to] = tokens[:, :-1]
            targets[to] = tokens[:, 1:]

    def _slice(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        memory = everywhere(self._dtype.str, self._itemsize)
        rows = range(high - low) if isinstance(places, slice) else places.tolist()
        starts = self._indices[low:high]
        if self._might_not_fit(inputs.dtype):
            for start in starts.tolist():
                self._check(memory[start : start + self._width], inputs.dtype)
        ends = starts + self._seq_len
        for row, start, end in zip(rows, starts.tolist(), ends.tolist(), strict=True):
            inputs[row] = memory[start:end]
            targets[row] = memory[start + 1 : end + 1]

    def _copy_apart(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        for number in range(bisect_left(self._apart, low), bisect_left(self._apart, high)):
            begin = self._apart_starts[number]
            tokens = self._apart_documents[number].read(begin, begin + self._width)
            self._check(tokens, inputs.dtype)
            row = self._apart[number] - low
            row = row if isinstance(places, slice) else int(places[row])
            inputs[row] = tokens[:-1]
            targets[row] = tokens[1:]

    def will_need(self, start: int, stop: int) -> None:
        """One hint a row."""
        low, high, _ = self._range(start, stop)
        if not self._all_apart:
            for index in self._indices[low:high].tolist():
                will_need((index + 1) * self._itemsize, self._width * self._itemsize)


def as_array(places: Any) -> Integers | None:
    """The places of rows for loops in C; None for those that are filled one after the other."""
    return None if isinstance(places, slice) else places


def _some(places: Any, first: int, last: int) -> Any:
    """A part of the places of rows, which are a slice or an array."""
    return slice(first, last) if isinstance(places, slice) else places[first:last]


def touch(dtype: np.dtype[Any], indices: Integers) -> None:
    """Read one token of each stretch that is about to be copied.

    Single reads wait for memory all at the same time, copies one after the other: at 1,024 tokens a row, copying takes
    0.35 ns a token after this and 0.51 without.
    """
    everywhere(dtype.str, dtype.itemsize)[indices]
