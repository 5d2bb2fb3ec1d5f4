"""Rows out of mapped memory into batches: the inner loop of loading, in numpy alone.

Order and places are worked out for a block of thousands of rows at once; tokens are then copied a
few rows at a time, so that what is gathered is still in the CPU cache when it is widened. Short
rows are gathered as opaque values by one indexing operation (3-4 times the speed of an index per
token), long ones by one slice each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.base import Choice, Integers, PackedRows, Rows, Segments
from tokenmill.store.mapping import everywhere, will_need, windows_everywhere

__all__ = ["IGNORED", "RowBlock", "drop_rows", "join_segments"]

IGNORED = -100
"""The target of a token that has none: what torch's cross entropy leaves out by default."""
LONG_ROW = 8192
"""From this many tokens on, a slice a row is faster than a gather."""
TOKENS_AT_ONCE = 1 << 15
"""64 KB of two-byte tokens and 512 KB of batches: they stay in the second-level cache."""

Array = npt.NDArray[Any]


class RowBlock:
    """Rows whose places have been worked out, to be copied in pieces of any size.

    With `document_mask` a target in another document is `IGNORED` too; what has no next token in
    its row always is.
    """

    def __init__(self, rows: Rows, index: Integers, *, document_mask: bool) -> None:
        self.seq_len = rows.seq_len
        self._document_mask = document_mask
        self._parts = [_make_part(choice, document_mask) for choice in rows.resolve(index)]

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Fill arrays of shape (stop - start, seq_len) with the rows from `start` up to `stop`."""
        for part in self._parts:
            part.copy(start, stop, inputs, targets)

    def segments(self, start: int, stop: int) -> Segments:
        """The documents in the rows from `start` up to `stop`."""
        found = [part.segments(start, stop) for part in self._parts]
        return join_segments([some for some in found if some is not None], stop - start)

    def will_need(self, start: int, stop: int) -> None:
        """Let the kernel read these rows from disk while others are being used."""
        for part in self._parts:
            part.will_need(start, stop)


class _Part:
    """The rows of a block that one packing has."""

    def __init__(self, choice: Choice, document_mask: bool) -> None:
        self._rows = choice.rows
        self._at = choice.at
        self._numbers = choice.numbers
        self._documents = choice.rows.documents
        self._itemsize = self._documents.dtype.itemsize
        self._segments = choice.rows.segments(choice.numbers) if document_mask else None

    def _range(self, start: int, stop: int) -> tuple[int, int, Any]:
        """Which of this part's rows lie in a range of the block, and where they go in it."""
        if self._at is None:
            return start, stop, slice(0, stop - start)
        low, high = np.searchsorted(self._at, (start, stop)).tolist()
        return low, high, self._at[low:high] - start

    def segments(self, start: int, stop: int) -> tuple[Integers, Segments] | None:
        """Documents of the rows in a range, with the places of the rows in it."""
        low, high, places = self._range(start, stop)
        if low == high:
            return None
        if self._segments is None:
            found = self._rows.segments(self._numbers[low:high])
        else:
            found = _cut(self._segments, low, high)
        return np.arange(stop - start) if self._at is None else places, found

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        raise NotImplementedError

    def will_need(self, start: int, stop: int) -> None:
        raise NotImplementedError


