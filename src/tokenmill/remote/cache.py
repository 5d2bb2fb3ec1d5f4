"""Files of object stores on a local disk, in bounded space, shared by all processes of a machine.

    FOLDER/lock           shared lock to pin or rename a file, exclusive lock to evict files
    FOLDER/leases/NAME    locked by a living process: the files that it has mapped, one a line
    FOLDER/checked/...    files of stores whose checksums were right
    FOLDER/STORE/...      files under their names in the store; `.tmp` during the download

The process that holds the lock on the temporary name downloads a file, compares it with its checksum, syncs and
renames it. A file that a process has mapped is never evicted, because its blocks would stay in use without being
counted. All locks are the kernel's and end with their process, so a kill leaves only files that others take over
or evict.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tokenmill.checksum import hash_rest
from tokenmill.errors import StoreError
from tokenmill.file_lock import is_same_file, try_lock
from tokenmill.machine import cache_folder
from tokenmill.regular_files import read_regular
from tokenmill.remote.bucket import Bucket, ObjectInfo

__all__ = ["Cache", "CacheEntry", "NoRoom"]

NOT_COUNTED = {"leases", "checked", "proven"}
"""Folders of small files that are not copies of objects."""
POLL_SECONDS = 0.05


class NoRoom(StoreError):
    """A file fits neither the cache beside the mapped files, nor the disk."""


class CacheEntry(NamedTuple):
    """A file of a store: its name in the cache, the object it comes from, and its checksum."""

    name: str
    info: ObjectInfo
    xxh3: str


class Cache:
    """A folder of at most `max_bytes`, counting all processes; by default half of the free space of its disk."""

    def __init__(self, folder: Path | None = None, max_bytes: int | None = None) -> None:
        self.folder = (folder or cache_folder()).absolute()
        with self._explained_errors():
            (self.folder / "leases").mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
            if max_bytes is None:
                held = sum(size for _, size, _ in self._files())
                max_bytes = (shutil.disk_usage(self.folder).free + held) // 2
        self.max_bytes = max_bytes
        self._lease: tuple[int, int] | None = None
        self._pinned: set[str] = set()
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Cache, (self.folder, self.max_bytes)

    def make_folder(self, name: str) -> Path:
        """Create the folder for the files of a store."""
        path = self.folder / name
        with self._explained_errors():
            path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NoRoom(f"the cache {self.folder} cannot be used: {error.strerror}; pass cache_dir") from None

    def has(self, entry: CacheEntry) -> bool:
        """Whether a file is here. One of another size was damaged after its download, and counts as missing."""
        try:
            size = os.stat(f"{self.folder}/{entry.name}").st_size  # noqa: PTH116 (called for every row)
        except OSError:
            return False
        return size == entry.info.num_bytes

    def pin(self, entry: CacheEntry) -> bool:
        """Keep a file from being evicted until this process ends; False if it is not here."""
        if entry.name in self._pinned:
            return True
        if not self.has(entry):
            return False
        with self._locked(fcntl.LOCK_SH):
            if not self.has(entry):
                return False
            self._write_lease(entry.name)
        self.touch(entry.name)
        return True

    def touch(self, name: str) -> None:
        """Mark a file as used now, so that others are evicted before it."""
        with suppress(OSError):
            os.utime(self.folder / name)

    def download(self, entry: CacheEntry, bucket: Bucket, *, wait: bool = False) -> bool:
        """Download a file. If another process is downloading it, wait for that, or return False without `wait`."""
        path = self._path_of(entry.name)
        while not self.has(entry):
            with self._explained_errors(), self._temporary_file(path) as temporary:
                if temporary is not None:
                    if not self.has(entry):
                        path.unlink(missing_ok=True)
                        self._download(entry, bucket, temporary, path)
                    return True
            if not wait:
                return self.has(entry)
            time.sleep(POLL_SECONDS)
        return True

    def _download(self, entry: CacheEntry, bucket: Bucket, temporary: Path, path: Path) -> None:
        self._reserve(temporary, entry.info.num_bytes)
        for is_last in (False, True):
            bucket.download(entry.info, temporary)
            found = _sync_and_hash(temporary)
            if found == entry.xxh3:
                break
            if is_last:
                url = bucket.url(entry.info.key)
                raise StoreError(f"{url} is damaged: its checksum is {found}, not {entry.xxh3}; upload it again")
        with self._locked(fcntl.LOCK_SH):
            # Without the lock, an eviction could count the file under neither name.
            temporary.replace(path)

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small file, unless the cache has no space for it."""
        path = self._path_of(name)
        if self.read_small(name) == data:
            self.touch(name)
            return
        with suppress(NoRoom), self._explained_errors(), self._temporary_file(path) as temporary:
            if temporary is not None:
                self._reserve(temporary, len(data))
                temporary.write_bytes(data)
                with self._locked(fcntl.LOCK_SH):
                    temporary.replace(path)

    def read_small(self, name: str) -> bytes | None:
        """The bytes of a small file; None if it is not here."""
        try:
            return read_regular(self.folder / name)
        except OSError:
            return None

    def _path_of(self, name: str) -> Path:
        folder, _, base = name.rpartition("/")
        return self.make_folder(folder) / base

    @contextmanager
    def _temporary_file(self, path: Path) -> Iterator[Path | None]:
        """Lock the temporary name of a file, and remove it at the end; None if another process has the lock."""
        temporary = Path(f"{path}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            is_mine = try_lock(descriptor) and is_same_file(descriptor, temporary)
            try:
                yield temporary if is_mine else None
            finally:
                if is_mine:
                    temporary.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _reserve(self, temporary: Path, num_bytes: int) -> None:
        """Evict the least recently used files until a file fits, and extend it to its size, so that it is counted."""
        with self._locked(fcntl.LOCK_EX):
            pinned = self._pinned_by_any_process()
            files = sorted(self._files(), key=lambda file: file[2])
            used = sum(size for _, size, _ in files)
            for name, size, _ in files:
                if used + num_bytes <= self.max_bytes:
                    break
                if name not in pinned and self._evict(name):
                    used -= size
            if used + num_bytes > self.max_bytes:
                raise NoRoom(
                    f"the cache {self.folder} of {self.max_bytes:,} bytes has no room for {num_bytes:,} more beside "
                    "the files in use; pass a larger cache_bytes"
                )
            os.truncate(temporary, num_bytes)

    def _evict(self, name: str) -> bool:
        """Remove a file; a temporary one only if no process is writing it."""
        path = self.folder / name
        if not name.endswith(".tmp"):
            path.unlink(missing_ok=True)
            return True
        with suppress(OSError), path.open("r+b") as file:
            if try_lock(file):
                path.unlink(missing_ok=True)
                return True
        return False

    def _files(self) -> Iterator[tuple[str, int, float]]:
        """All files that take space: name, bytes, and when each was last used."""
        for folder, folders, names in os.walk(self.folder):
            if folder == str(self.folder):
                folders[:] = [name for name in folders if name not in NOT_COUNTED]
                names = [name for name in names if name != "lock"]
            for name in names:
                path = os.path.join(folder, name)  # noqa: PTH118 (a Path for each file takes too long)
                with suppress(OSError):
                    status = os.stat(path)  # noqa: PTH116
                    yield path[len(str(self.folder)) + 1 :], status.st_size, status.st_mtime

    def _write_lease(self, name: str) -> None:
        if self._lease is not None and self._lease[0] != os.getpid():
            # This process was forked, perhaps while a thread of its parent held the lock.
            self._mutex = threading.Lock()
        with self._mutex:
            if self._lease is None or self._lease[0] != os.getpid():
                path = self.folder / "leases" / os.urandom(8).hex()
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._lease = os.getpid(), descriptor
                self._pinned.clear()
            os.write(self._lease[1], f"{name}\n".encode())
            self._pinned.add(name)

    def _pinned_by_any_process(self) -> set[str]:
        """The files that living processes have pinned; leases of dead processes are removed."""
        names: set[str] = set()
        for path in (self.folder / "leases").iterdir():
            with suppress(FileNotFoundError), path.open("rb") as file:
                if try_lock(file):
                    path.unlink()
                else:
                    names.update(file.read().decode().split("\n"))
        return names

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with (self.folder / "lock").open("rb") as file:
            fcntl.flock(file, kind)
            yield


def _sync_and_hash(path: Path) -> str:
    """Flush a file to the disk and return its XXH3-64."""
    with path.open("rb", buffering=0) as file:
        _, digest = hash_rest(file)
        os.fsync(file.fileno())
    return digest.hexdigest()
