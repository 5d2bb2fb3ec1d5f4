"""What a reader is: it turns a span of one input into batches of texts.

There are two kinds. Delimited inputs (JSON lines, text) are bytes with a delimiter between documents, and are read from
a range of an uncompressed file or from a stream. Parquet is read by rows. A reader does not raise for a bad document or
for damaged data: it adds a `Reject` to the batch. It raises `DataError` for a file that is missing or has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from tokenmill.compression import ByteStream
from tokenmill.errors import UsageError
from tokenmill.files import open_stream
from tokenmill.remote.paths import InputPath
from tokenmill.text_batch import TextBatch

__all__ = [
    "BLOCK_BYTES",
    "ByteStream",
    "DelimitedReader",
    "ReadOptions",
    "Reader",
    "as_kept",
    "find_value",
    "split_key",
]

BLOCK_BYTES = 1 << 20
"""Bytes per read. JSON lines of 4 KB on one core: 256 KiB 653, 512 KiB 665, 1 MiB 662 MB/s."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to find documents in an input. Every option except `packed` changes the output."""

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
    max_document_bytes: int = 256_000_000
    """The longest text, in bytes of UTF-8."""
    packed: bool = False
    """Return `PackedTexts` if that is faster for a caller that wants UTF-8."""


class Reader(Protocol):
    """Reads uncompressed files span by span."""

    counts_rows: bool
    """Whether positions and spans count rows. Otherwise they count bytes."""
    splittable: bool
    """Whether `read_range` can start anywhere in an uncompressed file."""

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Divide a file into spans of about `task_bytes`."""
        ...

    def count_documents(self, path: InputPath) -> int | None:
        """Count documents and rejects, if the file stores their number; None otherwise."""
        ...

    def read_range(self, path: InputPath, start: int, stop: int | None) -> Iterator[TextBatch]:
        """Read the documents that start in `[start, stop)`, so that adjacent spans give each document once.

        `stop` is None for the end of the file.
        """
        ...


class DelimitedReader(Reader, Protocol):
    """Reads streams as well, uncompressed or decompressed. Its defaults are those of a file that cannot be split."""

    counts_rows: bool = False
    splittable: bool = False
    delimiter: bytes
    """What ends a document in an adapted stream; empty if the stream is one document."""

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Return one span, the whole file."""
        return [(0, path.stat().st_size)]

    def count_documents(self, path: InputPath) -> int | None:
        """Return None: bytes do not say how many documents they hold."""
        return None

    def read_range(self, path: InputPath, start: int, stop: int | None) -> Iterator[TextBatch]:
        """Read the documents of a whole file."""
        assert start == 0
        with open_stream(path, "none") as stream:
            yield from self.read_stream(self.adapt(stream))

    def adapt(self, stream: ByteStream) -> ByteStream:
        """Convert the bytes of an input to delimited documents."""
        return stream

    def read_stream(self, stream: ByteStream, *, position: int = 0) -> Iterator[TextBatch]:
        """Read all documents of an adapted stream whose first byte is at `position`.

        If the stream is damaged, the last batch has one reject with the reason "damaged".
        """
        ...


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
