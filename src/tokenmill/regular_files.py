"""Open a file only if it is a regular one of a sane size, so that a hostile file can neither hang nor fill memory.

Opening a FIFO blocks, a device never ends, and a sparse file of a terabyte takes no disk space. The type and size are
those of the open descriptor, so the file cannot be exchanged between the check and the read. Errors are `OSError`s
whose `strerror` says what the file is: code that handles a missing or unreadable file handles these, too.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

__all__ = [
    "MOST_JSON_BYTES",
    "UnfitFile",
    "check_regular",
    "open_parquet",
    "open_regular",
    "read_regular",
    "regular_descriptor",
]

MOST_JSON_BYTES = 1 << 29
"""The largest manifest, plan or other JSON file that is read whole: a shard takes 700 bytes, so 700,000 fit."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnfitFile(OSError):
    """A file that is not read, because it is not a regular file or is too large."""


def regular_descriptor(path: str | os.PathLike[str], most_bytes: int | None = None) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor, which the caller closes, and its size."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on reads of regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return descriptor, _check(os.fstat(descriptor), path, most_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def open_regular(path: str | os.PathLike[str], most_bytes: int | None = None, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file of at most `most_bytes` for reading, as `open(path, "rb")` does."""
    descriptor, _ = regular_descriptor(path, most_bytes)
    return open(descriptor, "rb", buffering=buffering)  # noqa: PTH123 (a descriptor has no path)


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Read all bytes of a regular file of at most `most_bytes`."""
    descriptor, size = regular_descriptor(path, most_bytes)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor has no path)
        # Read no further than this size, because the file may be growing.
        return file.read(size)


def check_regular(path: str | os.PathLike[str], most_bytes: int | None = None) -> os.stat_result:
    """Return the status of a regular file; for libraries that open a path themselves."""
    status = os.stat(path)  # noqa: PTH116 (a Path for each of many files takes long)
    _check(status, path, most_bytes)
    return status


def open_parquet(path: str | os.PathLike[str]) -> ParquetFile:
    """Open a Parquet file if it is a regular one.

    pyarrow opens it by its path: threads of pyarrow that use a Python file need the interpreter's lock, and if the
    program exits at that moment, it aborts (once in 600 programs that end right after such a read).
    """
    import pyarrow.parquet as pq

    check_regular(path)
    return pq.ParquetFile(os.fspath(path), pre_buffer=False)


def _check(status: os.stat_result, path: str | os.PathLike[str], most_bytes: int | None) -> int:
    """Return the size of a file that is regular and not too large."""
    size = status.st_size
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise UnfitFile(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
    if most_bytes is not None and size > most_bytes:
        raise UnfitFile(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", os.fspath(path))
    return size
