"""The inputs of a run, and the documents of a span of one.

An input is described at the time of planning: size, content fingerprint, format and compression.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.compression import DamagedInput
from tokenmill.errors import DataError
from tokenmill.files import (
    WHOLE_FINGERPRINT_BYTES,
    InputStream,
    changed_while_read,
    fingerprint,
)
from tokenmill.readers import delimited_reader_for, reader_for
from tokenmill.readers.base import BLOCK_BYTES, ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.text_batch import TextBatch

__all__ = [
    "Damage",
    "InputFile",
    "Render",
    "Span",
    "TextStream",
    "UnconfirmedText",
    "check_unchanged",
    "default_task_bytes",
    "find_damage",
    "read_span",
]

COMPRESSION_RATIO = 4
"""The assumed ratio of text to its compressed size, used to size tasks."""

TASKS_PER_RUN = 128
SMALLEST_TASK, LARGEST_TASK = 4 << 20, 256 << 20


Render = Callable[[TextBatch], TextBatch]
"""Turns the records of supervised data into texts."""


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One input at the time of planning."""

    path: str
    name: str
    bytes: int
    fingerprint: str
    mtime_ns: int
    format: str
    compression: str
    origin: str | None = None
    """The source from which it was fetched, with the revision; None for other files."""
    lacks_checksum: bool = False
    """Whether it is compressed without a checksum, so that damage may go undetected."""

    @property
    def text_bytes(self) -> int:
        """Bytes of text: exact for plain files, an estimate for compressed ones."""
        return self.bytes if self.compression == "none" else self.bytes * COMPRESSION_RATIO

    @property
    def is_sampled(self) -> bool:
        """Whether the fingerprint covers only a sample of the content."""
        return self.bytes > WHOLE_FINGERPRINT_BYTES and not is_remote(self.path)

    @property
    def stamp(self) -> int:
        """A number that changes when the file is modified: the modification time, or a hash of the fetched revision.

        The modification time does not work for fetched files, because it differs between machines.
        """
        return self.mtime_ns if self.origin is None else zlib.crc32(self.origin.encode())

    @property
    def shown(self) -> str:
        """The path for messages, relative to the working directory if it is below; the name of a fetched file."""
        return self.path.removeprefix(f"{Path.cwd()}/") if self.origin is None else self.name


class Damage(msgspec.Struct, frozen=True):
    """A damaged compressed input: text without a matching checksum is rejected."""

    confirmed: int
    """The bytes of text in front of the damaged frame."""
    reason: str
    num_documents: int
    """How many documents of the damaged frame could be read; at least one."""


class UnconfirmedText(DataError):
    """A frame of a compressed input is damaged, and some of its text may have been read already."""


class Span(msgspec.Struct, frozen=True):
    """A range of one input, in bytes of decompressed text or in rows; None as `stop` means the end of the input."""

    input: int
    start: int = 0
    stop: int | None = None
    damage: Damage | None = None
    """If set, the text up to this known damage is read, and then the damage is reported."""


