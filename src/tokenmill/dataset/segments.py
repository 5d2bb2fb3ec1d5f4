"""Where documents are in rows: the one table from which positions, masks and attention boundaries follow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset import kernels
from tokenmill.dataset.permutation import Integers

__all__ = ["Cover", "Segments", "join_segments"]

PADDING = -1
"""The document number of what is behind the last document of a row."""
TOKENS_AT_ONCE = 1 << 16
"""A few arrays of so many values stay in the second-level cache, and two bytes count so many."""


class Segments(NamedTuple):
    """The documents in rows: row i has those from `ends[i - 1]` up to `ends[i]`.

    `starts` are positions in the row; where a document ends with its segment, `is_end` is true.
    """

    ends: Integers
    starts: Integers
    lengths: Integers
    documents: Integers
    is_end: npt.NDArray[np.bool_]


def join_segments(parts: list[tuple[Integers, Segments]], num_rows: int) -> Segments:
    """The segments of several packings by row, each with the places of its rows; rows of no part have none."""
    if len(parts) == 1 and len(parts[0][0]) == num_rows:
        return parts[0][1]
    if not parts:
        none = np.zeros(0, np.int64)
        return Segments(np.zeros(num_rows, np.int64), none, none, none, np.zeros(0, bool))
    counts = np.zeros(num_rows, np.int64)
    for places, segments in parts:
        counts[places] = np.diff(segments.ends, prepend=0)
    rows = np.concatenate([np.repeat(places, np.diff(some.ends, prepend=0)) for places, some in parts])
    order = np.argsort(rows, kind="stable")
    starts, lengths, documents, is_end = (
        np.concatenate([segments[field] for _, segments in parts])[order] for field in range(1, 5)
    )
    return Segments(np.cumsum(counts), starts, lengths, documents, is_end)


class Cover:
    """Segments that cover rows from end to end, padding included.

    What batches ask for is worked out when they first do, for all rows.
    """

    def __init__(self, segments: Segments, seq_len: int) -> None:
        self.seq_len = seq_len
        edges, bounds = np.append(0, segments.ends), _count_up(segments.lengths)
        used = np.diff(bounds[edges])
        short = np.flatnonzero(used < seq_len)
        self._is_padded = len(short) > 0
        if self._is_padded:
            segments = _pad(segments, short, used, seq_len)
            edges, bounds = np.append(0, segments.ends), _count_up(segments.lengths)
        self._segments = segments
        self._edges = edges
        # Where segments start and end when all rows are laid end to end, of which they leave nothing out.
        self._bounds = bounds
        self.asked: set[str] = set()
        """What batches of these rows have asked for, to be spread together for the next ones."""

    def document_ends(self, start: int, stop: int) -> Integers:
        """Where documents have their last token, counted through the rows from `start` up to `stop`."""
        ends, edges = self._ends
        places: Integers = ends[edges[start] : edges[stop]] - (start * self.seq_len + 1)
        return places

    @cached_property
    def _ends(self) -> tuple[Integers, Integers]:
        """Where documents end, counted through all rows, and which are the first of each row."""
        is_end = self._segments.is_end
        return self._bounds[1:][is_end], _count_up(is_end)[self._edges]

    def spread(
        self,
        start: int,
        stop: int,
        *,
        positions: npt.NDArray[np.int32] | None = None,
        segment_ids: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Write what is asked for, token by token, for the rows from `start` up to `stop`.

        A position is the place of a token in its document's part of the row.
        """
        lengths = self._segments.lengths
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

    @cached_property
    def _starts(self) -> npt.NDArray[Any]:
        """The place in its row of each segment, in as few bytes as places are counted in."""
        return self._segments.starts.astype(_counting(self.seq_len).dtype)

    @cached_property
    def _ids(self) -> npt.NDArray[Any]:
        """1, 2, ... in each row, and 0 for padding."""
        numbers = np.arange(1, len(self._bounds))
        ids: Integers = numbers - self._edges[:-1].repeat(np.diff(self._edges))
        if self._is_padded:
            ids[self._segments.documents == PADDING] = 0
        return ids.astype(np.int32) if kernels.compiled is not None else _narrow(ids)

    def _steps(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """A few rows at a time, which stay in the CPU cache: their segments, and their tokens in the range."""
        step = _rows_at_once(self.seq_len)
        cuts = self._edges[start:stop:step].tolist()
        for number, (first, last) in enumerate(pairwise([*cuts, int(self._edges[stop])])):
            place = number * step * self.seq_len
            yield slice(first, last), slice(place, place + step * self.seq_len)

    def cu_seqlens(self, batch_size: int) -> list[npt.NDArray[np.int32]]:
        """For each batch, where segments start when its rows are laid end to end, and the end of the last."""
        edges = self._edges[::batch_size]
        # Where one batch ends the next one begins: that place is in both.
        times = np.ones(len(self._bounds), np.int64)
        times[edges[1:-1]] = 2
        counts = np.diff(edges) + 1
        origins = np.arange(0, len(counts) * batch_size * self.seq_len, batch_size * self.seq_len)
        whole = (self._bounds.repeat(times) - origins.repeat(counts)).astype(np.int32)
        return [whole[first:last] for first, last in pairwise(_count_up(counts).tolist())]

    def max_seqlens(self, batch_size: int) -> list[int]:
        """For each batch the length of its longest segment."""
        longest: list[int] = np.maximum.reduceat(self._segments.lengths, self._edges[:-1:batch_size]).tolist()
        return longest

    def documents_of(self, row: int) -> list[tuple[int, int, int]]:
        """Document, start in the row, and length, of every document in a row."""
        some = slice(self._edges[row], self._edges[row + 1])
        columns = (self._segments.documents[some], self._segments.starts[some], self._segments.lengths[some])
        found = zip(*(column.tolist() for column in columns), strict=True)
        return [segment for segment in found if segment[0] != PADDING]


def _rows_at_once(seq_len: int) -> int:
    return max(1, TOKENS_AT_ONCE // seq_len)


def _narrow(values: Integers) -> npt.NDArray[Any]:
    """The same in as few bytes as hold them: a value for each token is written once more while it is in the cache."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


@lru_cache(maxsize=8)
def _counting(seq_len: int) -> npt.NDArray[Any]:
    """The place of each token in its row, for as many rows as are worked on at once."""
    return np.tile(_narrow(np.arange(seq_len)), _rows_at_once(seq_len))


def _count_up(counts: Integers | npt.NDArray[np.bool_]) -> Integers:
    """The sums of the first 0, 1, ... counts."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _pad(segments: Segments, short: Integers, used: Integers, seq_len: int) -> Segments:
    """Put a segment behind the last document of every row that is short."""
    rows = np.concatenate([np.repeat(np.arange(len(used)), np.diff(segments.ends, prepend=0)), short])
    order = np.argsort(rows, kind="stable")
    return Segments(
        np.cumsum(np.bincount(rows, minlength=len(used))),
        np.concatenate([segments.starts, used[short]])[order],
        np.concatenate([segments.lengths, seq_len - used[short]])[order],
        np.concatenate([segments.documents, np.full(len(short), PADDING)])[order],
        np.concatenate([segments.is_end, np.zeros(len(short), bool)])[order],
    )
