"""Compare the files of a store with their checksums while a model trains.

A loader that asks for it hands over each file when it is first mapped or read. One thread of the process reads these
files in turn, slowly, and the loader raises at its next batch if one is damaged. At the end of its last epoch a loader
waits for this thread, which then does not pause. A file that was sound is remembered in the cache directory, so it is
read once per machine: other processes wait for the lock, and then find it there.

    FOLDER/checked/HOST         a line for each sound file: what its bytes are known by, and where it is
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from tokenmill.errors import TokenmillError
from tokenmill.regular_files import UnfitFile, open_regular
from tokenmill.store.check import CheckProgress, check_file
from tokenmill.store.manifest import RESTORE, FileInfo

__all__ = ["CHECKED", "BackgroundCheck", "CheckedFile", "LocalFile"]

CHECKED = "checked"
BYTES_PER_SECOND = 100_000_000
CPU_SHARE = 0.003
"""At most this much of one core; `benchmarks/verify_load.py` measures what it costs a loader."""
DISK_SHARE = 0.25
"""At most this much of the time is spent reading and hashing, so that a slow disk stays free for the loader."""
REST_BYTES = 4 << 20
FETCH_AGAIN = "remove this copy, and it is downloaded again"


class CheckedFile(Protocol):
    """A file that batches come from, and how to compare it with its checksum."""

    @property
    def name(self) -> str:
        """Its path or URL."""

    def key(self) -> str | None:
        """What identifies its bytes on this machine; None if it cannot be looked at."""

    def find_damage(self, look: Callable[[memoryview], None]) -> str | None:
        """Read it; return a sentence about damage, or None. `look` is called with each piece."""


class LocalFile(NamedTuple):
    """A file of a store on this machine, or its copy in the cache of a bucket, which may be evicted meanwhile."""

    name: str
    info: FileInfo
    is_copy: bool

    def key(self) -> str | None:
        """Path, size, inode, time and checksum."""
        try:
            status = os.stat(self.name)  # noqa: PTH116 (one of many thousand)
        except OSError:
            return None
        # The modification time of a copy is the time of its last use.
        changed = 0 if self.is_copy else status.st_mtime_ns
        path = Path(self.name).absolute().as_posix().replace("\n", " ")
        return f"{self.info.xxh3} {status.st_size} {status.st_dev}:{status.st_ino} {changed} {path}"

    def find_damage(self, look: Callable[[memoryview], None]) -> str | None:
        """Compare size and checksum with those in the manifest."""
        problems = check_file(Path(self.name), self.info, CheckProgress(lambda _: None), look)
        if not self.is_copy or not problems:
            return problems[0] if problems else None
        # A copy that was evicted has no damage.
        return problems[0].replace(RESTORE, FETCH_AGAIN) if Path(self.name).exists() else None


class BackgroundCheck:
    """The check of the files that one loader reads; `damage` is a sentence about the first damaged one."""

    def __init__(self) -> None:
        self.damage: str | None = None
        self.is_awaited = False
        """Whether the loader has nothing left to do but wait, so that files are read at full speed."""
        self._forget_process()

    def _forget_process(self) -> None:
        self._process, self._num_pending, self._has_changed = os.getpid(), 0, threading.Condition()

    def touch(self, file: CheckedFile) -> None:
        """Check a file in the background; it was opened for the first time."""
        if self._process != os.getpid():
            self._forget_process()
        with self._has_changed:
            self._num_pending += 1
        _checker.add(file, weakref.ref(self))

    def end_file(self, damage: str | None) -> None:
        """Note the result of a file."""
        with self._has_changed:
            self._num_pending -= 1
            self.damage = self.damage or damage
            self._has_changed.notify_all()

    def wait(self) -> None:
        """Wait until all files were checked, or one is damaged."""
        self.is_awaited = True
        with self._has_changed:
            while self._num_pending and self.damage is None and self._process == os.getpid():
                self._has_changed.wait(0.1)
        self.is_awaited = False


class _Checker:
    """The thread of this process that checks files one by one; it starts with the first one."""

    def __init__(self) -> None:
        self._files: queue.SimpleQueue[tuple[CheckedFile, weakref.ref[BackgroundCheck]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._memory: _Memory | None = None

    def add(self, file: CheckedFile, owner: weakref.ref[BackgroundCheck]) -> None:
        self._files.put((file, owner))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenmill-check", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            file, reference = self._files.get()
            owner = reference()
            if owner is None:
                continue
            try:
                damage = None if owner.damage else self._check(file, owner)
            except TokenmillError as error:
                damage = str(error)
            except Exception as error:
                # This thread must not end: files after this one would count as sound.
                damage = f"{file.name} could not be compared with its checksum: {type(error).__name__} {error}"
            owner.end_file(damage)
            del owner

    def _check(self, file: CheckedFile, owner: BackgroundCheck) -> str | None:
        if self._memory is None:
            self._memory = _Memory()
        with self._memory.locked():
            key = file.key()
            if key is not None and self._memory.has(key):
                return None
            damage = file.find_damage(_Pace(owner).rest)
            # A file that was changed meanwhile is not the one that was checked.
            if damage is None and key is not None and key == file.key():
                self._memory.add(key)
        return damage


class _Pace:
    """Sleeps between pieces, so that checking takes a bounded share of one core and of the disk."""

    def __init__(self, owner: BackgroundCheck) -> None:
        self._owner = owner
        self.begin()

    def begin(self) -> None:
        """Count bytes and time from now on."""
        self._num_bytes, self._since, self._cpu_since = 0, time.monotonic(), time.thread_time()

    def rest(self, piece: memoryview) -> None:
        """Note a piece that was read, and sleep if it is time."""
        self._num_bytes += len(piece)
        if self._num_bytes >= REST_BYTES and not self._owner.is_awaited:
            seconds, cpu_seconds = time.monotonic() - self._since, time.thread_time() - self._cpu_since
            least = max(self._num_bytes / BYTES_PER_SECOND, cpu_seconds / CPU_SHARE, seconds / DISK_SHARE)
            time.sleep(least - seconds)
            self.begin()


class _Memory:
    """The files that processes of this machine found sound; without a cache directory, those of this process."""

    def __init__(self) -> None:
        from tokenmill.machine import cache_folder

        host = re.sub(r"[^\w.-]", "_", platform.node()) or "host"
        self._path = cache_folder() / CHECKED / host
        self._num_read = 0
        self._known: set[str] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process of the machine check at a time; where there are no locks, each checks for itself."""
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
                # A child that was forked meanwhile has the descriptor, too.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def has(self, key: str) -> bool:
        """Whether some process of this machine found the file sound."""
        with suppress(OSError, UnfitFile), open_regular(self._path) as file:
            file.seek(self._num_read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._num_read += len(whole)
            self._known.update(whole.decode(errors="replace").split("\n"))
        return key in self._known

    def add(self, key: str) -> None:
        """Remember a sound file."""
        self._known.add(key)
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o666)
            try:
                os.write(descriptor, f"{key}\n".encode(errors="replace"))
            finally:
                os.close(descriptor)


_checker = _Checker()


def _forget_thread() -> None:
    """A forked child has no thread, and the lock may be held by one that does not exist there."""
    global _checker
    _checker = _Checker()


os.register_at_fork(after_in_child=_forget_thread)
