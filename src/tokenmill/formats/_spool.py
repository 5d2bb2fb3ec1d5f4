"""Ids that cannot be mapped in place: copied once into a temporary file, and mapped there.

The file has no name, so nothing is left however the process ends. Its path refers to an open descriptor; a copy of the
path in another process opens the same file, or makes it again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.formats.base import TokenFile
from tokenmill.store.table import Integers

__all__ = ["Spool"]


class Spool:
    """A temporary file that documents are appended to; `again` makes it once more in a process that lost it."""

    def __init__(self, dtype: npt.DTypeLike, again: Callable[[], list[TokenFile]]) -> None:
        self._dtype = np.dtype(dtype)
        with tempfile.TemporaryFile() as file:
            self._path = SpoolPath(os.dup(file.fileno()), again)
        self._lengths: list[Integers] = []
        self._num_tokens = 0

    def append(self, ids: npt.NDArray[Any], lengths: Integers) -> None:
        """Append the ids of documents, one after the other, and the length of each."""
        data = np.ascontiguousarray(ids, self._dtype).data.cast("B") if len(ids) else memoryview(b"")
        try:
            while len(data):
                data = data[os.write(self._path.descriptor, data) :]
        except OSError as error:
            raise StoreError(
                f"ids cannot be copied to {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder with space"
            ) from None
        self._lengths.append(lengths)
        self._num_tokens += len(ids)

    def finish(self) -> TokenFile:
        """Return a description of the file, which stays open as long as its path is referenced."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        starts = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        return TokenFile(self._path, self._dtype, self._num_tokens, self._num_tokens * self._dtype.itemsize, starts)


class SpoolPath(str):
    """The path of a file without a name, which exists as long as this object does."""

    descriptor: int
    _again: Callable[[], list[TokenFile]]

    def __new__(cls, descriptor: int, again: Callable[[], list[TokenFile]]) -> SpoolPath:
        """Take ownership of a descriptor."""
        path = super().__new__(cls, f"/proc/self/fd/{descriptor}")
        path.descriptor = descriptor
        path._again = again
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        status = os.fstat(self.descriptor)
        place = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return _reopen, (place, status.st_dev, status.st_ino, self._again)

    def __del__(self) -> None:
        # When the interpreter exits, this module's names may already be gone.
        if os is not None:
            os.close(self.descriptor)


def _reopen(place: str, device: int, inode: int, again: Callable[[], list[TokenFile]]) -> str:
    """Open the same file while the other process has it; otherwise copy the ids once more."""
    try:
        copy = SpoolPath(os.open(place, os.O_RDONLY | os.O_CLOEXEC), again)
    except OSError:
        return again()[0].path
    status = os.fstat(copy.descriptor)
    return copy if (status.st_dev, status.st_ino) == (device, inode) else again()[0].path
