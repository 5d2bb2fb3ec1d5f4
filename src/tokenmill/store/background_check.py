"""Compare the files of a store with their checksums while a model trains.

With `verify="background"`, a loader submits each file when it is first mapped. One thread of the process reads these
files in turn, slowly, and the loader raises at its next batch if one is damaged. A file without damage is recorded in
the cache directory, so it is read once per machine: other processes wait for the lock, and then find the record.

    FOLDER/checked/HOST         a line for each sound file: path, size, inode, modification time, checksum
    FOLDER/checked/HOST.lock    held by the process that is checking a file
"""

from __future__ import annotations

import fcntl
import os
import platform
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tokenmill.regular_files import UnfitFile, open_regular
from tokenmill.store.check import CheckProgress, check_file
from tokenmill.store.manifest import FileInfo

__all__ = ["CHECKED", "BackgroundCheck"]

CHECKED = "checked"
BYTES_PER_SECOND = 200_000_000
SHARE = 0.25
"""The share of the time that is spent reading and hashing, so that a slow disk stays free for the loader."""
REST_BYTES = 4 << 20


class _Touched(NamedTuple):
    path: str
    info: FileInfo
    has_own_time: bool
    """Whether the modification time is that of the bytes; in a cache, it is the time of the last use."""
    owner: weakref.ref[BackgroundCheck]


class BackgroundCheck:
    """The check of the files that one loader reads; `damage` is a sentence about the first damaged one."""

    def __init__(self) -> None:
        self.damage: str | None = None

    def touch(self, path: str, info: FileInfo, *, has_own_time: bool) -> None:
        """Check a file in the background; called when it is first opened."""
        _checker.add(_Touched(path, info, has_own_time, weakref.ref(self)))


class _Checker:
    """The thread of this process that checks files one by one; it starts with the first one."""

    def __init__(self) -> None:
        self._files: queue.SimpleQueue[_Touched] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._memory: _Memory | None = None

    def add(self, file: _Touched) -> None:
        self._files.put(file)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenmill-check", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            self._check(self._files.get())

    def _check(self, file: _Touched) -> None:
        owner = file.owner()
        if owner is None or owner.damage is not None:
            return
        if self._memory is None:
            self._memory = _Memory()
        with self._memory.locked():
            key = _key(file)
            if key is not None and self._memory.has(key):
                return
            problems = check_file(Path(file.path), file.info, CheckProgress(lambda _: None), _Pace().rest)
            # If the file was changed in the meantime, the result is that of another file.
            if not problems and key is not None and key == _key(file):
                self._memory.add(key)
        if problems:
            owner.damage = problems[0]


class _Pace:
    """Sleeps between pieces, so that reading takes a bounded share of one core and of the disk."""

    def __init__(self) -> None:
        self._num_bytes, self._since = 0, time.monotonic()

    def rest(self, piece: memoryview) -> None:
        """Count a piece that was read, and sleep if reading was too fast."""
        self._num_bytes += len(piece)
        if self._num_bytes >= REST_BYTES:
            seconds = time.monotonic() - self._since
            time.sleep(max(self._num_bytes / BYTES_PER_SECOND, seconds / SHARE) - seconds)
            self._num_bytes, self._since = 0, time.monotonic()


class _Memory:
    """The undamaged files that this machine has checked; without a cache directory, those of this process."""

    def __init__(self) -> None:
        from tokenmill.remote.cache import default_folder

        host = re.sub(r"[^\w.-]", "_", platform.node()) or "host"
        self._path = default_folder() / CHECKED / host
        self._num_read = 0
        self._known: set[str] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process of the machine check at a time; on a file system without locks, each checks for itself."""
        descriptor = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = f"{self._path}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass
        try:
            yield
        finally:
            if descriptor is not None:
                # A child that was forked in the meantime has the descriptor, too.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def has(self, key: str) -> bool:
        """Whether a process of this machine has checked the file without finding damage."""
        with suppress(OSError, UnfitFile), open_regular(self._path) as file:
            file.seek(self._num_read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._num_read += len(whole)
            self._known.update(whole.decode(errors="replace").split("\n"))
        return key in self._known

    def add(self, key: str) -> None:
        """Record a file without damage."""
        self._known.add(key)
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o666)
            try:
                os.write(descriptor, f"{key}\n".encode(errors="replace"))
            finally:
                os.close(descriptor)


def _key(file: _Touched) -> str | None:
    """The key of a file's bytes on this machine; None if the file is not accessible."""
    try:
        status = os.stat(file.path)  # noqa: PTH116 (one of many thousand)
    except OSError:
        return None
    changed = status.st_mtime_ns if file.has_own_time else 0
    path = Path(file.path).absolute().as_posix().replace("\n", " ")
    return f"{file.info.xxh3} {status.st_size} {status.st_dev}:{status.st_ino} {changed} {path}"


_checker = _Checker()


def _forget_thread() -> None:
    """Start afresh in a forked child: it has no thread, and its copy of the lock may be held by one."""
    global _checker
    _checker = _Checker()


os.register_at_fork(after_in_child=_forget_thread)
