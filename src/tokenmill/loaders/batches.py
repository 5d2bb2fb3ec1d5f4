"""A batch, and everything that can be derived from where documents start in its rows.

Several batches are filled together as a `Chunk`, because a batch of 8 x 2,048 tokens is so small that the
calls would cost more than the copying; what the user gets are views of it. Positions, segment ids
and the like are worked out when they are first asked for, for the whole chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.base import Integers, Segments
from tokenmill.dataset.copying import IGNORED

__all__ = ["Batch", "Chunk"]

Array = npt.NDArray[Any]


class Chunk:
    """Batches that were filled together; `find_segments` tells the documents of all their rows."""

    def __init__(self, inputs: Array, targets: Array, find_segments: Callable[[], Segments]) -> None:
        self.inputs = inputs
        self.targets = targets
        self.num_batches, self.batch_size, self.seq_len = inputs.shape
        self._find_segments = find_segments

    @cached_property
    def _cover(self) -> tuple[Segments, Integers, npt.NDArray[np.int32]]:
        """Segments that cover all rows, the row of each, and its id: 1, 2, ... in a row, 0 for padding."""
        segments = self._find_segments()
        counts = np.diff(segments.ends, prepend=0)
        rows = np.repeat(np.arange(len(counts)), counts)
        ids = (np.arange(len(rows)) - np.repeat(segments.ends - counts, counts) + 1).astype(np.int32)
        used = np.bincount(rows, segments.lengths, len(counts)).astype(np.int64)
        short = np.flatnonzero(used < self.seq_len)
        if not len(short):
            return segments, rows, ids
        rows = np.concatenate([rows, short])
        order = np.argsort(rows, kind="stable")
        covering = Segments(
            np.cumsum(counts + (used < self.seq_len)),
            np.concatenate([segments.starts, used[short]])[order],
            np.concatenate([segments.lengths, self.seq_len - used[short]])[order],
            np.concatenate([segments.documents, np.full(len(short), -1)])[order],
            np.concatenate([segments.is_end, np.ones(len(short), bool)])[order],
        )
        return covering, rows[order], np.concatenate([ids, np.zeros(len(short), np.int32)])[order]

    @cached_property
    def positions(self) -> Array:
        """The place of each token in its document's part of the row."""
        segments, _, _ = self._cover
        starts = np.repeat(segments.starts.astype(np.int32), segments.lengths).reshape(self.inputs.shape)
        return np.arange(self.seq_len, dtype=np.int32) - starts

    @cached_property
    def segment_ids(self) -> Array:
        """1, 2, ... for the documents of a row, 0 for padding."""
        segments, _, ids = self._cover
        return np.repeat(ids, segments.lengths).reshape(self.inputs.shape)

    @cached_property
    def cu_seqlens(self) -> list[npt.NDArray[np.int32]]:
        """For each batch, where segments start when its rows are laid end to end, and the end of the last."""
        segments, rows, _ = self._cover
        starts = segments.starts + rows % self.batch_size * self.seq_len
        edges = np.concatenate([[0], segments.ends])[:: self.batch_size]
        whole = np.insert(starts, edges[1:], self.batch_size * self.seq_len).astype(np.int32)
        cuts = (edges + np.arange(len(edges))).tolist()
        return [whole[first:last] for first, last in pairwise(cuts)]

    @cached_property
    def max_seqlens(self) -> list[int]:
        """For each batch the length of its longest segment."""
        segments, _, _ = self._cover
        edges = np.concatenate([[0], segments.ends])[:: self.batch_size][:-1]
        longest: list[int] = np.maximum.reduceat(segments.lengths, edges).tolist()
        return longest

    def documents(self, number: int) -> list[list[tuple[int, int, int]]]:
        """For each row of a batch: document, start in the row, and length, of every document in it."""
        segments, _, ids = self._cover
        edges = np.concatenate([[0], segments.ends]).tolist()
        found = []
        for row in range(number * self.batch_size, (number + 1) * self.batch_size):
            first, last = edges[row], edges[row + 1]
            columns = (segments.documents[first:last], segments.starts[first:last], segments.lengths[first:last])
            filled = ids[first:last] > 0
            found.append([*zip(*(column[filled].tolist() for column in columns), strict=True)])
        return found


def _same(array: Any) -> Any:
    return array


class Batch:
    """Rows of one step: unpacks as `inputs, targets`, both of shape (batch_size, seq_len).

    A target of -100 has no loss. Arrays are those of the framework that the loader was made for.
    """

    __slots__ = ("_chunk", "_number", "_wrap", "inputs", "targets")

    def __init__(
        self, inputs: Any, targets: Any, chunk: Chunk, number: int, wrap: Callable[[Any], Any] = _same
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self._chunk = chunk
        self._number = number
        self._wrap = wrap

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inputs, self.targets))

    def __getitem__(self, index: int) -> Any:
        return (self.inputs, self.targets)[index]

    def __len__(self) -> int:
        return 2

    @property
    def loss_mask(self) -> Any:
        """1.0 where a token has a target that counts, else 0.0."""
        return self._wrap((self._chunk.targets[self._number] != IGNORED).astype(np.float32))

    @property
    def positions(self) -> Any:
        """The place of each token in its document's part of the row; int32."""
        return self._wrap(self._chunk.positions[self._number])

    @property
    def segment_ids(self) -> Any:
        """1, 2, ... for the documents of each row, 0 for padding; int32. What FlexAttention compares."""
        return self._wrap(self._chunk.segment_ids[self._number])

    @property
    def cu_seqlens(self) -> Any:
        """Where documents start when rows are laid end to end, and the end; int32, as FlashAttention wants it."""
        return self._wrap(self._chunk.cu_seqlens[self._number])

    @property
    def max_seqlen(self) -> int:
        """The length of the longest segment."""
        return self._chunk.max_seqlens[self._number]

    @property
    def documents(self) -> list[list[tuple[int, int, int]]]:
        """For each row: document number, start in the row and length of every document in it."""
        return self._chunk.documents(self._number)

    def __repr__(self) -> str:
        return f"Batch({self._chunk.batch_size} rows of {self._chunk.seq_len} tokens)"
