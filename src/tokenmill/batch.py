"""What flows while tokenizing: a batch of texts from a reader, then its tokens.

A `TextBatch` is about one megabyte of input, so that parsing stays in the CPU cache and
progress is smooth. Readers never raise for a bad record: they put a `Reject` beside the
good texts, and the pipeline decides whether that stops the run or is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "Reject", "TextBatch", "TokenBatch"]

IntArray = npt.NDArray[np.integer[Any]]


class Reject(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record that is not tokenized.

    `position` counts bytes of the decompressed input, or rows of a Parquet file; `line`
    counts lines (rows, elements) from the start of the span that was read, from 0.
    `num_documents` is above one when damage hides a known number of rows.
    """

    position: int
    line: int
    reason: str
    detail: str
    num_documents: int = 1


@dataclass(slots=True)
class TextBatch:
    """Texts in input order, where each one came from, and what was refused among them."""

    texts: list[str]
    positions: npt.NDArray[np.int64]
    kept: list[tuple[Any, ...]] | None = None
    rejects: list[Reject] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class TokenBatch:
    """The ids of a batch in one flat array; document i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: IntArray
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def join(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Several batches as one, in order."""
        offsets = np.zeros(1 + sum(map(len, batches)), np.int64)
        np.cumsum(np.concatenate([np.diff(batch.offsets) for batch in batches]), out=offsets[1:])
        return cls(np.concatenate([batch.ids for batch in batches]), offsets)

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[int]]) -> TokenBatch:
        """Flatten one list of ids per document, as the reference libraries return them."""
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(ids) for ids in documents], out=offsets[1:])
        flat = np.empty(int(offsets[-1]), np.uint32)
        for ids, start, stop in zip(documents, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            flat[start:stop] = ids
        return cls(flat, offsets)
