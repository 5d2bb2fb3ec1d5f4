"""What flows while tokenizing: a batch of texts from a reader, then its tokens.

A `TextBatch` is about one megabyte of input, so that parsing stays in the CPU cache and
progress is smooth. Readers never raise for a bad record: they put a `Reject` beside the
good texts, and the pipeline decides whether that stops the run or is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "PackedTexts", "Reject", "TextBatch", "TokenBatch", "Trained", "check_range", "encode_texts"]

IntArray = npt.NDArray[np.integer[Any]]


class Reject(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record that is not tokenized.

    `position` counts bytes of the decompressed input, or rows of a Parquet file; `line`
    counts lines (rows, elements) from the start of the span that was read, from 0; -1 where there are none.
    `num_documents` is above one when damage hides a known number of rows.
    """

    position: int
    line: int
    reason: str
    detail: str
    num_documents: int = 1


class Trained(NamedTuple):
    """What of a text is trained on: spans of characters and the weight of each, in order."""

    spans: list[tuple[int, int, float]]
    ends: bool
    """Whether an end-of-text token belongs behind it, which is trained on too."""


class PackedTexts(Sequence[str]):
    """Texts in one buffer of UTF-8, for an engine that takes them as they are; anyone else sees strings.

    Half of English web pages have a curly quote somewhere, which makes a `str` of two bytes a character; to build
    it and to turn it back into UTF-8 takes a fifth of the time of reading and encoding, and is not needed.
    """

    SEPARATOR = b'"\xff"'
    """Stands between two texts: a byte that UTF-8 never has, and the quotes that JSON has there anyway."""

    def __init__(self, data: bytes, count: int, longest: int) -> None:
        self.data = data
        self.longest = longest
        """No text has more bytes."""
        self._count = count

    @classmethod
    def of(cls, texts: Sequence[str]) -> PackedTexts:
        """The same texts in one buffer."""
        pieces = [text.encode() for text in texts]
        return cls(cls.SEPARATOR.join(pieces), len(pieces), max(map(len, pieces), default=0))

    @cached_property
    def pieces(self) -> list[bytes]:
        """Each text in UTF-8."""
        # One byte is found much faster than three.
        return [piece[1:-1] for piece in (b'"%b"' % self.data).split(b"\xff")] if self._count else []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [piece.decode() for piece in self.pieces[index]]
        return self.pieces[index].decode()


def encode_texts(texts: Sequence[str]) -> list[bytes]:
    """Each text in UTF-8."""
    return texts.pieces if isinstance(texts, PackedTexts) else [text.encode() for text in texts]


@dataclass(slots=True)
class TextBatch:
    """Texts in input order, where each one came from, and what was refused among them.

    Of supervised data a reader gives `records`, the values of the fields that were asked for; rendering them
    gives texts, and what of them is `trained` on. `lines` are counted as those of a `Reject`.
    """

    texts: Sequence[str]
    positions: npt.NDArray[np.int64]
    kept: list[tuple[Any, ...]] | None = None
    rejects: list[Reject] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0
    """What it took to get the bytes, before they were made sense of."""
    records: list[tuple[Any, ...]] | None = None
    lines: npt.NDArray[np.int64] | None = None
    trained: list[Trained] | None = None

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Leave out the texts that are not among `which`."""
        self.positions = self.positions[which]
        self.texts = list(compress(self.texts, which))
        if self.lines is not None:
            self.lines = self.lines[which]
        if self.kept is not None:
            self.kept = list(compress(self.kept, which))
        if self.trained is not None:
            self.trained = list(compress(self.trained, which))


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


def check_range(ids: IntArray, vocab_size: int) -> None:
    """Ids outside the vocabulary must never be narrowed to others."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise RuntimeError(f"the engine gave id {int(ids.max())}, outside the vocabulary of {vocab_size}")
