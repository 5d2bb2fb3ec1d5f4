"""Tokens to files: links and whole-file copies where the bytes are equal, blocks of a few megabytes elsewhere.

Nothing here syncs: `publishing` makes a finished folder durable as a whole. The kernel is asked
to begin writing early, so that there is little left to wait for then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.exporters.base import Array, SplitSource
from tokenmill.store.documents import Documents

__all__ = [
    "BLOCK_TOKENS",
    "OutputFile",
    "convert",
    "copy_tokens",
    "file_blocks",
    "link_or_copy",
    "row_blocks",
    "shard_name",
    "token_blocks",
    "write_stream",
]

BLOCK_TOKENS = 1 << 20
"""2 to 8 MB at once: far above the cost of a call, far below any bound on memory."""
FLUSH_BYTES = 8 << 20


class OutputFile:
    """A file that is written front to back."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._num_bytes = 0
        self._flushing = 0

    def write(self, data: bytes | Array) -> None:
        """Add bytes, or the bytes of an array."""
        view = memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view("u1").data
        self._num_bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]
        self._flush()

    def append(self, path: str) -> None:
        """Add all of another file; inside the kernel, without a copy where the file system can."""
        with open(path, "rb", buffering=0) as source:  # noqa: PTH123 (one of many thousand shards)
            left = os.fstat(source.fileno()).st_size
            self._num_bytes += left
            try:
                while left > 0:
                    count = os.copy_file_range(source.fileno(), self._file.fileno(), min(left, FLUSH_BYTES))
                    if count == 0:
                        break
                    left -= count
            except (AttributeError, OSError):
                pass
            # Across file systems, or where the call does not exist; both files stand where it stopped.
            self._num_bytes -= left
            while piece := source.read(1 << 20):
                self.write(piece)
        self._flush()

    def _flush(self) -> None:
        if self._num_bytes - self._flushing >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            length = self._num_bytes - self._flushing
            os.posix_fadvise(self._file.fileno(), self._flushing, length, os.POSIX_FADV_DONTNEED)
            self._flushing = self._num_bytes

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def link_or_copy(source: str, target: Path) -> None:
    """A hard link, or a copy where there cannot be one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(os.path.realpath(source))
    except OSError:
        with OutputFile(target) as file:
            file.append(source)


def shard_name(stem: str) -> str:
    """The name of a shard without its folder."""
    return Path(stem).name


def write_stream(split: SplitSource, path: Path, dtype: npt.DTypeLike, suffix: str = ".bin") -> None:
    """All tokens of a split in one file, or with another suffix what lies beside them; one shard alone is a link."""
    documents = _beside(split, suffix)
    if split.stems and documents.dtype.itemsize == np.dtype(dtype).itemsize:
        if len(split.stems) == 1:
            link_or_copy(split.stems[0] + suffix, path)
            split.advance(documents.num_tokens if suffix == ".bin" else 0)
            return
        with OutputFile(path) as file:
            for stem, count in zip(split.stems, documents.table.num_tokens.tolist(), strict=True):
                file.append(stem + suffix)
                split.advance(count if suffix == ".bin" else 0)
        return
    with OutputFile(path) as file:
        for block in token_blocks(split, 0, documents.num_tokens):
            file.write(convert(block, dtype))
            split.advance(len(block))


def _beside(split: SplitSource, suffix: str) -> Documents:
    documents = split.documents.mask if suffix == ".mask" else split.documents
    assert documents is not None
    return documents


def token_blocks(split: SplitSource, start: int, stop: int) -> Iterator[Array]:
    """The tokens from `start` up to `stop`; every block is in the same memory."""
    buffer = np.empty(min(BLOCK_TOKENS, stop - start), split.documents.dtype)
    for first in range(start, stop, BLOCK_TOKENS):
        block = buffer[: min(BLOCK_TOKENS, stop - first)]
        copy_tokens(split, first, block)
        yield block


def copy_tokens(split: SplitSource, start: int, out: Array) -> None:
    """Fill an array with the tokens from `start` on.

    Shards are read and not mapped: all of them are read once and in order, and a process that maps them
    would seem to need as much memory as the store has bytes.
    """
    if not split.stems:
        split.documents.copy(start, out)
        return
    counts = split.documents.table.num_tokens
    ends = np.cumsum(counts)
    shard, done = int(np.searchsorted(ends, start, "right")), 0
    while done < len(out):
        first = start + done - int(ends[shard] - counts[shard])
        some = out[done : done + int(counts[shard]) - first]
        raw = some if some.dtype == split.documents.dtype else np.empty(len(some), split.documents.dtype)
        with open(f"{split.stems[shard]}.bin", "rb", buffering=0) as file:  # noqa: PTH123 (one of many thousand shards)
            file.seek(first * raw.itemsize)
            _read_exactly(file, raw.view("u1").data)
        if raw is not some:
            some[:] = raw
        done, shard = done + len(some), shard + 1


def row_blocks(split: SplitSource, dtype: npt.DTypeLike, first: int = 0, last: int | None = None) -> Iterator[Array]:
    """Full rows from number `first` up to `last`, some at a time, as arrays of (rows, seq_len) in the same memory."""
    last = split.num_rows if last is None else last
    step = max(1, BLOCK_TOKENS // split.seq_len)
    stored = split.documents.dtype
    # The cast happens while copying, unless it could change an id.
    safe = np.can_cast(stored, dtype)
    buffer = np.empty((min(step, max(0, last - first)), split.seq_len), dtype if safe else stored)
    for row in range(first, last, step):
        rows = buffer[: min(step, last - row)]
        copy_tokens(split, row * split.seq_len, rows.reshape(-1))
        yield rows if safe else convert(rows, dtype)
        split.advance(rows.size)


def convert(block: Array, dtype: npt.DTypeLike) -> Array:
    """The same ids in another type; one that does not fit is an error, never another id."""
    kind = np.dtype(dtype)
    if block.dtype == kind:
        return block
    if not np.can_cast(block.dtype, kind) and block.size:
        least, most = int(block.min()), int(block.max())
        if least < 0 or most > np.iinfo(kind).max:
            wrong = least if least < 0 else most
            raise StoreError(f"there is an id {wrong}, which does not fit {kind}; choose a format with larger ids")
    return block.astype(kind)


def file_blocks(path: Path, dtype: npt.DTypeLike, *, offset: int = 0, num_tokens: int | None = None) -> Iterator[Array]:
    """Bare ids of a file behind `offset` bytes, up to its end or so many; every block is in the same memory."""
    kind: np.dtype[Any] = np.dtype(dtype)
    buffer = bytearray(BLOCK_TOKENS * kind.itemsize)
    left = path.stat().st_size - offset if num_tokens is None else num_tokens * kind.itemsize
    if left < 0 or left % kind.itemsize:
        raise StoreError(f"{path} has no whole number of {kind} ids behind byte {offset}")
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            view = memoryview(buffer)[: min(left, len(buffer))]
            _read_exactly(file, view)
            left -= len(view)
            yield np.frombuffer(view, kind)


def _read_exactly(file: Any, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise StoreError(f"{file.name} ends too early")
        view = view[count:]
