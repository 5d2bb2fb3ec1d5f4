"""What a reader is: it turns a span of one input into batches of texts.

Two kinds exist. Delimited inputs (JSON lines, text) are bytes with a delimiter between
documents: any range of a plain file, or a stream, can be read. Parquet is read by rows.
Neither raises for a single bad document; it becomes a `Reject` beside the good texts. Only
an input that cannot be read at all is a `DataError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from tokenmill.batch import TextBatch
from tokenmill.compression import Stream
from tokenmill.remote.paths import InputPath

__all__ = ["DelimitedReader", "ReadOptions", "Reader", "Stream"]


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How documents are found in an input; all of it but `packed` changes the output."""

    text_key: str = "text"
    """The field that holds the text; dots lead into nested objects."""
    keep_keys: tuple[str, ...] = ()
    """Fields to hand on beside the text."""
    separator: str | None = None
    """Plain text: what stands between documents, instead of a line end."""
    whole_files: bool = False
    """Plain text: each file is one document."""
    record_keys: tuple[str, ...] = ()
    """Fields that make a document together, instead of one text: batches then have records."""
    max_document_bytes: int = 256_000_000
    """The longest text, in bytes of UTF-8."""
    packed: bool = False
    """Hand texts over as `PackedTexts` where that is faster for someone who takes UTF-8."""


class Reader(Protocol):
    """Reads plain inputs span by span. A span counts bytes, or rows for Parquet."""

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Spans of about `task_bytes` that together are the whole input."""

    def read_range(self, path: InputPath, start: int, stop: int) -> Iterator[TextBatch]:
        """Exactly the documents that start in a span, so consecutive spans give each one once."""


class DelimitedReader(Reader, Protocol):
    """Reads streams as well, plain or decompressed."""

    @property
    def splittable(self) -> bool:
        """Whether `read_range` can start anywhere in a plain file."""

    @property
    def delimiter(self) -> bytes:
        """What ends a document in the adapted stream; empty when the stream is one document."""

    def adapt(self, stream: Stream) -> Stream:
        """The stream of delimited documents that an input's own bytes stand for."""

    def read_stream(self, stream: Stream, *, position: int = 0) -> Iterator[TextBatch]:
        """All documents of an adapted stream whose first byte is at `position`.

        Damage does not raise: the last batch has one reject with the reason "damaged".
        """
