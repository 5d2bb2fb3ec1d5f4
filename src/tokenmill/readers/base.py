"""What a reader is: it turns a span of one input into batches of texts.

There are two kinds. Delimited inputs (JSON lines, text) are bytes with a delimiter between documents, and are read from
a range of an uncompressed file or from a stream. Parquet is read by rows. A reader does not raise for a bad document or
for damaged data: it adds a `Reject` to the batch. It raises `DataError` for a file that is missing or has changed.
"""

from __future__ import annotations

import json
import os
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from tokenmill.compression import ByteStream
from tokenmill.errors import DataError, UsageError
from tokenmill.files import InputStream, changed_while_read
from tokenmill.readers._blocks import BLOCK_BYTES, ExceedsMemory, FileRange, next_document, read_blocks
from tokenmill.remote.paths import InputPath, RemoteFile
from tokenmill.text_batch import Reject, TextBatch

__all__ = [
    "BLOCK_BYTES",
    "NO_LIMIT",
    "DelimitedReader",
    "ExceedsMemory",
    "ReadOptions",
    "Reader",
    "as_kept",
    "find_value",
    "split_key",
]


NO_LIMIT = 1 << 62
"""The memory of a process that has no limit of its own."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to find documents in an input. Every option except the last two changes the output."""

    text_key: str = "text"
    """The field with the text; dots lead into nested objects."""
    keep_keys: tuple[str, ...] = ()
    """Fields to return beside the text."""
    separator: str | None = None
    """Plain text: the string between two documents, instead of a line end."""
    whole_files: bool = False
    """Plain text: each file is one document."""
    record_keys: tuple[str, ...] = ()
    """The fields of supervised data: batches then have records instead of texts."""
    needed_keys: tuple[str, ...] = ()
    """Those of them without which a record is a reject."""
    max_document_bytes: int = 256_000_000
    """The longest text, in bytes of UTF-8."""
    memory_bytes: int = NO_LIMIT
    """The memory of the process; a document that does not fit is an error."""
    packed: bool = False
    """Return `PackedTexts` if that is faster for a caller that wants UTF-8."""


class Reader(Protocol):
    """Reads uncompressed files span by span."""

    counts_rows: bool
    """Whether positions and spans count rows. Otherwise they count bytes."""
    unit: str
    """What a user counts to find a document: a line, a row or an element."""
    splittable: bool
    """Whether `read_range` can start anywhere in an uncompressed file."""

    def __init__(self, options: ReadOptions) -> None: ...

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Divide a file into spans of about `task_bytes`."""

    def count_documents(self, path: InputPath) -> int | None:
        """Count documents and rejects, if the file stores their number; None otherwise."""
        return None

    def read_range(self, path: InputPath, start: int, stop: int | None) -> Iterator[TextBatch]:
        """Read the documents that start in `[start, stop)`, so that adjacent spans give each document once.

        `stop` is None for the end of the file.
        """


class DelimitedReader(Reader):
    """Reads bytes with a delimiter between documents: an uncompressed file, or a stream that may be decompressed."""

    counts_rows = False
    unit = "line"
    delimiter = b"\n"
    """What ends a document in an adapted stream; empty if the stream is one document."""
    max_bytes: int
    """A longer document is skipped without being parsed."""
    memory_bytes: int
    """A document that is longer than this, but within the limit, is an error."""

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Divide a file into ranges of `task_bytes`, the last of which may be shorter; one range if it is not split."""
        size = path.stat().st_size
        if not self.splittable:
            return [(0, size)]
        return [(start, min(start + task_bytes, size)) for start in range(0, size, task_bytes)]

    def read_range(self, path: InputPath, start: int, stop: int | None) -> Iterator[TextBatch]:
        """Read the documents of an uncompressed file that start in `[start, stop)`.

        Both ends move forward to the next document, so adjacent ranges neither share nor lose a document. This needs a
        delimiter that does not overlap itself. A file that ends before `stop` has shrunk since it was planned; this
        raises `DataError`, because its last documents would be lost without notice.
        """
        if not self.splittable:
            assert start == 0
            with InputStream(path, "none") as whole:
                yield from self.read_stream(self.adapt(whole))
            return
        try:
            stop = path.stat().st_size if stop is None else stop
            with path.open("rb", buffering=0) as file:
                first = next_document(file, start, self.delimiter, limit=stop)
                if first >= stop:
                    return
                last = next_document(file, stop, self.delimiter)
                if last < stop:
                    raise DataError(str(path), changed_while_read(file.seek(0, os.SEEK_END), stop))
                file.seek(first)
                if isinstance(file, RemoteFile):
                    file.stop_at(last)
                yield from self.read_stream(FileRange(file, last - first), position=first)
        except OSError as error:
            raise DataError(str(path), f"cannot be read: {error.strerror}") from None

    def adapt(self, stream: ByteStream) -> ByteStream:
        """Convert the bytes of an input to delimited documents."""
        return stream

    def read_stream(self, stream: ByteStream, *, position: int = 0) -> Iterator[TextBatch]:
        """Read all documents of an adapted stream whose first byte is at `position`, block by block.

        A document that exceeds `max_bytes` becomes a reject in a batch of its own. So does one that is cut off because
        the stream is damaged, in the last batch and with the reason "damaged". Documents that are not lines have the
        line number -1.
        """
        line = 0
        clock = time.perf_counter()
        for block in read_blocks(stream, position, self.delimiter, self.max_bytes, self.memory_bytes):
            read_seconds = time.perf_counter() - clock
            batch = self.decode(block.data, block.num_bytes if block.data else 0, block.start, line)
            batch.num_bytes, batch.read_seconds = block.num_bytes, read_seconds
            if block.problem is not None:
                batch.rejects.append(Reject(block.start, line if self.delimiter == b"\n" else -1, *block.problem))
                batch.num_lines = 1
            line += batch.num_lines
            yield batch
            clock = time.perf_counter()

    @abstractmethod
    def decode(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch:
        """Turn the first `num_bytes` of a buffer, which are complete documents, into a batch.

        The first byte has this position, and is in this line.
        """


def split_key(key: str) -> tuple[str, ...]:
    """Split a dotted key: `meta.url` is the field `url` of the object in the field `meta`."""
    parts = tuple(key.split("."))
    if not all(parts):
        raise UsageError(f"{key!r} is not a field; expected a name, or names joined by single dots")
    return parts


def find_value(value: Any, parts: tuple[str, ...]) -> Any:
    """Return the value at a path of names, None if there is none."""
    for name in parts:
        value = value.get(name) if type(value) is dict else None
    return value


def as_kept(value: Any) -> str | None:
    """Convert a value for a Parquet string column: a string stays, anything else becomes compact JSON."""
    if value is None or type(value) is str:
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError):
        # Integers beyond 64 bits, lone surrogates and types that only Parquet has.
        return json.dumps(value, separators=(",", ":"), default=str)
