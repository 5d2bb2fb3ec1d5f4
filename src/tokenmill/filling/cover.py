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

__all__ = ["Cover"]


class Cover:
    """Segments that cover rows from end to end, padding included.

    What a batch asks for is computed on first use, for all rows.
    """

    def __init__(self, segments: Segments, seq_len: int, batch_size: int) -> None:
        self.seq_len, self._batch_size = seq_len, batch_size
        edges, bounds = np.append(0, segments.ends), _count_up(segments.lengths)
        used = np.diff(bounds[edges])
        short = np.flatnonzero(used < seq_len)
        self._is_padded = len(short) > 0
        if self._is_padded:
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
        self.asked: set[str] = set()
        """The fields that batches of these rows have asked for; the next batches get all of them in one pass."""

    def document_ends(self, start: int, stop: int) -> Integers:
        """Return the places of documents' last tokens when the rows from `start` up to `stop` are laid end to end."""
        ends, edges = self._ends
        places: Integers = ends[edges[start] : edges[stop]] - (start * self.seq_len + 1)
        return places

    @cached_property
    def _ends(self) -> tuple[Integers, Integers]:
        """Where documents end when all rows are laid end to end, and which of these is the first of each row."""
        is_end = self.segments.is_end
        return self._bounds[1:][is_end], _count_up(is_end)[self._edges]

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
        some = slice(self._edges[start], self._edges[stop])
        lengths = self.segments.lengths[some]
        if kernels.compiled is not None:
            kernels.compiled.spread(lengths, values[some], None, out)
        else:
            out[:] = values[some].repeat(lengths)

    @cached_property
    def _starts(self) -> npt.NDArray[Any]:
        """The start of each segment in its row, in as few bytes as hold it."""
        return self.segments.starts.astype(_counting(self.seq_len).dtype)

    @cached_property
    def _ids(self) -> npt.NDArray[Any]:
        """1, 2, ... in each row, and 0 for padding."""
        numbers = np.arange(1, len(self._bounds))
        ids: Integers = numbers - self._edges[:-1].repeat(np.diff(self._edges))
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
        """For each batch, where segments start when its rows are laid end to end, and the end of the last."""
        batch_size = self._batch_size
        edges = self._edges[::batch_size]
        # Where one batch ends and the next one begins, both have the position.
        times = np.ones(len(self._bounds), np.int64)
        times[edges[1:-1]] = 2
        counts = np.diff(edges) + 1
        origins = np.arange(0, len(counts) * batch_size * self.seq_len, batch_size * self.seq_len)
        whole = (self._bounds.repeat(times) - origins.repeat(counts)).astype(np.int32)
        return [whole[first:last] for first, last in pairwise(_count_up(counts).tolist())]

    @cached_property
    def max_seqlens(self) -> list[int]:
        """For each batch, the length of its longest segment."""
        longest: list[int] = np.maximum.reduceat(self.segments.lengths, self._edges[: -1 : self._batch_size]).tolist()
        return longest

    def documents_of(self, row: int) -> list[tuple[int, int, int]]:
        """Return document, start in the row and length of every document in a row."""
        some = slice(self._edges[row], self._edges[row + 1])
        columns = (self.segments.documents[some], self.segments.starts[some], self.segments.lengths[some])
        found = zip(*(column.tolist() for column in columns), strict=True)
        return [segment for segment in found if segment[0] != PADDING]


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
