"""Inputs in a bucket: the part of `Path` that readers need, and a file that is fetched by range.

A file is fetched in blocks of a megabyte. Sequential reads prefetch the next blocks, more of them as reading continues;
for random reads, such as those of Parquet columns, the last blocks are kept. Every block must be of the object that was
opened (`If-Match`), so a reader never sees a mixture of two contents.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

from tokenmill.arguments import is_remote
from tokenmill.errors import TokenmillError
from tokenmill.remote.bucket import Bucket, ObjectInfo, split_url
from tokenmill.remote.thread_pool import submit

__all__ = ["InputPath", "RemoteFile", "RemotePath", "input_path"]

BLOCK_BYTES = 1 << 20
MAX_KEPT_BLOCKS = 16
MAX_BLOCKS_AHEAD = 8
MAX_REQUESTS = 16


class RemoteStatus(NamedTuple):
    """Size and time of change of an object; the time is 0, because it is not a reliable sign of a change."""

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """One object, with the methods of `Path` that readers call."""

    def __init__(self, url: str) -> None:
        self._bucket, self._key = split_url(url)

    @cached_property
    def _info(self) -> ObjectInfo:
        """The object as it was when this path first looked at it."""
        return self._bucket.head(self._key)

    def __str__(self) -> str:
        return self._bucket.url(self._key)

    @property
    def suffixes(self) -> list[str]:
        """The file extensions, such as `.jsonl` and `.gz`."""
        return PurePosixPath(self._key).suffixes

    def absolute(self) -> RemotePath:
        """The same path: a URL is always absolute."""
        return self

    def stat(self) -> RemoteStatus:
        """The size of the object."""
        return RemoteStatus(self._info.num_bytes, 0)

    def exists(self) -> bool:
        """Whether the object exists."""
        return self._bucket.exists(self._key)

    def fingerprint(self) -> str:
        """The scheme and the ETag, which changes with the content."""
        etag = self._info.etag or ""
        return f"{self._bucket.scheme}:{etag.strip(chr(34))}"

    def open(self, mode: str = "rb", buffering: int = 0) -> RemoteFile:
        """Open the object for reading; its content must not change meanwhile."""
        assert mode == "rb", mode
        return RemoteFile(self._bucket, self._info)


InputPath = Path | RemotePath
"""An input: a local file or an object."""


def input_path(path: str) -> InputPath:
    """The path of an input, from a local path or a URL."""
    return RemotePath(path) if is_remote(path) else Path(path)


class RemoteFile(io.RawIOBase):
    """An object as a seekable file, for one thread."""

    def __init__(self, bucket: Bucket, info: ObjectInfo) -> None:
        super().__init__()
        self._bucket = bucket
        self._info = info
        self.name = bucket.url(info.key)
        self._position = 0
        self._stop = info.num_bytes
        self._blocks: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._last = -2
        self._run = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the next read."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def stop_at(self, stop: int) -> None:
        """Prefetch nothing from `stop` on; reads there still work."""
        self._stop = min(stop, self._info.num_bytes)

    def readinto(self, buffer: object) -> int:
        """Fill a buffer up to the end of the current block; 0 at the end of the file."""
        view = memoryview(cast("bytearray", buffer)).cast("B")
        if self._position >= self._info.num_bytes or not len(view):
            return 0
        number, offset = divmod(self._position, BLOCK_BYTES)
        data = self._block(number)[offset : offset + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes across blocks, or fewer at the end of the file."""
        size = min(size if size >= 0 else self._info.num_bytes, max(0, self._info.num_bytes - self._position))
        buffer = bytearray(size)
        view = memoryview(buffer)
        while len(view):
            view = view[self.readinto(view) :]
        return bytes(buffer)

    def _block(self, number: int) -> memoryview:
        if number not in self._blocks:
            self._fetch(number)
        if number != self._last:
            self._run = self._run + 1 if number == self._last + 1 else 0
            self._last = number
            for ahead in range(1, min(self._run, MAX_BLOCKS_AHEAD) + 1):
                if number + ahead not in self._blocks and (number + ahead) * BLOCK_BYTES < self._stop:
                    self._fetch(number + ahead)
        self._blocks.move_to_end(number)
        while len(self._blocks) > MAX_KEPT_BLOCKS:
            self._blocks.popitem(last=False)[1].cancel()
        try:
            return self._blocks[number].result()
        except TokenmillError:
            # Let the next read of this block retry.
            del self._blocks[number]
            raise

    def _fetch(self, number: int) -> None:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._info.num_bytes)
        read = partial(self._bucket.read_range, self._info, start, stop)
        self._blocks[number] = submit("inputs", MAX_REQUESTS, read)

    def close(self) -> None:
        """Drop the blocks."""
        for block in self._blocks.values():
            block.cancel()
        self._blocks.clear()
        super().close()