class _WholePart(_Part):
    """Rows that are one span with the target of their last token behind it."""

    def __init__(self, choice: Choice, document_mask: bool) -> None:
        super().__init__(choice, document_mask)
        spans = choice.rows.spans(choice.numbers)
        self._width = choice.rows.seq_len + 1
        self._starts = spans.starts
        addresses = self._documents.addresses(spans.starts, self._width)
        # Rows across the end of a shard are copied by themselves; until then any mapped row stands in.
        self._apart = np.flatnonzero(addresses == 0)
        if len(self._apart):
            addresses[self._apart] = addresses.max()
        self._indices = addresses // self._itemsize - 1
        self._all_apart = len(self._apart) == len(addresses)

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Copy the rows in a range, by one gather or slice by slice."""
        low, high, places = self._range(start, stop)
        if low == high:
            return
        if not self._all_apart:
            if self._width < LONG_ROW:
                self._gather(low, high, places, inputs, targets)
            else:
                self._slice(low, high, places, inputs, targets)
        self._copy_apart(low, high, places, inputs, targets)
        if self._segments is not None:
            self._mask_ends(low, high, places, targets)

    def _gather(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        windows = windows_everywhere(self._width, self._itemsize)
        step = max(1, TOKENS_AT_ONCE // self._width)
        for first in range(low, high, step):
            last = min(first + step, high)
            tokens = windows[self._indices[first:last]].view(self._documents.dtype).reshape(last - first, self._width)
            to = slice(first - low, last - low) if isinstance(places, slice) else places[first - low : last - low]
            inputs[to] = tokens[:, :-1]
            targets[to] = tokens[:, 1:]

    def _slice(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        memory = everywhere(self._documents.dtype.str, self._itemsize)
        rows = range(high - low) if isinstance(places, slice) else places.tolist()
        last = self._width - 1
        for row, index in zip(rows, self._indices[low:high].tolist(), strict=True):
            inputs[row] = memory[index : index + last]
            targets[row] = memory[index + 1 : index + 1 + last]

    def _copy_apart(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        first, last = np.searchsorted(self._apart, (low, high)).tolist()
        for number in self._apart[first:last].tolist():
            begin = int(self._starts[number])
            tokens = self._documents.read(begin, begin + self._width)
            row = number - low if isinstance(places, slice) else int(places[number - low])
            inputs[row] = tokens[:-1]
            targets[row] = tokens[1:]

    def _mask_ends(self, low: int, high: int, places: Any, targets: Array) -> None:
        """A document's last token has no target."""
        assert self._segments is not None
        found = _cut(self._segments, low, high)
        rows = np.repeat(np.arange(high - low), np.diff(found.ends, prepend=0))[found.is_end]
        if not isinstance(places, slice):
            rows = places[rows]
        targets[rows, (found.starts + found.lengths - 1)[found.is_end]] = IGNORED

    def will_need(self, start: int, stop: int) -> None:
        """One hint a row."""
        low, high, _ = self._range(start, stop)
        if not self._all_apart:
            for index in self._indices[low:high].tolist():
                will_need((index + 1) * self._itemsize, self._width * self._itemsize)


