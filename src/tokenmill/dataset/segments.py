"""Where documents are in rows: the one table from which positions, masks and attention boundaries follow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    """Segments that cover rows from end to end, padding included; `ids` count 1, 2, ... in a row, 0 is padding."""

    def __init__(self, segments: Segments, num_rows: int, seq_len: int) -> None:
        self.seq_len = seq_len
        self.edges = np.concatenate([[0], segments.ends])
        counts = np.diff(self.edges)
        rows = np.repeat(np.arange(num_rows), counts)
        ids = np.arange(1, len(rows) + 1) - np.repeat(self.edges[:-1], counts)
        used = np.diff(np.concatenate([[0], np.cumsum(segments.lengths)])[self.edges])
        short = np.flatnonzero(used < seq_len)
        if len(short):
            segments, rows, ids = _pad(segments, rows, ids, short, used, seq_len)
            self.edges = np.concatenate([[0], segments.ends])
        self._edges: list[int] = self.edges.tolist()
        self.rows = rows
        # The first token of each segment, counted through all rows, of which they leave nothing out.
        self._places = np.cumsum(segments.lengths) - segments.lengths
        self.starts = segments.starts.astype(np.int32)
        self.lengths = segments.lengths
        self.documents = segments.documents
        self.is_end = segments.is_end & (segments.documents != PADDING)
        self._ids = _narrow(ids)

    def document_ends(self, start: int, stop: int) -> Integers:
        """Where documents have their last token, counted through the rows from `start` up to `stop`."""
        ends, edges = self._ends
        places: Integers = ends[edges[start] : edges[stop]] - start * self.seq_len
        return places

    @cached_property
    def _ends(self) -> tuple[Integers, list[int]]:
        """The last tokens of documents, counted through all rows, and which are the first of each row."""
        ends = (self._places + (self.lengths - 1))[self.is_end]
        counts = np.concatenate([[0], np.cumsum(self.is_end)])
        return ends, counts[self.edges].tolist()

    def fill_positions(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        """The place of each token in its document's part of the row, for the rows from `start` up to `stop`."""
        counting = _counting(max(TOKENS_AT_ONCE, self.seq_len))
        for segments, tokens, first in self._steps(start, stop):
            places = (self._places[segments] - first).astype(counting.dtype).repeat(self.lengths[segments])
            np.subtract(counting[: len(places)], places, out=places)
            out[tokens] = places

    def fill_segment_ids(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        """The ids of segments, token by token, for the rows from `start` up to `stop`."""
        for segments, tokens, _ in self._steps(start, stop):
            out[tokens] = self._ids[segments].repeat(self.lengths[segments])

    def _steps(self, start: int, stop: int) -> Iterator[tuple[slice, slice, int]]:
        """A few rows at a time, which stay in the CPU cache: segments, tokens in the range, and the first of them."""
        step = max(1, TOKENS_AT_ONCE // self.seq_len)
        for row in range(start, stop, step):
            end = min(row + step, stop)
            tokens = slice((row - start) * self.seq_len, (end - start) * self.seq_len)
            yield slice(self._edges[row], self._edges[end]), tokens, row * self.seq_len

    def cu_seqlens(self, batch_size: int) -> list[npt.NDArray[np.int32]]:
        """For each batch, where segments start when its rows are laid end to end, and the end of the last."""
        starts = self.starts + self.rows % batch_size * self.seq_len
        edges = self.edges[::batch_size]
        whole = np.insert(starts, edges[1:], batch_size * self.seq_len).astype(np.int32)
        cuts = (edges + np.arange(len(edges))).tolist()
        return [whole[first:last] for first, last in pairwise(cuts)]

    def max_seqlens(self, batch_size: int) -> list[int]:
        """For each batch the length of its longest segment."""
        longest: list[int] = np.maximum.reduceat(self.lengths, self.edges[:-1:batch_size]).tolist()
        return longest

    def documents_of(self, row: int) -> list[tuple[int, int, int]]:
        """Document, start in the row, and length, of every document in a row."""
        some = slice(self._edges[row], self._edges[row + 1])
        columns = (self.documents[some], self.starts[some], self.lengths[some])
        found = zip(*(column.tolist() for column in columns), strict=True)
        return [segment for segment in found if segment[0] != PADDING]


def _narrow(values: Integers) -> npt.NDArray[Any]:
    """The same in as few bytes as hold them: a value for each token is written once more while it is in the cache."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


@lru_cache(maxsize=8)
def _counting(count: int) -> npt.NDArray[Any]:
    return _narrow(np.arange(count))


def _pad(
    segments: Segments, rows: Integers, ids: Integers, short: Integers, used: Integers, seq_len: int
) -> tuple[Segments, Integers, Integers]:
    """Put a segment behind the last document of every row that is short."""
    rows = np.concatenate([rows, short])
    order = np.argsort(rows, kind="stable")
    padded = Segments(
        np.cumsum(np.bincount(rows, minlength=len(used))),
        np.concatenate([segments.starts, used[short]])[order],
        np.concatenate([segments.lengths, seq_len - used[short]])[order],
        np.concatenate([segments.documents, np.full(len(short), PADDING)])[order],
        np.concatenate([segments.is_end, np.zeros(len(short), bool)])[order],
    )
    return padded, rows[order], np.concatenate([ids, np.zeros(len(short), np.int64)])[order]
