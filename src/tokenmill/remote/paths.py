"""Inputs in a bucket, read where they are: as much of `Path` as reading needs, and a file that is fetched by range.

A file is read in blocks of a megabyte. Whoever reads one block after another finds the next ones fetched already,
the more the longer it goes on; whoever jumps, as Parquet does from column to column, keeps a block of each place.
Every block must be of the object that was opened (`If-Match`), so no reader ever sees two contents in one.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

from tokenmill.errors import TokenmillError
from tokenmill.remote.bucket import Bucket, ObjectInfo, is_remote, split_url
from tokenmill.remote.crew import submit

__all__ = ["InputPath", "RemoteFile", "RemotePath", "input_path", "is_remote"]

BLOCK_BYTES = 1 << 20
KEPT_BLOCKS = 16
MOST_AHEAD = 8
NUM_REQUESTS = 16


class RemoteStatus(NamedTuple):
    """What there is to know of an object without reading it; nobody keeps the time of a change as a hint."""

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """One object, under the names that `Path` has for what readers do."""

    def __init__(self, url: str) -> None:
        self._bucket, self._key = split_url(url)
        self._name = PurePosixPath(self._key)
        self._known: ObjectInfo | None = None

    def _info(self) -> ObjectInfo:
        """The object as it was when it was first looked at through this path."""
        if self._known is None:
            self._known = self._bucket.head(self._key)
        return self._known

    def __str__(self) -> str:
        return self._bucket.url(self._key)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self._name.name

    @property
    def suffixes(self) -> list[str]:
        """What its name ends in."""
        return self._name.suffixes

    def absolute(self) -> RemotePath:
        """Itself: a URL is as good as anywhere."""
        return self

    def stat(self) -> RemoteStatus:
        """Its size."""
        return RemoteStatus(self._info().num_bytes, 0)

    def exists(self) -> bool:
        """Whether there is such an object."""
        return self._bucket.exists(self._key)

    def fingerprint(self) -> str:
        """Its ETag, which changes whenever its content does; the scheme says whose."""
        etag = self._info().etag or ""
        return f"{self._bucket.scheme}:{etag.strip(chr(34))}"

    def open(self, mode: str = "rb", buffering: int = 0) -> RemoteFile:
        """Its bytes, all of one and the same content."""
        assert mode == "rb", mode
        return RemoteFile(self._bucket, self._info())


InputPath = Path | RemotePath
"""An input: a file of this machine, or an object."""


def input_path(path: str) -> InputPath:
    """Where an input is, by the text that names it."""
    return RemotePath(path) if is_remote(path) else Path(path)


class RemoteFile(io.RawIOBase):
    """An object as a file that is read and sought in, by one thread."""

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
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def size(self) -> int:
        """How many bytes it has."""
        return self._info.num_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Read on from another place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def stop_at(self, stop: int) -> None:
        """Fetch nothing ahead from here on; what is read there is fetched all the same."""
        self._stop = min(stop, self._info.num_bytes)

    def readinto(self, buffer: object) -> int:
        """Fill a buffer as far as the current block goes; 0 at the end."""
        view = memoryview(cast("bytearray", buffer)).cast("B")
        if self._position >= self._info.num_bytes or not len(view):
            return 0
        number, offset = divmod(self._position, BLOCK_BYTES)
        data = self._block(number)[offset : offset + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes: as many as there are, also across blocks."""
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
            for ahead in range(1, min(self._run, MOST_AHEAD) + 1):
                if number + ahead not in self._blocks and (number + ahead) * BLOCK_BYTES < self._stop:
                    self._fetch(number + ahead)
        self._blocks.move_to_end(number)
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)[1].cancel()
        try:
            return self._blocks[number].result()
        except TokenmillError:
            # Whoever reads on after that asks again.
            del self._blocks[number]
            raise

    def _fetch(self, number: int) -> None:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._info.num_bytes)
        read = partial(self._bucket.read_range, self._info, start, stop)
        self._blocks[number] = submit("inputs", NUM_REQUESTS, read)

    def close(self) -> None:
        """Let go of what was fetched."""
        for block in self._blocks.values():
            block.cancel()
        self._blocks.clear()
        super().close()
