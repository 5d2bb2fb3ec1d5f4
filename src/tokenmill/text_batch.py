"""The data that flows while tokenizing: a batch of texts from a reader, then the tokens of an engine.

A `TextBatch` is about one megabyte of input, so that parsing stays in the CPU cache and progress is smooth. Readers do
not raise for a bad record. They add a `Reject` to the batch, and the pipeline decides whether to stop or to record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.formatting import show_safely

__all__ = [
    "IntArray",
    "PackedTexts",
    "Refusal",
    "Reject",
    "TextBatch",
    "TokenBatch",
    "Trained",
    "check_range",
    "encode_texts",
    "shorten",
    "too_long",
]

IntArray = npt.NDArray[np.integer[Any]]


class Refusal(NamedTuple):
    """Why one or more records are not tokenized: a reason from a small set, and one sentence of detail."""

    reason: str
    detail: str
    num_documents: int = 1


def shorten(text: str, limit: int = 190) -> str:
    """Shorten a detail to one readable line, without characters that control a terminal."""
    if not text.isprintable():
        text = show_safely(" ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def too_long(num_bytes: int, limit: int) -> Refusal:
    """Refuse a text above the limit."""
    return Refusal("too-long", f"the text has {num_bytes:,} bytes; --max-document-bytes is {limit:,}")


class Reject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record that is not tokenized, with its place.

    `position` counts bytes of the decompressed input, or rows of a Parquet file. `line` counts lines (rows, elements)
    from the start of the span that was read, from 0; it is -1 if documents are not lines. `num_documents` is above one
    if damage costs a known number of documents.
    """

    position: int
    line: int
    reason: str
    detail: str
    num_documents: int = 1


class Trained(NamedTuple):
    """The spans of characters of a text that are trained on, in order, each with its loss weight."""

    spans: list[tuple[int, int, float]]
    ends: bool
    """Whether the text ends with an end-of-text token, which is trained on too."""
    prompt: str | None = None
    """Of a preference pair: the prompt alone, which this text and its neighbour answer.

    Texts 2i and 2i + 1 of a batch are a pair. Their tokens decide where the prompt ends, so the spans are not used.
    """


class PackedTexts(Sequence[str]):
    """Texts in one buffer of UTF-8, for an engine that accepts the buffer; other callers see a sequence of strings.

    Half of English web pages contain a curly quote, which makes a `str` of two bytes per character. Building that
    string and encoding it to UTF-8 again would take a fifth of the time of reading and tokenizing.
    """

    ALL_LEADS = (1 << 64) - 1
    SEPARATOR = b'"\xff"'
    """Separates two texts: a byte that UTF-8 never contains, between the quotes that end and begin JSON strings."""

    def __init__(self, data: bytes, count: int, longest: int, leads: int = ALL_LEADS) -> None:
        self.data = data
        self.leads = leads
        """Which bytes may be the first of a character outside ASCII: bit i stands for the byte 0xC0 + i."""
        self.longest = longest
        """An upper bound of the bytes of one text."""
        self._count = count

    @classmethod
    def of(cls, texts: Sequence[str]) -> PackedTexts:
        """Copy texts into one buffer."""
        pieces = [text.encode() for text in texts]
        return cls(cls.SEPARATOR.join(pieces), len(pieces), max(map(len, pieces), default=0))

    @cached_property
    def pieces(self) -> list[bytes]:
        """Each text in UTF-8."""
        # Searching for one byte is much faster than searching for three.
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
    """Encode each text as UTF-8."""
    return texts.pieces if isinstance(texts, PackedTexts) else [text.encode() for text in texts]


@dataclass(slots=True)
class TextBatch:
    """Texts in input order, the place of each in its input, and the rejects among them.

    For supervised data a reader returns `records`, the values of the requested fields. Rendering turns them into
    texts and `trained` spans. `lines` are counted like `Reject.line`.
    """

    texts: Sequence[str]
    positions: npt.NDArray[np.int64]
    kept: list[tuple[Any, ...]] | None = None
    rejects: list[Reject] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0
    """The time to read and decompress the bytes, without parsing."""
    records: list[tuple[Any, ...]] | None = None
    lines: npt.NDArray[np.int64] | None = None
    trained: list[Trained] | None = None
    per_record: int = 1
    """Texts of one record: 2 if they are preference pairs."""

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Drop the texts for which `which` is false."""
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
        """Concatenate batches."""
        offsets = np.zeros(1 + sum(map(len, batches)), np.int64)
        np.cumsum(np.concatenate([np.diff(batch.offsets) for batch in batches]), out=offsets[1:])
        return cls(np.concatenate([batch.ids for batch in batches]), offsets)

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[int]]) -> TokenBatch:
        """Flatten the lists of ids that reference libraries return, one per document."""
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(ids) for ids in documents], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(documents), np.uint32, int(offsets[-1])), offsets)


def check_range(ids: IntArray, vocab_size: int) -> None:
    """Raise if an id is outside the vocabulary, because narrowing it to fewer bytes would change it."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise RuntimeError(f"the engine gave id {int(ids.max())}, outside the vocabulary of {vocab_size}")
