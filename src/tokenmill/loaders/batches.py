"""A batch, and everything that can be derived from where documents start in its rows.

Several batches are filled together as a `Chunk`, because a batch of 8 x 2,048 tokens is so small that the
calls would cost more than the copying; what the user gets are views of it. Positions, segment ids
and the like are worked out when they are first asked for, for the whole chunk or block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.copying import IGNORED, RowBlock
from tokenmill.loaders.buffers import BufferPool

__all__ = ["Batch", "Chunk"]

Array = npt.NDArray[Any]


_SPREADS = BufferPool(np.int32)


class Chunk:
    """Batches that were filled together: the rows of a block from `start` on.

    `both` are inputs and targets, an array of shape (2, number of batches, batch_size, seq_len).
    """

    def __init__(self, both: Array, block: RowBlock, start: int) -> None:
        self.both = both
        self.inputs, self.targets = both[0], both[1]
        _, self.num_batches, self.batch_size, self.seq_len = both.shape
        self.is_masked = block.document_mask
        self._block = block
        self._start = start
        self._stop = start + self.num_batches * self.batch_size
        self._spreads: dict[str, Array] = {}

    @property
    def positions(self) -> Array:
        """The place of each token in its document's part of the row."""
        return self._spread("positions")

    @property
    def segment_ids(self) -> Array:
        """1, 2, ... for the documents of a row, 0 for padding."""
        return self._spread("segment_ids")

    @cached_property
    def loss_weights(self) -> Array:
        """The weight of each target's loss: 0 where it has none, 1 where a store says nothing."""
        weights: Array = (self.targets != IGNORED).astype(np.float32)
        if self._block.is_weighted:
            shape = (self._stop - self._start, self.seq_len)
            weights *= self._block.copy_weights(self._start, self._stop, shape).reshape(weights.shape)
        return weights

    def _spread(self, name: str) -> Array:
        """What is known of segments, for every token; together with what was asked for of the batches before."""
        if name not in self._spreads:
            cover = self._block.cover
            cover.asked.add(name)
            names = [name for name in cover.asked if name not in self._spreads]
            arrays = dict(zip(names, _SPREADS.take((len(names), *self.inputs.shape)), strict=True))
            cover.spread(self._start, self._stop, **{name: array.reshape(-1) for name, array in arrays.items()})
            self._spreads.update(arrays)
        return self._spreads[name]

    def cu_seqlens(self, number: int) -> npt.NDArray[np.int32]:
        """Where segments start when the rows of a batch are laid end to end, and the end of the last."""
        found: npt.NDArray[np.int32] = self._block.cu_seqlens(self.batch_size)[self._start // self.batch_size + number]
        return found

    def max_seqlen(self, number: int) -> int:
        """The length of the longest segment of a batch."""
        longest: int = self._block.max_seqlens(self.batch_size)[self._start // self.batch_size + number]
        return longest

    def documents(self, number: int) -> list[list[tuple[int, int, int]]]:
        """For each row of a batch: document, start in the row, and length, of every document in it."""
        first = self._start + number * self.batch_size
        return [self._block.cover.documents_of(row) for row in range(first, first + self.batch_size)]


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
    def input_ids(self) -> Any:
        """The inputs, as supervised trainers call them."""
        return self.inputs

    @property
    def target_ids(self) -> Any:
        """The targets, as supervised trainers call them."""
        return self.targets

    @property
    def is_masked(self) -> bool:
        """Whether documents of a row are kept apart."""
        return self._chunk.is_masked

    @property
    def loss_mask(self) -> Any:
        """1.0 where a token has a target that counts, else 0.0."""
        return self._wrap((self._chunk.targets[self._number] != IGNORED).astype(np.float32))

    @property
    def loss_weights(self) -> Any:
        """The weight of each target's loss: that of a store made with --weight-key, else the loss mask."""
        return self._wrap(self._chunk.loss_weights[self._number])

    @property
    def attention_mask(self) -> Any:
        """1 for tokens and 0 for padding; int64, as Transformers wants it."""
        return self._wrap((self._chunk.segment_ids[self._number] > 0).astype(np.int64))

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
        return self._wrap(self._chunk.cu_seqlens(self._number))

    @property
    def max_seqlen(self) -> int:
        """The length of the longest segment."""
        return self._chunk.max_seqlen(self._number)

    @property
    def documents(self) -> list[list[tuple[int, int, int]]]:
        """For each row: document number, start in the row and length of every document in it."""
        return self._chunk.documents(self._number)

    def __repr__(self) -> str:
        return f"Batch({self._chunk.batch_size} rows of {self._chunk.seq_len} tokens)"
