"""Reading one span of one input, whatever its format and compression, as batches of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.batch import Reject, TextBatch
from tokenmill.errors import DataError
from tokenmill.files import open_stream
from tokenmill.pipeline.plan import InputFile, Span, Task
from tokenmill.readers import reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import InputPath, input_path

__all__ = ["Render", "TextStream", "describe_place", "read_span", "read_spool"]


Render = Callable[[TextBatch], TextBatch]
"""Turns the records of supervised data into texts."""


def read_span(file: InputFile, span: Span, options: ReadOptions, render: Render | None = None) -> Iterator[TextBatch]:
    """The documents that start inside a span, in input order.

    Damage does not raise: what was readable comes first, then a reject that says what is wrong.
    """
    batches = _read_span(file, span, options)
    return batches if render is None else map(render, batches)


def _read_span(file: InputFile, span: Span, options: ReadOptions) -> Iterator[TextBatch]:
    path = input_path(file.path)
    reader = reader_for(file.format, options)
    if isinstance(reader, ParquetReader):
        unreadable = _explain_unreadable(path, span, options)
        if unreadable is not None:
            yield TextBatch([], np.zeros(0, np.int64), [] if options.keep_keys else None, [unreadable])
            return
        stop = reader.num_rows(path) if span.stop is None else span.stop
        yield from reader.read_range(path, span.start, stop)
    elif file.compression == "none" and reader.splittable:
        yield from reader.read_range(path, span.start, file.bytes if span.stop is None else span.stop)
    else:
        yield from reader.read_stream(TextStream(file, options, stop=span.stop))


def _explain_unreadable(path: InputPath, span: Span, options: ReadOptions) -> Reject | None:
    """Why no row of a Parquet span can be a document: there is no footer, or no column of texts."""
    reader = ParquetReader(msgspec.structs.replace(options, keep_keys=()))
    num_rows = 0
    try:
        num_rows = reader.num_rows(path)
        reader.plan(path, 1 << 62)
    except DataError as error:
        hidden = (num_rows if span.stop is None else min(span.stop, num_rows)) - span.start
        return Reject(span.start, -1, "no-text-column" if num_rows else "damaged", error.reason, max(1, hidden))
    return None


def read_spool(file: InputFile, task: Task, options: ReadOptions, render: Render | None = None) -> Iterator[TextBatch]:
    """The documents of a task that a feeder has written to a file of its own."""
    assert task.spool is not None
    reader = reader_for(file.format, options)
    assert not isinstance(reader, ParquetReader)
    batches = reader.read_stream(open_stream(Path(task.spool), "none"), position=task.spans[0].start)
    yield from batches if render is None else map(render, batches)


class TextStream:
    """An input read front to back as delimited documents, up to byte `stop` of them."""

    def __init__(self, file: InputFile, options: ReadOptions, *, stop: int | None = None) -> None:
        reader = reader_for(file.format, options)
        assert not isinstance(reader, ParquetReader)
        self._input = open_stream(input_path(file.path), file.compression)
        self._documents = reader.adapt(self._input)
        self._left = stop
        self.seconds = 0.0
        """What reading and decompressing has taken."""

    @property
    def consumed(self) -> int:
        """How many bytes of the file on disk have been read."""
        return self._input.consumed

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; `b""` at the end."""
        started = time.perf_counter()
        data = self._read(size)
        self.seconds += time.perf_counter() - started
        return data

    def _read(self, size: int) -> bytes:
        if self._left is None:
            return self._documents.read(size)
        data = self._documents.read(min(size, self._left)) if self._left else b""
        self._left -= len(data)
        return data


def describe_place(file: InputFile, task: Task, reject: Reject) -> str | None:
    """Where in its whole input a reject is, counted from 1; bytes where the documents are no lines."""
    if file.format == "parquet":
        return f"row {reject.position + 1}" if reject.line >= 0 else None
    if reject.line < 0:
        return f"byte {reject.position}"
    span = task.spans[0]
    number = task.first_line + reject.line
    if task.spool is None and len(task.spans) == 1 and span.start > 0:
        number = _count_line_ends(input_path(file.path), reject.position)
    return f"{'element' if file.format == 'json' else 'line'} {number + 1}"


def _count_line_ends(path: InputPath, stop: int) -> int:
    count = 0
    with path.open("rb", buffering=0) as file:
        while stop > 0 and (data := file.read(min(stop, 1 << 22))):
            count += data.count(b"\n")
            stop -= len(data)
    return count
