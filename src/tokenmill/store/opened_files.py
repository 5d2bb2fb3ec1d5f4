"""Which files the paths of a store named when it was opened, so that a loader never mixes two stores.

Shards are mapped when they are first read, perhaps hours after the store was opened. A file that is another one by
then, or was changed, is used only if it has the checksum that the manifest gave when the store was opened. A mapped
file that is written in place changes the memory that batches come from; so a loader looks at some mapped files again
between two batches, for a thousandth of its time.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.store.background_check import BackgroundCheck, CheckedFile, LocalFile
from tokenmill.store.manifest import FileInfo
from tokenmill.store.shard import hash_file

__all__ = ["OpenedFiles"]

_MASK = (1 << 64) - 1
LOOK_FILES, LOOK_SHARE, LEAST_PAUSE = 64, 0.001, 0.05
"""Files to look at again at once, the share of the time that this may take, and the seconds between two times."""


class _Uses:
    """What this process does with the files; a copy for another process begins with nothing."""

    def __init__(self) -> None:
        self.watched: weakref.WeakKeyDictionary[BackgroundCheck, int] = weakref.WeakKeyDictionary()
        """The process in which each check was told of the files."""
        self.touched: dict[str, CheckedFile] = {}
        self.used: dict[str, tuple[int, str]] = {}
        """The shard and suffix of each file that was opened, by its path."""
        self.to_look_at: list[str] = []
        self.next_look = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return _Uses, ()


class OpenedFiles:
    """The files of shards by suffix: their checksums, and the inode and modification time of each.

    `infos` has the checksums of each shard's files, and none for formats without checksums.
    """

    def __init__(self, infos: Sequence[Mapping[str, FileInfo]]) -> None:
        self._infos = list(infos)
        self._marks: dict[str, npt.NDArray[np.uint64]] = {}
        self._here = _Uses()

    @classmethod
    def join(cls, parts: Sequence[OpenedFiles]) -> OpenedFiles:
        """Concatenate the shards of several stores."""
        joined = cls([info for part in parts for info in part._infos])
        for suffix in {suffix for part in parts for suffix in part._marks}:
            joined._marks[suffix] = np.concatenate([part._marks_of(suffix) for part in parts])
        return joined

    def note(self, shard: int, suffix: str, status: os.stat_result) -> None:
        """Remember which file the path of a shard's file names."""
        if suffix not in self._marks:
            self._marks[suffix] = self._marks_of(suffix)
        self._marks[suffix][shard] = _mark(status)

    def _marks_of(self, suffix: str) -> npt.NDArray[np.uint64]:
        known = self._marks.get(suffix)
        return np.zeros((len(self._infos), 2), np.uint64) if known is None else known

    @property
    def have_checksums(self) -> bool:
        """Whether there is a checksum for the files of every shard."""
        return all(self._infos)

    def watch(self, check: BackgroundCheck) -> None:
        """Have all files checked that have been opened or will be; those of its parent also in a forked process."""
        if self._here.watched.get(check) != os.getpid():
            self._here.watched[check] = os.getpid()
            for file in list(self._here.touched.values()):
                check.touch(file)

    def touch(self, file: CheckedFile) -> None:
        """Have a file checked that batches come from."""
        if file.name not in self._here.touched:
            self._here.touched[file.name] = file
            for check in list(self._here.watched):
                check.touch(file)

    def confirm(self, shard: int, suffix: str, path: str, descriptor: int) -> None:
        """Raise an error if an open file is another one than when the store was opened, with other bytes."""
        if path not in self._here.used:
            self._here.used[path] = shard, suffix
            if (info := self._infos[shard].get(suffix)) is not None:
                self.touch(LocalFile(path, info, is_copy=suffix not in self._marks))
        if not self._is_same(shard, suffix, os.fstat(descriptor), descriptor):
            raise _replaced(path)

    def look_again(self) -> None:
        """Raise an error if one of some mapped files was changed in place; call this often.

        A file that another took the place of stays mapped as it was.
        """
        started = time.monotonic()
        if started < self._here.next_look:
            return
        self._here.to_look_at = self._here.to_look_at or list(self._here.used)
        for path in self._here.to_look_at[-LOOK_FILES:]:
            shard, suffix = self._here.used[path]
            marks = self._marks.get(suffix)
            try:
                status = os.stat(path)  # noqa: PTH116 (a thousand a second)
                if marks is None or marks[shard, 0] != _mark(status)[0] or marks[shard].tolist() == _mark(status):
                    continue
                with Path(path).open("rb", buffering=0) as file:
                    if not self._is_same(shard, suffix, status, file.fileno()):
                        raise _replaced(path)
            except OSError:
                continue
        del self._here.to_look_at[-LOOK_FILES:]
        now = time.monotonic()
        self._here.next_look = now + max(LEAST_PAUSE, (now - started) / LOOK_SHARE)

    def _is_same(self, shard: int, suffix: str, status: os.stat_result, descriptor: int) -> bool:
        """Whether a file is the one of the opening, or has the checksum of the manifest."""
        if suffix not in self._marks:
            return True
        known, mark, info = self._marks[suffix][shard], _mark(status), self._infos[shard].get(suffix)
        if not known.any() or known.tolist() == mark:
            return True
        if info is not None and info.bytes == status.st_size:
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                if hash_file(file) == info:
                    known[:] = mark
                    return True
        return False


def _replaced(path: str) -> StoreError:
    return StoreError(f"{path} was replaced or changed while the store was open; open the store again")


def _mark(status: os.stat_result) -> list[int]:
    # Not the time of the last change to the inode: a hard link, as backups make, would have each file read as a whole.
    return [status.st_ino & _MASK, status.st_mtime_ns & _MASK]
