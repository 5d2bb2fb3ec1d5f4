"""A batch as the user gets it: inputs, targets, and everything that follows from where documents start in its rows.

Batches are views of a `Chunk`, because several small batches are filled together: a batch of 8 x 2,048 tokens is so
small that the calls would cost more than the copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.filling.fill import Chunk
from tokenmill.store.documents import Documents

__all__ = ["Batch", "NumpyBatch"]

Tensor = TypeVar("Tensor")
"""An array of the framework."""


class Batch(msgspec.Struct, Generic[Tensor], eq=False):
    """Rows of one step: unpacks as `inputs, targets`, both of shape (batch_size, seq_len).

    A target of `ignore_index`, by default -100, has no loss. Arrays are those of the framework of the loader.
    """

    inputs: Tensor
    targets: Tensor
    _chunk: Chunk
    _number: int
    _wrap: Callable[[Any], Tensor] = np.asarray  # type: ignore[assignment]
    """Turns an array of numpy into one of the framework."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.inputs, self.targets))

    def __getitem__(self, index: int) -> Tensor:
        return (self.inputs, self.targets)[index]

    def __len__(self) -> int:
        return 2

    @property
    def input_ids(self) -> Tensor:
        """The inputs, as supervised trainers call them."""
        return self.inputs

    @property
    def target_ids(self) -> Tensor:
        """The targets, as supervised trainers call them."""
        return self.targets

    @property
    def is_trained(self) -> Tensor:
        """Whether each input itself is trained on, as unshifted labels need it; a target is one token further."""
        return self._wrap(self._chunk.is_trained[self._number])

    @property
    def owners(self) -> list[Documents | None]:
        """The documents that the rows come from, None for blank rows."""
        rows = range(self._first_row, self._first_row + self._chunk.batch_size)
        return [self._chunk.owner_of(row) for row in rows]

    @property
    def seq_len(self) -> int:
        """The tokens of a whole row, of which a context-parallel rank has a part."""
        return self._chunk.seq_len

    @property
    def is_masked(self) -> bool:
        """Whether the documents of a row are masked from each other."""
        return self._chunk.is_masked

    @property
    def ignore_index(self) -> int:
        """The target of tokens without a loss."""
        return self._chunk.ignored

    @property
    def loss_mask(self) -> Tensor:
        """1.0 where a token has a target with a loss, otherwise 0.0."""
        return self._wrap((self._chunk.targets[self._number] != self._chunk.ignored).astype(np.float32))

    @property
    def loss_weights(self) -> Tensor:
        """The weight of each target's loss: that of a store made with --weight-key, otherwise the loss mask."""
        return self._wrap(self._chunk.loss_weights[self._number])

    @property
    def attention_mask(self) -> Tensor:
        """1 for tokens and 0 for padding; int64, as Transformers expects."""
        return self._wrap((self._chunk.spread("segment_ids")[self._number] > 0).astype(np.int64))

    @property
    def positions(self) -> Tensor:
        """The position of each token in its document's part of the row; int32."""
        return self._wrap(self._chunk.spread("positions")[self._number])

    @property
    def segment_ids(self) -> Tensor:
        """1, 2, ... for the documents of each row, 0 for padding; int32. Masks of FlexAttention compare these ids."""
        return self._wrap(self._chunk.spread("segment_ids")[self._number])

    @property
    def cu_seqlens(self) -> Tensor:
        """Where documents start when rows are laid end to end, and the end; int32, as FlashAttention expects.

        Of rows with `max_documents`, the end is repeated, so that all batches have one shape.
        """
        return self._wrap(self._chunk.cover.cu_seqlens[self._first_row // self._chunk.batch_size])

    @property
    def cu_seqlens_unpadded(self) -> Tensor:
        """The sums of the documents' lengths without the padding of `align` or of rows, for TransformerEngine.

        There is one for each of `cu_seqlens`, which counts padding as it is in the batch. With context parallelism,
        both are about the whole rows.
        """
        return self._wrap(self._chunk.cover.unpadded_cu_seqlens(self._first_row // self._chunk.batch_size))

    @property
    def row_places(self) -> Tensor:
        """The place in its row of each token of a row; 0, 1, 2, ... except with context parallelism."""
        cutter = self._chunk.cutter
        places = np.arange(self._chunk.seq_len) if cutter is None else cutter.row_places
        return self._wrap(places.astype(np.int32))

    @property
    def row_cu_seqlens(self) -> Tensor:
        """The same for each row by itself, of shape (batch_size, n); the end of a row is repeated up to one length."""
        stop = self._first_row + self._chunk.batch_size
        return self._wrap(self._chunk.cover.row_cu_seqlens(self._first_row, stop))

    @property
    def max_seqlen(self) -> int:
        """The length of the longest segment; of rows with `max_documents`, always `seq_len`."""
        return self._chunk.cover.max_seqlens[self._first_row // self._chunk.batch_size]

    @property
    def num_documents(self) -> npt.NDArray[np.int64]:
        """The number of documents in each row, an array of numpy in all frameworks."""
        return self._chunk.cover.count_documents(self._first_row, self._first_row + self._chunk.batch_size)

    @property
    def documents(self) -> list[list[tuple[int, int, int]]]:
        """For each row: document number, start in the row and length of every document in it."""
        rows = range(self._first_row, self._first_row + self._chunk.batch_size)
        return [self._chunk.cover.documents_of(row) for row in rows]

    @property
    def sources(self) -> Tensor:
        """The number of the store that each row comes from, as in `loader.rows.sources`; int64, of shape (batch_size,).

        It is -1 for blank rows, and for rows with documents of several stores that were opened as one.
        """
        return self._wrap(self._chunk.sources[self._first_row : self._first_row + self._chunk.batch_size])

    @property
    def token_sources(self) -> Tensor:
        """The number of the store that each token comes from, -1 for padding; int32."""
        return self._wrap(self._chunk.token_sources[self._number])

    @property
    def num_masked(self) -> dict[str, int]:
        """What `token_masks` left out of the loss in this batch: `repetition_rows` and `goldfish_targets`."""
        return self._chunk.num_masked(self._number)

    @property
    def _first_row(self) -> int:
        """The place of the first row among those that were resolved together."""
        return self._chunk.start + self._number * self._chunk.batch_size

    def __repr__(self) -> str:
        arrays = (("inputs", self.inputs), ("targets", self.targets))
        shown = [f"{name} {tuple(array.shape)} {_name_dtype(array)}" for name, array in arrays]  # type: ignore[attr-defined]
        return f"Batch({', '.join(shown)}; also {', '.join(DERIVED)})"


NumpyBatch = Batch[npt.NDArray[Any]]
DERIVED = tuple(
    name for name, member in vars(Batch).items() if isinstance(member, property) and not name.startswith("_")
)
"""What else a batch has, made when it is asked for."""


def _name_dtype(array: Any) -> str:
    """`int64`, for any framework."""
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")
