"""Readers by name; `detection.py` tells which one an input needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.readers.base import DelimitedReader, Reader, ReadOptions
from tokenmill.readers.detection import detect_format, format_by_name
from tokenmill.readers.json import JsonReader
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.readers.parquet import ParquetReader
from tokenmill.readers.text import TextReader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READERS", "DelimitedReader", "ReadOptions", "Reader", "detect_format", "format_by_name", "reader_for"]

AnyReader = ParquetReader | JsonlReader | JsonReader | TextReader

READERS: dict[str, Callable[[ReadOptions], AnyReader]] = {
    "json": JsonReader,
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "text": TextReader,
}


def reader_for(format: str, options: ReadOptions) -> AnyReader:
    """The reader of a format."""
    if format not in READERS:
        raise UsageError(f"format {format!r} is not known; expected one of {', '.join(READERS)}")
    return READERS[format](options)
