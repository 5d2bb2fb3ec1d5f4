"""Kernel locks (flock) without waiting; a lock ends with its process, even if that is killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

__all__ = ["is_same_file", "try_lock"]


def try_lock(file: IO[Any] | int, mode: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder; return False if another process holds a lock that excludes this one.

    Raises `OSError` if the file system has no locks.
    """
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_same_file(file: IO[Any] | int, path: Path) -> bool:
    """Whether a path still names an open file: the previous holder of a lock may have removed or renamed it."""
    try:
        return os.path.samestat(os.fstat(file if isinstance(file, int) else file.fileno()), path.stat())
    except FileNotFoundError:
        return False
