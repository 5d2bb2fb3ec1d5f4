"""Cut a stream of bytes into blocks of complete documents, in bounded memory.

Parsing is fastest on blocks that fit the CPU cache, and a read rarely ends with a document. So each block ends with the
last delimiter of a read, and the rest is carried to the next block. A line of 256 MB is copied once. A document above
the limit is skipped without being held in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple

from tokenmill.compression import ByteStream, DamagedInput
from tokenmill.errors import DataError
from tokenmill.files import changed_while_read
from tokenmill.remote.paths import RemoteFile
from tokenmill.text_batch import Refusal

__all__ = [
    "BLOCK_BYTES",
    "BYTE_ORDER_MARK",
    "FileRange",
    "next_document",
    "overlaps_itself",
    "read_blocks",
    "skipped_as_too_long",
]

BLOCK_BYTES = 1 << 20
"""Bytes per read. JSON lines of 4 KB on one core: 256 KiB 653, 512 KiB 665, 1 MiB 662 MB/s."""
SEARCH_BYTES = 64 << 10
"""Bytes per read in the search for the next delimiter."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

RawFile = FileIO | RemoteFile


def overlaps_itself(delimiter: bytes) -> bool:
    """Whether two occurrences can share bytes. Then the result of a scan depends on its start: `aba` in `ababa`."""
    return any(delimiter.startswith(delimiter[shift:]) for shift in range(1, len(delimiter)))


def next_document(file: RawFile, offset: int, delimiter: bytes, limit: int | None = None) -> int:
    """Find the start of the first document at or after `offset`: the end of the file, or past `limit`, if none is."""
    if offset <= 0:
        return 0
    position = max(0, offset - len(delimiter))
    seam = b""
    file.seek(position)
    while data := file.read(SEARCH_BYTES):
        window = seam + data
        found = window.find(delimiter)
        if found >= 0:
            return position - len(seam) + found + len(delimiter)
        position += len(data)
        seam = window[-len(delimiter) + 1 :] if len(delimiter) > 1 else b""
        if limit is not None and position >= limit + len(delimiter):
            break
    return position


@dataclass(slots=True)
class FileRange:
    """The next `num_left` bytes of a file."""

    file: RawFile
    num_left: int

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, and `b""` at the end."""
        data = self.file.read(min(size, self.num_left))
        if not data and self.num_left:
            position = self.file.tell()
            raise DataError(str(self.file.name), changed_while_read(position, position + self.num_left))
        self.num_left -= len(data)
        return data

    def step_back(self, num_bytes: int) -> None:
        """Make the next read return the last bytes again."""
        self.file.seek(-num_bytes, os.SEEK_CUR)
        self.num_left += num_bytes


class DocumentBlock(NamedTuple):
    """The first `num_bytes` of `data`, complete documents with their delimiters; or skipped bytes without data."""

    start: int
    data: bytes | bytearray
    num_bytes: int
    problem: Refusal | None = None


def read_blocks(stream: ByteStream, start: int, delimiter: bytes, max_bytes: int) -> Iterator[DocumentBlock]:
    """Cut a stream whose first byte is at `start` into blocks, and hold the start of a document until its end is read.

    A stream that can step back reads that start again together with its end. This avoids a copy of each block: 665
    instead of 600 MB/s of JSON lines.
    """
    step_back: Callable[[int], None] | None = getattr(stream, "step_back", None)
    overlaps, size = overlaps_itself(delimiter), len(delimiter)
    held, num_skipped = bytearray(), 0
    problem: Refusal | None = None
    while True:
        try:
            data = stream.read(BLOCK_BYTES)
        except DamagedInput as damage:
            problem = Refusal("damaged", damage.reason, damage.num_documents)
            break
        if not data:
            break
        seam = bytes(held[-size + 1 :]) if size > 1 else b""
        if num_skipped and (end := (seam + data).find(delimiter) + size) >= size:
            yield DocumentBlock(start, b"", end, skipped_as_too_long(num_skipped + end - size))
            start += num_skipped + end
            data, seam = (seam + data)[end:], b""
            held, num_skipped = bytearray(), 0
        end = _last_end(seam + data, delimiter, overlaps=overlaps) - len(seam) if not num_skipped else 0
        if end <= 0:
            held += data
        else:
            num_bytes = len(held) + end
            block: bytes | bytearray = data
            if len(held) > BLOCK_BYTES:
                held += memoryview(data)[:end]
                block = held
            elif held:
                block = b"".join((held, memoryview(data)[:end]))
            held = bytearray() if step_back is not None else bytearray(memoryview(data)[end:])
            if step_back is not None:
                step_back(len(data) - end)
            yield DocumentBlock(start, block, num_bytes)
            start += num_bytes
        if num_skipped or len(held) >= max_bytes + size:
            # Drop the held bytes, except for a possible start of the delimiter.
            num_bytes = len(held) - size + 1
            del held[:num_bytes]
            num_skipped += num_bytes
            yield DocumentBlock(start, b"", num_bytes)
    if problem is None and num_skipped:
        problem = skipped_as_too_long(num_skipped + len(held))
    if held or problem is not None:
        yield DocumentBlock(start, held if problem is None else b"", len(held), problem)


def _last_end(window: bytes, delimiter: bytes, *, overlaps: bool) -> int:
    """Return the end of the last delimiter that a scan from the left finds, 0 if there is none."""
    found = window.rfind(delimiter)
    if overlaps and found >= 0:
        at = window.find(delimiter)
        while at >= 0:
            found, at = at, window.find(delimiter, at + len(delimiter))
    return found + len(delimiter) if found >= 0 else 0


def skipped_as_too_long(num_bytes: int) -> Refusal:
    """Refuse a record that is so long that it was not parsed."""
    return Refusal("too-long", f"{num_bytes:,} bytes in one document, more than --max-document-bytes allows")
