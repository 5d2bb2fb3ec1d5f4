"""Ids that cannot be mapped where they are: copied once into a temporary file, and mapped there.

The file has no name, so nothing is left behind however the process ends. It is found through the descriptor
that its path holds; a copy of the path in another process opens the same file, or makes it anew.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import TokenFile
from tokenmill.store.table import Integers

__all__ = ["Spool"]


class Spool:
    """A temporary file that ids are appended to, one document after the other.

    `again` describes the same files once more, for copies that outlive this one.
    """

    def __init__(self, dtype: npt.DTypeLike, again: Callable[[], list[TokenFile]]) -> None:
        self._again = again
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (it is to outlive this call)
        self._lengths: list[Integers] = []
        self._num_tokens = 0

    def append(self, ids: npt.NDArray[Any], lengths: Integers) -> None:
        """Documents end to end, and how long each is."""
        data = np.ascontiguousarray(ids, self._dtype).data.cast("B") if len(ids) else memoryview(b"")
        try:
            while len(data):
                data = data[self._file.write(data) :]
        except OSError as error:
            raise StoreError(
                f"ids cannot be copied to {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder with room"
            ) from None
        self._lengths.append(lengths)
        self._num_tokens += len(ids)

    def finish(self) -> TokenFile:
        """The file as it is now."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        starts = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        path = SpoolPath(os.dup(self._file.fileno()), self._again)
        self._file.close()
        return TokenFile(path, self._dtype, self._num_tokens, starts, self._num_tokens * self._dtype.itemsize)


class SpoolPath(str):
    """The path of a file without a name, which is there for as long as somebody has this path."""

    _descriptor: int
    _again: Callable[[], list[TokenFile]]

    def __new__(cls, descriptor: int, again: Callable[[], list[TokenFile]]) -> SpoolPath:
        """Take over a descriptor."""
        path = super().__new__(cls, f"/proc/self/fd/{descriptor}")
        path._descriptor = descriptor
        path._again = again
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        status = os.fstat(self._descriptor)
        place = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return _reopen, (place, status.st_dev, status.st_ino, self._again)

    def __del__(self) -> None:
        # At the end of the interpreter this module's names may be gone already.
        if os is not None:
            os.close(self._descriptor)


def _reopen(place: str, device: int, inode: int, again: Callable[[], list[TokenFile]]) -> str:
    """The same file, while somebody else has it open; else the ids are copied once more."""
    try:
        copy = SpoolPath(os.open(place, os.O_RDONLY | os.O_CLOEXEC), again)
    except OSError:
        return again()[0].path
    status = os.fstat(copy._descriptor)
    return copy if (status.st_dev, status.st_ino) == (device, inode) else again()[0].path
