"""What batches derive from the places of documents in their rows: positions, segment ids, attention boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import PADDING, Integers, Segments, join_segments
from tokenmill.filling import kernels
from tokenmill.filling.context import CutPieces, RowCutter

__all__ = ["Cover"]

SMALL_ARRAY = 1 << 14
"""Tokens whose positions take half of the memory from which on malloc asks the kernel."""


class Cover:
    """Segments that cover rows from end to end, padding included.

    What a batch asks for is computed on first use, for all rows.
    """

    def __init__(
        self,
        segments: Segments,
        seq_len: int,
        batch_size: int,
        max_documents: int | None = None,
        cutter: RowCutter | None = None,
    ) -> None:
        self.seq_len, self._batch_size = seq_len, batch_size
        self._max_documents, self._cutter = max_documents, cutter
        if cutter is not None:
            segments = cutter.fill_gaps(segments)
        edges, bounds = np.append(0, segments.ends), _count_up(segments.lengths)
        used = np.diff(bounds[edges])
        short = np.flatnonzero(used < seq_len)
        self._is_padded = len(short) > 0 or cutter is not None
        if len(short):
            room, count = used[short], len(short)
            blank = np.full(count, PADDING), np.zeros(count, bool)
            padding = Segments(np.arange(1, count + 1), room, seq_len - room, *blank)
            segments = join_segments([(np.arange(len(used)), segments), (short, padding)], len(used))
            edges, bounds = np.append(0, segments.ends), _count_up(segments.lengths)
        self.segments = segments
        """The documents of all rows, and the padding after them."""
        self._edges = edges
        # Where segments start and end when all rows are laid end to end.
        self._bounds = bounds
        # The same for documents with the padding after them.
        self._block_edges, self._block_bounds = edges, bounds
        if cutter is not None:
            heads = ~cutter.are_gaps(segments)
            self._block_edges, self._block_bounds = _count_up(heads)[edges], bounds[np.append(heads, True)]
        self.asked: set[str] = set()
        """The fields that batches of these rows have asked for; the next batches get all of them in one pass."""

    def document_ends(self, start: int, stop: int) -> Integers:
        """Return the places of documents' last tokens when the rows from `start` up to `stop` are laid end to end."""
        ends, edges = self._ends
        width = self.seq_len if self._cutter is None else self._cutter.width
        places: Integers = ends[edges[start] : edges[stop]] - (start * width + 1)
        return places

    @cached_property
    def _ends(self) -> tuple[Integers, Integers]:
        """Where documents end when all rows are laid end to end, and which of these is the first of each row."""
        is_end = self.segments.is_end
        if self._cutter is None:
            return self._bounds[1:][is_end], _count_up(is_end)[self._edges]
        cut, edges = self._cut
        is_end = is_end[cut.runs] & cut.is_last
        return (cut.places + cut.lengths)[is_end], _count_up(is_end)[edges]

    @cached_property
    def _cut(self) -> tuple[CutPieces, Integers]:
        """The pieces of segments that the rank holds, and which of them is the first of each row."""
        assert self._cutter is not None
        cut = self._cutter.cut_segments(self._edges, self.segments)
        return cut, np.searchsorted(cut.places, np.arange(len(self._edges)) * self._cutter.width)

    def spread(
        self,
        start: int,
        stop: int,
        *,
        positions: npt.NDArray[np.int32] | None = None,
        segment_ids: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Write the given fields for every token of the rows from `start` up to `stop`.

        A position is that of a token in its document's part of the row.
        """
        lengths = self.segments.lengths
        if self._cutter is not None:
            self._spread_cut(start, stop, positions, segment_ids)
            return
        if kernels.compiled is not None:
            some = slice(self._edges[start], self._edges[stop])
            kernels.compiled.spread(lengths[some], self._ids[some], positions, segment_ids)
            return
        counting = _counting(self.seq_len)
        for segments, tokens in self._steps(start, stop):
            times = lengths[segments]
            if positions is not None:
                places = self._starts[segments].repeat(times)
                np.subtract(counting[: len(places)], places, out=places)
                positions[tokens] = places
            if segment_ids is not None:
                segment_ids[tokens] = self._ids[segments].repeat(times)

    def spread_values(self, start: int, stop: int, values: npt.NDArray[np.int32], out: npt.NDArray[np.int32]) -> None:
        """Write the value of each segment for all of its tokens, in the rows from `start` up to `stop`."""
        if self._cutter is not None:
            cut, edges = self._cut
            some = slice(edges[start], edges[stop])
            lengths, values = cut.lengths[some], values[cut.runs[some]]
        else:
            some = slice(self._edges[start], self._edges[stop])
            lengths, values = self.segments.lengths[some], values[some]
        if kernels.compiled is not None:
            kernels.compiled.spread(lengths, values, None, out)
        else:
            out[:] = values.repeat(lengths)

    def _spread_cut(self, start: int, stop: int, positions: Any, segment_ids: Any) -> None:
        """Do the same for the pieces that the rank holds, whose positions begin anywhere."""
        cut, edges = self._cut
        width = self._cutter.width if self._cutter is not None else self.seq_len
        if segment_ids is not None:
            self.spread_values(start, stop, self._ids.astype(np.int32), segment_ids)
        if positions is None:
            return
        # Positions count up through rows, but for a shift that is constant in a piece. A few rows at a time, because
        # the memory of larger arrays would come from the kernel, page by page.
        step = max(1, SMALL_ARRAY // width)
        counting = np.arange(step * width, dtype=np.int32)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            some = slice(edges[first], edges[last])
            shifts = (cut.offsets[some] - cut.places[some] + first * width).astype(np.int32)
            size, place = (last - first) * width, (first - start) * width
            np.add(shifts.repeat(cut.lengths[some]), counting[:size], out=positions[place : place + size])

    @cached_property
    def _starts(self) -> npt.NDArray[Any]:
        """The start of each segment in its row, in as few bytes as hold it."""
        return self.segments.starts.astype(_counting(self.seq_len).dtype)

    @cached_property
    def _ids(self) -> npt.NDArray[Any]:
        """1, 2, ... in each row, and 0 for padding."""
        numbers = np.arange(1, len(self._bounds))
        if self._cutter is not None:
            numbers = np.cumsum(self.segments.documents != PADDING)
        before = self._edges[:-1] if self._cutter is None else np.append(0, numbers)[self._edges[:-1]]
        ids: Integers = numbers - before.repeat(np.diff(self._edges))
        if self._is_padded:
            ids[self.segments.documents == PADDING] = 0
        return ids.astype(np.int32) if kernels.compiled is not None else _narrow(ids)

    def _steps(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield the segments and the tokens of a few rows at a time, which stay in the CPU cache."""
        step = _rows_at_once(self.seq_len)
        cuts = self._edges[start:stop:step].tolist()
        for number, (first, last) in enumerate(pairwise([*cuts, int(self._edges[stop])])):
            place = number * step * self.seq_len
            yield slice(first, last), slice(place, place + step * self.seq_len)

    @cached_property
    def cu_seqlens(self) -> list[npt.NDArray[np.int32]]:
        """For each batch, where documents start when its rows are laid end to end, and the end of the last.

        Padding is a part of the document before it, but at the end of a row it counts as one more document. With a
        bound on documents, the end is repeated until all have one length.
        """
        batch_size = self._batch_size
        edges = self._block_edges[::batch_size]
        # Where one batch ends and the next one begins, both have the position.
        times = np.ones(len(self._block_bounds), np.int64)
        times[edges[1:-1]] = 2
        counts = np.diff(edges) + 1
        origins = np.arange(0, len(counts) * batch_size * self.seq_len, batch_size * self.seq_len)
        whole = (self._block_bounds.repeat(times) - origins.repeat(counts)).astype(np.int32)
        if self._max_documents is not None:
            return list(_pad(whole, counts, batch_size * (self._max_documents + 1) + 1, batch_size * self.seq_len))
        return [whole[first:last] for first, last in pairwise(_count_up(counts).tolist())]

    def unpadded_cu_seqlens(self, batch: int) -> npt.NDArray[np.int32]:
        """The same without any padding: the sums of the documents' own lengths; one for each of `cu_seqlens`."""
        first, last = batch * self._batch_size, (batch + 1) * self._batch_size
        some = slice(self._block_edges[first], self._block_edges[last])
        starts = np.searchsorted(self._bounds[:-1], self._block_bounds[some])
        lengths = np.where(self.segments.documents[starts] == PADDING, 0, self.segments.lengths[starts])
        found = np.zeros(len(self.cu_seqlens[batch]), np.int32)
        np.cumsum(lengths, out=found[1 : len(lengths) + 1])
        found[len(lengths) + 1 :] = found[len(lengths)]
        return found

    def row_cu_seqlens(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """For each row from `start` up to `stop`, where its segments start, and its end, repeated up to one length."""
        edges = self._block_edges[start : stop + 1]
        counts = np.diff(edges)
        most = int(counts.max()) if self._max_documents is None else self._max_documents + 1
        origins = np.arange(start, stop).repeat(counts) * self.seq_len
        return _pad(self._block_bounds[edges[0] : edges[-1]] - origins, counts, most + 1, self.seq_len)

    @cached_property
    def max_seqlens(self) -> list[int]:
        """For each batch, the length of its longest segment; with a bound on documents, always that of a row."""
        if self._max_documents is not None:
            return [self.seq_len] * ((len(self._edges) - 1) // self._batch_size)
        lengths = np.diff(self._block_bounds)
        longest: list[int] = np.maximum.reduceat(lengths, self._block_edges[: -1 : self._batch_size]).tolist()
        return longest

    def count_documents(self, start: int, stop: int) -> Integers:
        """Return how many documents each row from `start` up to `stop` has."""
        counts: Integers = np.diff(self._documents_before[start : stop + 1])
        return counts

    @cached_property
    def _documents_before(self) -> Integers:
        """The number of documents before each row."""
        before: Integers = _count_up(self.segments.documents != PADDING)[self._edges]
        return before

    def documents_of(self, row: int) -> list[tuple[int, int, int]]:
        """Return document, start in the row and length of every document in a row."""
        some = slice(self._edges[row], self._edges[row + 1])
        columns = (self.segments.documents[some], self.segments.starts[some], self.segments.lengths[some])
        found = zip(*(column.tolist() for column in columns), strict=True)
        return [segment for segment in found if segment[0] != PADDING]


def _pad(values: npt.NDArray[Any], counts: Integers, width: int, end: int) -> npt.NDArray[np.int32]:
    """Return a row of some width for each count, with so many of the values, and then the end."""
    found = np.full((len(counts), width), end, np.int32)
    firsts = np.arange(len(counts)) * width - (np.cumsum(counts) - counts)
    found.reshape(-1)[np.arange(len(values)) + firsts.repeat(counts)] = values
    return found


def _rows_at_once(seq_len: int) -> int:
    return max(1, kernels.TOKENS_AT_ONCE // seq_len)


def _narrow(values: Integers) -> npt.NDArray[Any]:
    """Convert values to the smallest type that holds them, because each is written once per token."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


@lru_cache(maxsize=8)
def _counting(seq_len: int) -> npt.NDArray[Any]:
    """Return the place of each token in its row, for as many rows as are spread at once."""
    return np.tile(_narrow(np.arange(seq_len)), _rows_at_once(seq_len))


def _count_up(counts: Integers | npt.NDArray[np.bool_]) -> Integers:
    """Return the sums of the first 0, 1, ... counts."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
