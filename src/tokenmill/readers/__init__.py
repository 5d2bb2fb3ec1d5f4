"""Readers by name, and which one an input needs.

Content decides before the name does: Parquet announces itself, and a file called `.json` is
looked into, because both arrays and JSON lines go by that name. What is still unknown is
refused rather than guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.errors import DataError, UsageError
from tokenmill.files import DamagedInput, detect_compression, open_stream
from tokenmill.readers.base import DelimitedReader, Reader, ReadOptions
from tokenmill.readers.json import JsonReader
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.readers.parquet import ParquetReader
from tokenmill.readers.text import TextReader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READERS", "DelimitedReader", "ReadOptions", "Reader", "detect_format", "reader_for"]

AnyReader = ParquetReader | JsonlReader | JsonReader | TextReader

READERS: dict[str, Callable[[ReadOptions], AnyReader]] = {
    "json": JsonReader,
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "text": TextReader,
}

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_COMPRESSION_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
HEAD_BYTES = 64 << 10


def reader_for(format: str, options: ReadOptions) -> AnyReader:
    """The reader of a format."""
    if format not in READERS:
        raise UsageError(f"format {format!r} is not known; expected one of {', '.join(READERS)}")
    return READERS[format](options)


def detect_format(path: Path, head: bytes, options: ReadOptions) -> str:
    """The format of a file that starts with `head`, which may be compressed."""
    compression = detect_compression(head, path)
    if compression != "none":
        head = _decompressed_head(path, compression)
    if head.startswith(b"PAR1"):
        return "parquet"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSION_SUFFIXES:
        suffixes.pop()
    named = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if options.whole_files or options.separator is not None:
        if named not in (None, "text"):
            flag = "--whole-files" if options.whole_files else "--separator"
            raise DataError(
                str(path), f"{flag} is for plain text, and this is {named}. Pass --format text to read it so"
            )
        return "text"
    first_line = _starts_with_object(head)
    if named == "json":
        return "jsonl" if first_line == "whole" else "json"
    if named is not None:
        return named
    if first_line != "none":
        return "jsonl"
    if not head:
        return "text"
    known = ", ".join(("parquet", *sorted(suffix[1:] for suffix in _SUFFIXES)))
    raise DataError(str(path), f"its format is not known (names that are: {known}). Pass --format {'|'.join(READERS)}")


def _decompressed_head(path: Path, compression: str) -> bytes:
    head = b""
    with open_stream(path, compression) as stream:
        try:
            while len(head) < HEAD_BYTES and (data := stream.read(HEAD_BYTES - len(head))):
                head += data
        except DamagedInput:
            pass
    return head


def _starts_with_object(head: bytes) -> str:
    """Whether the first line is a `whole` JSON object, the start of one that the head cuts off, or `none`."""
    line, line_end, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return "none"
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "cut" if "truncated" in str(error) and not line_end else "none"
    return "whole"