def check_unchanged(files: Iterable[InputFile]) -> list[InputFile]:
    """Raise if an input has changed since the run began, because its spans may come from either version.

    An input with a new modification time but the same size and fingerprint passes. It is returned if its fingerprint
    covers only a sample of its content, which proves nothing about the rest.
    """
    doubtful = []
    for file in files:
        try:
            path = input_path(file.path)
            status = path.stat()
            if isinstance(path, Path) and (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
                continue
            if status.st_size == file.bytes and fingerprint(path) == file.fingerprint:
                if file.is_sampled:
                    doubtful.append(file)
                continue
        except OSError as error:
            raise DataError(file.shown, f"can no longer be read: {error.strerror}") from None
        raise DataError(file.shown, changed_while_read(status.st_size, file.bytes))
    return doubtful


def default_task_bytes(inputs: Iterable[InputFile]) -> int:
    """Choose a task size for about 128 tasks of 4 to 256 MiB of text each: two per core for 64 cores and 10 GB."""
    text_bytes = sum(file.text_bytes for file in inputs)
    wanted = min(max(text_bytes // TASKS_PER_RUN, SMALLEST_TASK), LARGEST_TASK)
    return max(wanted >> 20 << 20, SMALLEST_TASK)


def read_span(
    file: InputFile, span: Span, options: ReadOptions, render: Render | None = None, *, confirmed_only: bool = False
) -> Iterator[TextBatch]:
    """Read the documents that start inside a span, in input order.

    Damage does not raise an error: the readable documents come first, then a reject that describes the damage. With
    `confirmed_only`, a damaged frame raises `UnconfirmedText`, as some of its text may have been read.
    """
    reader = reader_for(file.format, options)
    with ExitStack() as resources:
        if file.compression == "none" and reader.splittable:
            stop = file.bytes if span.stop is None and not reader.counts_rows else span.stop
            batches = reader.read_range(input_path(file.path), span.start, stop)
        else:
            stream = resources.enter_context(closing(TextStream(file, options, span, confirmed_only=confirmed_only)))
            batches = stream.reader.read_stream(stream)
        yield from batches if render is None else map(render, batches)


class TextStream:
    """An input that is read front to back as delimited documents, up to the end of a span."""

    def __init__(
        self, file: InputFile, options: ReadOptions, span: Span | None = None, *, confirmed_only: bool = False
    ) -> None:
        span = span or Span(0)
        self.reader = delimited_reader_for(file.format, options)
        self._input = InputStream(input_path(file.path), file.compression)
        self._documents = self.reader.adapt(self._input)
        self._file = file
        self._damage = span.damage
        self._left = span.stop
        if span.damage is not None:
            self._left = min(span.damage.confirmed, span.damage.confirmed if span.stop is None else span.stop)
        self._confirmed_only = confirmed_only and file.compression != "none"
        self._position = self._confirmed = 0
        self.seconds = 0.0
        """The time spent on reading and decompressing."""

    @property
    def consumed(self) -> int:
        """How many bytes of the file on disk have been read."""
        return self._input.consumed

    @property
    def confirmed(self) -> int:
        """How many bytes of text are in front of the current frame.

        The bytes of a JSON array differ from those of the file, so they are confirmed only when all of them are.
        """
        return self._input.confirmed if self._documents is self._input else self._confirmed

    def close(self) -> None:
        """Close the file."""
        self._input.close()

    def read(self, size: int, /) -> bytes:
        """Read up to `size` bytes; `b""` at the end."""
        if self._left is not None:
            size = min(size, self._left)
        if not size and self._damage is not None:
            raise DamagedInput(self._damage.reason, num_documents=self._damage.num_documents)
        started = time.perf_counter()
        try:
            data = self._documents.read(size) if size else b""
        except DamagedInput as damage:
            if self._confirmed_only and not self._is_sound():
                advice = "get the file again, or tokenize it with --on-error skip, which leaves these bytes out"
                raise UnconfirmedText(self._file.shown, f"{self.describe(damage)}; {advice}") from None
            raise
        finally:
            self.seconds += time.perf_counter() - started
        self._position += len(data)
        if self._input.is_confirmed:
            self._confirmed = self._position
        if self._left is not None:
            self._left -= len(data)
        return data

    def describe(self, damage: DamagedInput) -> str:
        """Describe damage, with the bytes of the file from the start of the damaged frame to where reading ended."""
        start, stop = self._input.frame_start, self._input.consumed
        return f"{damage.reason} (bytes {start:,} to {stop:,} of the file)"

    def _is_sound(self) -> bool:
        """Read the rest of the file: after invalid JSON, the frame it is in may still have the right checksum."""
        with suppress(DamagedInput):
            while self._input.read(BLOCK_BYTES):
                pass
            return True
        return False


def find_damage(file: InputFile, options: ReadOptions) -> Damage | None:
    """Read a compressed input to its end, and count the documents that a damaged frame costs; None without damage."""
    with closing(TextStream(file, options)) as stream:
        delimiter = stream.reader.delimiter
        confirmed = num_after = 0
        ends_document = True
        try:
            while data := stream.read(BLOCK_BYTES):
                if stream.confirmed != confirmed:
                    confirmed, num_after = stream.confirmed, 0
                num_after += data.count(delimiter) if delimiter else 0
                ends_document = data.endswith(delimiter)
            return None
        except DamagedInput as damage:
            if stream.confirmed != confirmed:
                num_after, ends_document = 0, True
            num_documents = max(1, num_after + (not ends_document))
            reason = f"{stream.describe(damage)}; --on-error keep-damaged keeps what can be read of them"
            return Damage(stream.confirmed, reason, num_documents)
