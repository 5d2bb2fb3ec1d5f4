"""Rows that are joined from several pieces of documents, with padding behind them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from tokenmill.dataset import kernels
from tokenmill.dataset.base import Choice, Integers
from tokenmill.dataset.gathering import IGNORED, TOKENS_AT_ONCE, Array, Part, as_array, touch
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import everywhere, will_need, windows_everywhere

__all__ = ["PiecedPart"]

STRIP = 128
"""Tokens of a long piece that are copied at once."""


class PiecedPart(Part):
    """Rows of several spans, and padding behind them."""

    def __init__(self, choices: list[Choice], num_rows: int) -> None:
        super().__init__(choices, num_rows)
        spans = [choice.rows.spans(choice.numbers) for choice in choices]
        counts = [np.diff(some.ends, prepend=0) for some in spans]
        addresses = [c.source.addresses(some.starts, some.lengths) for c, some in zip(choices, spans, strict=True)]
        order = self._piece_order(counts)
        sizes = self._in_order(counts)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        self._edges: Integers = ends
        self._first_pieces: list[int] = ends.tolist()
        self._lengths = np.concatenate([some.lengths for some in spans])[order]
        self._addresses = np.concatenate(addresses)[order]
        before = np.concatenate([[0], np.cumsum(self._lengths)])
        used = np.diff(before[ends])
        # The place of each piece's first token when the rows of this part are laid end to end, padding included.
        self._places = before[:-1] - np.repeat(before[ends[:-1]] - np.arange(len(used)) * self._seq_len, sizes)
        self._lasts = self._places + (self._lengths - 1)
        self._indices = self._addresses // self._itemsize - 1
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
        """Join the pieces of the rows in a range, in C or by way of a scratch array."""
        low, high, places = self._range(start, stop)
        if low == high:
            return
        if kernels.can_copy(self._dtype, inputs.dtype):
            edges, rows = self._edges[low : high + 1], as_array(places)
            settings = (self._lengths, IGNORED, self._itemsize)
            kernels.compiled.copy_pieces(edges, self._indices, *settings, rows, inputs, targets)
            self._copy_apart(low, high, rows, inputs, targets)
        else:
            self._widen(low, high, places, inputs, targets)

    def _copy_apart(self, low: int, high: int, rows: Integers | None, inputs: Array, targets: Array) -> None:
        """Fill in the pieces that lie across shards."""
        begin, end = self._first_pieces[low], self._first_pieces[high]
        for number, (documents, start) in self._apart.items():
            if begin <= number < end and self._lengths[number]:
                row, column = divmod(int(self._places[number]), self._seq_len)
                row = row - low if rows is None else int(rows[row - low])
                tokens = documents.read(start, start + int(self._lengths[number]))
                inputs[row, column : column + len(tokens)] = tokens
                targets[row, column : column + len(tokens) - 1] = tokens[1:]

    def _widen(self, low: int, high: int, places: Any, inputs: Array, targets: Array) -> None:
        """Join the pieces of rows in a scratch array of the stored type, then widen them a few rows at a time."""
        if len(self._scratch) < high - low:
            self._scratch = np.empty((high - low, self._seq_len), self._dtype)
        tokens = self._scratch[: high - low]
        self._join(low, high, tokens)
        self._check(tokens, inputs.dtype)
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
        indices = self._indices[begin:end]
        if self._apart:
            mapped = indices >= 0
            self._join_apart(begin, end, flat, low * self._seq_len)
            lengths, places, indices = lengths[mapped], places[mapped], indices[mapped]
        touch(self._dtype, indices)
        is_long = lengths >= STRIP
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        _copy_strips(flat, places[long], lengths[long], indices[long])
        self._copy_slices(flat, places[short], lengths[short], indices[short])
        for row, used in self._short(low, high):
            tokens[row, used:] = 0

    def _copy_slices(self, flat: Array, places: Integers, lengths: Integers, indices: Integers) -> None:
        """Copy pieces one by one."""
        target, memory = flat.data, _memory(self._dtype.str, self._itemsize)
        for to, end_to, index, end_index in zip(
            places.tolist(), (places + lengths).tolist(), indices.tolist(), (indices + lengths).tolist(), strict=True
        ):
            target[to:end_to] = memory[index:end_index]

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
        targets.reshape(-1)[self._lasts[pieces] - low * self._seq_len] = IGNORED
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
    counts = (lengths + (STRIP - 1)) // STRIP
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(0, int(counts.sum()) * STRIP, STRIP) - (firsts * STRIP).repeat(counts)
    np.minimum(offsets, (lengths - STRIP).repeat(counts), out=offsets)
    windows = np.ndarray(max(0, len(flat) - STRIP + 1), f"V{STRIP * flat.itemsize}", flat, strides=(flat.itemsize,))
    found = windows_everywhere(STRIP, flat.itemsize)[indices.repeat(counts) + offsets]
    windows[places.repeat(counts) + offsets] = found


_views: dict[str, memoryview] = {}


def _memory(kind: str, itemsize: int) -> memoryview:
    """All memory as one buffer; a slice of it is half the price of a slice of an array."""
    if kind not in _views:
        _views[kind] = everywhere(kind, itemsize).data
    return _views[kind]
