"""Rows out of mapped memory into batches: the inner loop of loading, in numpy alone.

Order and places are worked out for a block of thousands of rows at once, whatever datasets they
come from; tokens are then copied a few rows at a time, so that what is gathered is still in
the CPU cache when it is widened. Short rows are gathered as opaque values by one indexing operation
(3-4 times the speed of an index per token), long ones by one slice each.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.base import Choice, Integers, Rows
from tokenmill.dataset.segments import Cover, Segments, join_segments
from tokenmill.errors import StoreError
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import everywhere, will_need, windows_everywhere

__all__ = ["IGNORED", "TOKENS_AT_ONCE", "RowBlock"]

IGNORED = -100
"""The target of a token that has none: what torch's cross entropy leaves out by default."""
LONG_ROW = 8192
"""From this many tokens on, a slice a row is faster than a gather."""
TOKENS_AT_ONCE = 1 << 16
"""128 KB of two-byte tokens and 1 MB of batches: they stay in the second-level cache."""

STRIP = 128
"""Tokens of a long piece that are copied at once."""

Array = npt.NDArray[Any]


class RowBlock:
    """Rows whose places have been worked out, to be copied in pieces of any size.

    With `document_mask` a target in another document is `IGNORED` too; what has no next token in
    its row always is, and so is a target that a supervised store says not to train on. Rows from number
    `limit` on are blank: no tokens, targets or documents.
    """

    def __init__(self, rows: Rows, index: Integers, *, document_mask: bool, limit: int | None = None) -> None:
        self.seq_len = rows.seq_len
        self.num_rows = len(index)
        self.document_mask = document_mask
        self._blank = np.flatnonzero(index >= limit) if limit is not None else np.zeros(0, np.int64)
        filled = np.delete(np.arange(len(index)), self._blank) if len(self._blank) else None
        self._choices = _choose(rows, index, filled)
        self._parts = _make_parts(self._choices, len(index))
        self._masks = _make_parts(_beside(self._choices, ".mask"), len(index))
        self._weights = _make_parts(_beside(self._choices, ".weight"), len(index))
        self._cu_seqlens: list[npt.NDArray[np.int32]] | None = None
        self._max_seqlens: list[int] | None = None

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Fill arrays of shape (stop - start, seq_len) with the rows from `start` up to `stop`."""
        for part in self._parts:
            part.copy(start, stop, inputs, targets)
        if self._masks:
            # One target is one token further: as for tokens, what comes out as targets is of the next token.
            trained = self._copy_values(self._masks, start, stop, targets.shape, np.int16)
            targets[trained == 0] = IGNORED
        if self.document_mask:
            first, last = np.searchsorted(self._document_ends, (start * self.seq_len, stop * self.seq_len)).tolist()
            targets.reshape(-1)[self._document_ends[first:last] - start * self.seq_len] = IGNORED
        if len(self._blank):
            blank = self._blank[(self._blank >= start) & (self._blank < stop)] - start
            inputs[blank] = 0
            targets[blank] = IGNORED

    @property
    def is_weighted(self) -> bool:
        """Whether some rows come from a store that has a weight for each token."""
        return bool(self._weights)

    def copy_weights(self, start: int, stop: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The weight of each target's loss; 1 where the store has none."""
        return self._copy_values(self._weights, start, stop, shape, np.float32)

    def _copy_values(
        self, parts: list[_Part], start: int, stop: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """What lies beside the tokens, for each target; 1 for rows that have nothing there."""
        values = np.ones((2, *shape), dtype)
        for part in parts:
            part.copy(start, stop, values[0], values[1])
        of_targets: npt.NDArray[Any] = values[1]
        return of_targets

    @cached_property
    def cover(self) -> Cover:
        """The documents in all rows."""
        return Cover(self.segments(), self.num_rows, self.seq_len)

    def cu_seqlens(self, batch_size: int) -> list[npt.NDArray[np.int32]]:
        """For each batch of the block, where its documents start; worked out once."""
        if self._cu_seqlens is None:
            self._cu_seqlens = self.cover.cu_seqlens(batch_size)
        return self._cu_seqlens

    def max_seqlens(self, batch_size: int) -> list[int]:
        """For each batch of the block, the length of its longest segment; worked out once."""
        if self._max_seqlens is None:
            self._max_seqlens = self.cover.max_seqlens(batch_size)
        return self._max_seqlens

    @cached_property
    def _document_ends(self) -> Integers:
        return self.cover.document_ends

    def segments(self) -> Segments:
        """The documents in all rows, without padding."""
        parts = [
            (np.arange(self.num_rows) if choice.at is None else choice.at, choice.rows.segments(choice.numbers))
            for choice in self._choices
        ]
        return join_segments(parts, self.num_rows)

    def will_need(self, start: int, stop: int) -> None:
        """Let the kernel read these rows from disk while others are being used."""
        for part in self._parts:
            part.will_need(start, stop)


def _choose(rows: Rows, index: Integers, filled: Integers | None) -> list[Choice]:
    """Where the rows are that are not blank."""
    if filled is None:
        return rows.resolve(index)
    choices = rows.resolve(index[filled]) if len(filled) else []
    return [Choice(c.rows, filled if c.at is None else filled[c.at], c.numbers) for c in choices]


def _beside(choices: list[Choice], suffix: str) -> list[Choice]:
    """Those rows of supervised stores, to be copied from a file beside their tokens."""
    views = [(choice, choice.rows.documents.view(suffix)) for choice in choices]
    return [choice._replace(beside=values) for choice, values in views if values is not None]


def _make_parts(choices: list[Choice], num_rows: int) -> list[_Part]:
    """One part for all rows of one kind and type, so that a mixture costs no more than its sources."""
    groups: dict[tuple[bool, str], list[Choice]] = {}
    for choice in choices:
        groups.setdefault((choice.rows.has_lookahead, choice.source.dtype.str), []).append(choice)
    return [
        _WholePart(some, num_rows) if is_whole else _PiecedPart(some, num_rows)
        for (is_whole, _), some in groups.items()
    ]


class _Part:
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

    def _fit(self, tokens: Array, dtype: np.dtype[Any]) -> Array:
        """The same tokens, each of which a type can hold; they are looked at only where some might not fit."""
        if np.can_cast(self._dtype, dtype):
            return tokens
        bounds = np.iinfo(dtype)
        wrong = tokens[(tokens < bounds.min) | (tokens > bounds.max)]
        if wrong.size:
            names = " or ".join(dict.fromkeys(source.name for source in self._sources))
            raise StoreError(f"{names} has the id {wrong[0]}, which {dtype} cannot hold; pass dtype='int64'")
        return tokens

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        raise NotImplementedError

    def will_need(self, start: int, stop: int) -> None:
        raise NotImplementedError


class _WholePart(_Part):
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
        """Copy the rows in a range, by one gather or slice by slice."""
        low, high, places = self._range(start, stop)
        if low == high:
            return
        if not self._all_apart:
            if self._width < LONG_ROW:
                self._gather(low, high, places, inputs, targets)
            else:
                self._slice(low, high, places, inputs, targets)
        if len(self._apart):
            self._copy_apart(low, high, places, inputs, targets)

    def _gather(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        windows = windows_everywhere(self._width, self._itemsize)
        step = max(1, TOKENS_AT_ONCE // self._width)
        for first in range(low, high, step):
            last = min(first + step, high)
            tokens = windows[self._indices[first:last]].view(self._dtype).reshape(last - first, self._width)
            to = _some(places, first - low, last - low)
            self._fit(tokens, inputs.dtype)
            inputs[to] = tokens[:, :-1]
            targets[to] = tokens[:, 1:]

    def _slice(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        memory = everywhere(self._dtype.str, self._itemsize)
        rows = range(high - low) if isinstance(places, slice) else places.tolist()
        last = self._width - 1
        for row, index in zip(rows, self._indices[low:high].tolist(), strict=True):
            inputs[row] = self._fit(memory[index : index + last + 1], inputs.dtype)[:-1]
            targets[row] = memory[index + 1 : index + 1 + last]

    def _copy_apart(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        for number in range(bisect_left(self._apart, low), bisect_left(self._apart, high)):
            begin = self._apart_starts[number]
            tokens = self._fit(self._apart_documents[number].read(begin, begin + self._width), inputs.dtype)
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


class _PiecedPart(_Part):
    """Rows of several spans, and padding behind them."""

    def __init__(self, choices: list[Choice], num_rows: int) -> None:
        super().__init__(choices, num_rows)
        spans = [choice.rows.spans(choice.numbers) for choice in choices]
        counts = [np.diff(some.ends, prepend=0) for some in spans]
        addresses = [c.source.addresses(some.starts, some.lengths) for c, some in zip(choices, spans, strict=True)]
        order = self._piece_order(counts)
        sizes = self._in_order(counts)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        self._first_pieces: list[int] = ends.tolist()
        self._lengths = np.concatenate([some.lengths for some in spans])[order]
        self._addresses = np.concatenate(addresses)[order]
        before = np.concatenate([[0], np.cumsum(self._lengths)])
        used = np.diff(before[ends])
        # The place of each piece's first token when the rows of this part are laid end to end, padding included.
        self._places = before[:-1] - np.repeat(before[ends[:-1]] - np.arange(len(used)) * self._seq_len, sizes)
        self._short_rows: list[int] = np.flatnonzero(used < self._seq_len).tolist()
        self._short_used: list[int] = used[used < self._seq_len].tolist()
        self._apart = self._remember(choices, order, [some.starts for some in spans])
        self._scratch = np.empty((0, self._seq_len), self._dtype)

    def _piece_order(self, counts: list[Integers]) -> Integers | slice:
        """The order of pieces when rows are in order."""
        if self._order is None:
            return slice(None)
        sizes = np.concatenate(counts)
        firsts = (np.cumsum(sizes) - sizes)[self._order]
        sizes = sizes[self._order]
        order: Integers = np.arange(int(sizes.sum())) + np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes)
        return order

    def _remember(
        self, choices: list[Choice], order: Integers | slice, starts: list[Integers]
    ) -> dict[int, tuple[Documents, int]]:
        """Whose the pieces are that are copied by themselves, because they lie across shards."""
        apart = np.flatnonzero(self._addresses == 0).tolist()
        if not apart:
            return {}
        owners = np.repeat(np.arange(len(choices)), [len(some) for some in starts])[order]
        begins = np.concatenate(starts)[order]
        return {number: (choices[int(owners[number])].source, int(begins[number])) for number in apart}

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Join the pieces of rows in a scratch array of the stored type, then widen them a few rows at a time."""
        low, high, places = self._range(start, stop)
        if low == high:
            return
        if len(self._scratch) < high - low:
            self._scratch = np.empty((high - low, self._seq_len), self._dtype)
        tokens = self._scratch[: high - low]
        self._join(low, high, tokens)
        self._fit(tokens, inputs.dtype)
        is_slice = isinstance(places, slice)
        shifted = targets[places] if is_slice else np.empty(tokens.shape, targets.dtype)
        step = max(1, TOKENS_AT_ONCE // self._seq_len)
        for first in range(0, high - low, step):
            some = slice(first, first + step)
            inputs[some if is_slice else places[some]] = tokens[some]
            shifted[some, :-1] = tokens[some, 1:]
        self._mask(low, high, shifted)
        if not is_slice:
            targets[places] = shifted

    def _join(self, low: int, high: int, tokens: Array) -> None:
        """Copy pieces into rows, and zeros behind them."""
        begin, end = self._first_pieces[low], self._first_pieces[high]
        flat = tokens.reshape(-1)
        lengths, places = self._lengths[begin:end], self._places[begin:end] - low * self._seq_len
        indices = self._addresses[begin:end] // self._itemsize - 1
        if self._apart:
            mapped = indices >= 0
            self._join_apart(begin, end, flat, low * self._seq_len)
            lengths, places, indices = lengths[mapped], places[mapped], indices[mapped]
        is_long = lengths >= STRIP
        _copy_strips(flat, places[is_long], lengths[is_long], indices[is_long])
        places, lengths, indices = places[~is_long], lengths[~is_long], indices[~is_long]
        target, memory = flat.data, _memory(self._dtype.str, self._itemsize)
        for to, end_to, index, end_index in zip(
            places.tolist(), (places + lengths).tolist(), indices.tolist(), (indices + lengths).tolist(), strict=True
        ):
            target[to:end_to] = memory[index:end_index]
        for row, used in self._short(low, high):
            tokens[row, used:] = 0

    def _join_apart(self, begin: int, end: int, flat: Array, origin: int) -> None:
        for number, (documents, start) in self._apart.items():
            if begin <= number < end:
                to = int(self._places[number]) - origin
                documents.copy(start, flat[to : to + int(self._lengths[number])])

    def _short(self, low: int, high: int) -> list[tuple[int, int]]:
        """Rows that have padding, and where it begins."""
        first, last = bisect_left(self._short_rows, low), bisect_left(self._short_rows, high)
        return [(self._short_rows[n] - low, self._short_used[n]) for n in range(first, last)]

    def _mask(self, low: int, high: int, targets: Array) -> None:
        """The last token of a piece has no target, nor has padding, nor has the last token of a row."""
        pieces = slice(self._first_pieces[low], self._first_pieces[high])
        targets[:, -1] = IGNORED
        targets.reshape(-1)[self._places[pieces] + self._lengths[pieces] - (1 + low * self._seq_len)] = IGNORED
        for row, used in self._short(low, high):
            targets[row, used:] = IGNORED

    def will_need(self, start: int, stop: int) -> None:
        """One hint a piece."""
        low, high, _ = self._range(start, stop)
        pieces = slice(self._first_pieces[low], self._first_pieces[high])
        for address, length in zip(self._addresses[pieces].tolist(), self._lengths[pieces].tolist(), strict=True):
            if address:
                will_need(address, length * self._itemsize)


def _copy_strips(flat: Array, places: Integers, lengths: Integers, indices: Integers) -> None:
    """Copy pieces of at least `STRIP` tokens, each in strips of that size, all strips by one indexing operation.

    The last strip of a piece ends with it and may overlap the one before. One slice a piece would wait
    for memory at each of them, one after the other; strips of many pieces are fetched at the same time.
    """
    counts = -(-lengths // STRIP)
    pieces = np.repeat(np.arange(len(counts)), counts)
    strips = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.minimum(strips * STRIP, (lengths - STRIP)[pieces])
    windows = np.ndarray(max(0, len(flat) - STRIP + 1), f"V{STRIP * flat.itemsize}", flat, strides=(flat.itemsize,))
    windows[places[pieces] + offsets] = windows_everywhere(STRIP, flat.itemsize)[indices[pieces] + offsets]


def _some(places: Any, first: int, last: int) -> Any:
    """A part of the places of rows, which are a slice or an array."""
    return slice(first, last) if isinstance(places, slice) else places[first:last]


_views: dict[str, memoryview] = {}


def _memory(kind: str, itemsize: int) -> memoryview:
    """All memory as one buffer; a slice of it is half the price of a slice of an array."""
    if kind not in _views:
        _views[kind] = everywhere(kind, itemsize).data
    return _views[kind]
