"""Which of the user's documents the parity gate compares: enough of them, from all over the inputs.

Up to 32 places are read from in turn, and one that has run out is replaced by another, so that one
huge file and ten thousand tiny ones both give a sample. The reference is slow and takes up to 300
bytes of memory for a byte of text, so short documents are preferred, and long ones are compared
whole, piece by piece, up to some megabytes of them; of the rest, parts from all over the document are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tokenmill.errors import DataError
from tokenmill.pipeline.plan import InputFile, Span
from tokenmill.pipeline.reading import Render, read_span
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import input_path

__all__ = ["Document", "Sample", "take_sample"]

SAMPLE_DOCUMENTS = 1000
SAMPLE_BYTES = 2_000_000
PLACES = 32
SEARCHED, MOST_READ = 16_000_000, 500_000_000
"""Characters that are read in search of short documents when there are enough long ones, and in any case."""
LONG_DOCUMENT, LONGEST_WHOLE = 4_000, 1_000_000
HELD_BYTES = 20_000_000
"""Long documents in memory; all of them are compared whole if there are no others."""
MOST_WHOLE_BYTES = 5_000_000
"""Long documents that are compared whole if there are others: a second or two of the reference."""
PIECE, LONGEST_PIECE = 50_000, 250_000
NUM_PARTS, PART = 4, 1_000

Split = Callable[[str, int], list[str]]
"""An engine's `split`."""


@dataclass(frozen=True)
class Document:
    """What is compared of one document: its pieces from end to end, or some parts of it."""

    texts: list[str]
    is_whole: bool = True


@dataclass
class Sample:
    """Documents in the order in which they were found, short ones first."""

    documents: list[Document] = field(default_factory=list)
    num_characters: int = 0
    unseen_keys: list[str] = field(default_factory=list)
    """Fields to keep that no document has which was read."""

    @property
    def is_enough(self) -> bool:
        """Whether there are 1,000 documents and 2 MB."""
        return len(self.documents) >= SAMPLE_DOCUMENTS and self.num_characters >= SAMPLE_BYTES

    @property
    def num_in_parts(self) -> int:
        """How many documents are not compared from end to end."""
        return sum(not document.is_whole for document in self.documents)

    def add(self, document: Document) -> None:
        """Take in one more document."""
        self.documents.append(document)
        self.num_characters += sum(map(len, document.texts))


def take_sample(inputs: list[InputFile], options: ReadOptions, split: Split, render: Render | None = None) -> Sample:
    """At least 1,000 documents and 2 MB, one from each place in turn; all of them when there are fewer.

    `split` cuts a long document where its ids come apart, so that it can be compared piece by piece.
    """
    sample, long = Sample(), _LongDocuments(split)
    num_read, most_whole_bytes = 0, HELD_BYTES
    seen_keys: set[str] = set()
    for text in _in_turn(inputs, options, render, seen_keys):
        num_read += len(text)
        if len(text) <= LONG_DOCUMENT:
            sample.add(Document([text]))
        else:
            long.add(text)
        many = len(sample.documents) + len(long) >= SAMPLE_DOCUMENTS
        if sample.is_enough or num_read > (SEARCHED if many else MOST_READ):
            most_whole_bytes = MOST_WHOLE_BYTES
            break
    for document in long.shortest_first(most_whole_bytes):
        if sample.is_enough:
            break
        sample.add(document)
    sample.unseen_keys = [key for key in options.keep_keys if key not in seen_keys] if num_read else []
    return sample


class _LongDocuments:
    """Long documents: those that fit in memory as they are, of the others only parts."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._num_held = 0
        self._texts: list[bytes] = []
        self._parts: list[Document] = []

    def __len__(self) -> int:
        return len(self._texts) + len(self._parts)

    def add(self, text: str) -> None:
        data = text.encode() if len(text) <= LONGEST_WHOLE else b""
        if data and self._num_held + len(data) <= HELD_BYTES:
            self._texts.append(data)
            self._num_held += len(data)
        else:
            self._parts.append(_take_parts(text))

    def shortest_first(self, most_whole_bytes: int) -> Iterator[Document]:
        """Documents that are whole up to so many bytes, then parts of documents."""
        num_whole_bytes = 0
        for data in sorted(self._texts, key=len):
            text = data.decode()
            pieces = self._split(text, PIECE) if len(text) > PIECE else [text]
            if num_whole_bytes + len(data) > most_whole_bytes or max(map(len, pieces)) > LONGEST_PIECE:
                yield _take_parts(text)
            else:
                num_whole_bytes += len(data)
                yield Document(pieces)
        yield from self._parts


def _take_parts(text: str) -> Document:
    """Stretches from the start to the end of a text, evenly apart."""
    starts = [(len(text) - PART) * number // (NUM_PARTS - 1) for number in range(NUM_PARTS)]
    return Document([text[start : start + PART] for start in starts], is_whole=False)


def _in_turn(
    inputs: list[InputFile], options: ReadOptions, render: Render | None, seen_keys: set[str]
) -> Iterator[str]:
    """A text from each of 32 places, then the next from each; a place without more gives way to another."""
    places = _places(inputs, options)
    readers: deque[Iterator[str]] = deque()
    while True:
        while len(readers) < PLACES and (place := next(places, None)) is not None:
            readers.append(_texts(inputs[place.input], place, options, render, seen_keys))
        if not readers:
            return
        text = next(readers[0], None)
        if text is None:
            readers.popleft()
        else:
            yield text
            readers.rotate(-1)


def _places(inputs: list[InputFile], options: ReadOptions) -> Iterator[Span]:
    """Spans that are all of the inputs together; any first ones of them are evenly spread."""
    per_input = max(1, PLACES // max(1, len(inputs)))
    for number in _spread(len(inputs)):
        yield from _places_in(number, inputs[number], options, per_input)


def _places_in(number: int, file: InputFile, options: ReadOptions, most: int) -> Iterator[Span]:
    """Compressed inputs and JSON arrays can only be read from their start, and tiny ones need no more."""
    edges: list[int] = []
    if most > 1 and file.format == "parquet":
        edges = _row_groups(file, options)
    elif most > 1 and file.bytes >= 1 << 20 and file.compression == "none" and file.format in {"jsonl", "text"}:
        edges = [file.bytes * part // most for part in range(most + 1)]
    count = min(most, len(edges) - 1)
    if count < 1:
        yield Span(number)
    for part in range(count):
        first, last = (len(edges) - 1) * part // count, (len(edges) - 1) * (part + 1) // count
        yield Span(number, edges[first], edges[last])


def _row_groups(file: InputFile, options: ReadOptions) -> list[int]:
    """Where the row groups of a Parquet file begin and end; nothing where it cannot be read."""
    try:
        return [0, *(stop for _, stop in ParquetReader(options).plan(input_path(file.path), 1))]
    except DataError:
        return []


def _spread(count: int) -> Iterator[int]:
    """All numbers below `count`, each as far as possible from those before: 0 4 2 6 1 5 3 7."""
    width = max(1, (count - 1).bit_length())
    for number in range(1 << width):
        reversed_bits = int(f"{number:0{width}b}"[::-1], 2)
        if reversed_bits < count:
            yield reversed_bits


def _texts(
    file: InputFile, span: Span, options: ReadOptions, render: Render | None, seen_keys: set[str]
) -> Iterator[str]:
    try:
        for batch in read_span(file, span, options, render):
            for index, key in enumerate(options.keep_keys):
                if key not in seen_keys and any(row[index] is not None for row in batch.kept or ()):
                    seen_keys.add(key)
            yield from batch.texts
    except DataError:
        # The run itself meets the same damage and decides what it means.
        return
