"""Which files the paths of a store named when it was opened, so that a loader never mixes two stores.

Shards are mapped when they are first read, perhaps hours after the store was opened. A file that has another inode or
modification time by then is used only if it has the checksum that the manifest gave when the store was opened.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.store.background_check import BackgroundCheck
from tokenmill.store.manifest import FileInfo
from tokenmill.store.shard import hash_file

__all__ = ["OpenedFiles"]

_MASK = (1 << 64) - 1


class OpenedFiles:
    """The files of shards by suffix: their checksums, and the inode and modification time of each.

    `infos` has the checksums of each shard's files, and none for formats without checksums.
    """

    def __init__(self, infos: Sequence[Mapping[str, FileInfo]]) -> None:
        self._infos = list(infos)
        self._identities: dict[str, npt.NDArray[np.uint64]] = {}
        self._forget_process()

    def _forget_process(self) -> None:
        self._checks: weakref.WeakSet[BackgroundCheck] = weakref.WeakSet()
        self._touched: dict[tuple[int, str], str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A forked process maps files for itself.
        return {name: value for name, value in vars(self).items() if name not in {"_checks", "_touched"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_process()

    @classmethod
    def join(cls, parts: Sequence[OpenedFiles]) -> OpenedFiles:
        """Concatenate the shards of several stores."""
        joined = cls([info for part in parts for info in part._infos])
        for suffix in {suffix for part in parts for suffix in part._identities}:
            joined._identities[suffix] = np.concatenate([part._identities_of(suffix) for part in parts])
        return joined

    def info(self, shard: int, suffix: str) -> FileInfo | None:
        """The size and checksum of a file; None if no manifest has them."""
        return self._infos[shard].get(suffix)

    def note(self, shard: int, suffix: str, status: os.stat_result) -> None:
        """Record the identity of a shard's file."""
        if suffix not in self._identities:
            self._identities[suffix] = self._identities_of(suffix)
        self._identities[suffix][shard] = _identity(status)

    def _identities_of(self, suffix: str) -> npt.NDArray[np.uint64]:
        known = self._identities.get(suffix)
        return np.zeros((len(self._infos), 2), np.uint64) if known is None else known

    @property
    def have_checksums(self) -> bool:
        """Whether there is a checksum for the files of every shard."""
        return all(self._infos)

    def watch(self, check: BackgroundCheck) -> None:
        """Check all files, those that are open already and those that will be opened later."""
        if check not in self._checks:
            self._checks.add(check)
            for (shard, suffix), path in list(self._touched.items()):
                self._submit(check, shard, suffix, path)

    def _submit(self, check: BackgroundCheck, shard: int, suffix: str, path: str) -> None:
        if (info := self.info(shard, suffix)) is not None:
            check.touch(path, info, has_own_time=suffix in self._identities)

    def confirm(self, shard: int, suffix: str, path: str, descriptor: int) -> None:
        """Raise an error if an open file has other bytes than the one at its path when the store was opened."""
        if (shard, suffix) not in self._touched:
            self._touched[shard, suffix] = path
            for check in list(self._checks):
                self._submit(check, shard, suffix, path)
        identities = self._identities.get(suffix)
        if identities is None:
            return
        status = os.fstat(descriptor)
        known = identities[shard].tolist()
        if known == [0, 0] or known == _identity(status):
            return
        info = self.info(shard, suffix)
        if info is not None and info.bytes == status.st_size:
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                if hash_file(file) == info:
                    identities[shard] = _identity(status)
                    return
        raise StoreError(f"{path} was replaced or changed while the store was open; open the store again")


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_ino & _MASK, status.st_mtime_ns & _MASK]