class _PiecedPart(_Part):
    """Rows of several spans, and padding behind them."""

    def __init__(self, choice: Choice, document_mask: bool) -> None:
        super().__init__(choice, document_mask)
        spans = choice.rows.spans(choice.numbers)
        self._ends = np.concatenate([[0], spans.ends])
        self._starts, self._lengths = spans.starts, spans.lengths
        self._addresses = self._documents.addresses(spans.starts, spans.lengths)
        # Where each piece starts when rows are laid end to end without padding.
        self._offsets = np.concatenate([[0], np.cumsum(spans.lengths)])
        self._used = np.diff(self._offsets[self._ends])

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Join the pieces of a few rows in a scratch array of the stored type, then widen them."""
        low, high, places = self._range(start, stop)
        seq_len = self._rows.seq_len
        step = max(1, TOKENS_AT_ONCE // seq_len)
        scratch = np.empty((min(step, max(1, high - low)), seq_len), self._documents.dtype)
        for first in range(low, high, step):
            last = min(first + step, high)
            to = slice(first - low, last - low) if isinstance(places, slice) else places[first - low : last - low]
            tokens = scratch[: last - first]
            ends = self._join(first, last, tokens)
            inputs[to] = tokens
            shifted = np.empty((last - first, seq_len), targets.dtype) if not isinstance(to, slice) else targets[to]
            shifted[:, :-1] = tokens[:, 1:]
            self._mask(first, last, ends, shifted)
            if not isinstance(to, slice):
                targets[to] = shifted

    def _join(self, first: int, last: int, tokens: Array) -> Integers:
        """Copy pieces into rows; returns the place of each piece's last token in the flat array."""
        seq_len = self._rows.seq_len
        pieces = slice(int(self._ends[first]), int(self._ends[last]))
        lengths = self._lengths[pieces]
        counts = np.diff(self._ends[first : last + 1])
        rows = np.repeat(np.arange(last - first), counts)
        before = self._offsets[pieces] - np.repeat(self._offsets[self._ends[first:last]], counts)
        places = rows * seq_len + before
        flat = tokens.reshape(-1)
        target = flat.data
        memory = _memory(self._documents.dtype.str, self._itemsize)
        for to, length, address, begin in zip(
            places.tolist(),
            lengths.tolist(),
            self._addresses[pieces].tolist(),
            self._starts[pieces].tolist(),
            strict=True,
        ):
            if address:
                index = address // self._itemsize - 1
                target[to : to + length] = memory[index : index + length]
            else:
                self._documents.copy(begin, flat[to : to + length])
        for row in np.flatnonzero(self._used[first:last] < seq_len).tolist():
            tokens[row, int(self._used[first + row]) :] = 0
        ends: Integers = places + lengths - 1
        return ends

    def _mask(self, first: int, last: int, ends: Integers, targets: Array) -> None:
        """The last token of a piece has no target, and padding has none."""
        seq_len = self._rows.seq_len
        targets[ends // seq_len, ends % seq_len] = IGNORED
        for row in np.flatnonzero(self._used[first:last] < seq_len).tolist():
            targets[row, int(self._used[first + row]) :] = IGNORED

    def will_need(self, start: int, stop: int) -> None:
        """One hint a piece."""
        low, high, _ = self._range(start, stop)
        pieces = slice(int(self._ends[low]), int(self._ends[high]))
        for address, length in zip(self._addresses[pieces].tolist(), self._lengths[pieces].tolist(), strict=True):
            if address:
                will_need(address, length * self._itemsize)


def _make_part(choice: Choice, document_mask: bool) -> _Part:
    rows: PackedRows = choice.rows
    return (_WholePart if rows.has_lookahead else _PiecedPart)(choice, document_mask)


_views: dict[str, memoryview] = {}


def _memory(kind: str, itemsize: int) -> memoryview:
    if kind not in _views:
        _views[kind] = everywhere(kind, itemsize).data
    return _views[kind]


def _cut(segments: Segments, low: int, high: int) -> Segments:
    """The segments of some rows."""
    first = int(segments.ends[low - 1]) if low else 0
    last = int(segments.ends[high - 1])
    return Segments(
        segments.ends[low:high] - first,
        segments.starts[first:last],
        segments.lengths[first:last],
        segments.documents[first:last],
        segments.is_end[first:last],
    )


def drop_rows(segments: Segments, dropped: npt.NDArray[np.bool_]) -> Segments:
    """The same rows, but some without documents."""
    counts = np.diff(segments.ends, prepend=0)
    kept = ~np.repeat(dropped, counts)
    return Segments(
        np.cumsum(np.where(dropped, 0, counts)),
        segments.starts[kept],
        segments.lengths[kept],
        segments.documents[kept],
        segments.is_end[kept],
    )


def join_segments(parts: list[tuple[Integers, Segments]], num_rows: int) -> Segments:
    """The segments of several packings by row, each with the places of its rows."""
    if len(parts) == 1 and len(parts[0][0]) == num_rows:
        return parts[0][1]
    counts = np.zeros(num_rows, np.int64)
    for places, segments in parts:
        counts[places] = np.diff(segments.ends, prepend=0)
    rows = np.concatenate([np.repeat(places, np.diff(some.ends, prepend=0)) for places, some in parts])
    order = np.argsort(rows, kind="stable")
    starts, lengths, documents, is_end = (
        np.concatenate([segments[field] for _, segments in parts])[order] for field in range(1, 5)
    )
    return Segments(np.cumsum(counts), starts, lengths, documents, is_end)
