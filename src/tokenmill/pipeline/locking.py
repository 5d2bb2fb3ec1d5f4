"""Who may write to a directory: one run, or the ranks of one run, each once.

Locks are those of the kernel (flock): they go with the process that holds them, whatever ends it. A disk that is
shared by machines may not have them; what is published is then still whole, because every file gets its name in
one step and has the same bytes whoever writes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from tokenmill.errors import StoreError
from tokenmill.pipeline.sharing import WHOLE, Share

__all__ = [
    "Holder",
    "Lock",
    "StoreInUseError",
    "find_directory",
    "find_holders",
    "is_in_use",
    "is_lock",
    "sweep_locks",
    "taking_turns",
    "try_lock",
]

ORPHAN_SECONDS = 15.0
LOCK_TRIES = 4
TURN = ".turn.lock"
NAME = re.compile(r"\.(?:rank-(\d+)-of-(\d+)\.)?(workers\.)?lock")
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""How file systems say that they have none."""


class StoreInUseError(StoreError):
    """Another run has the directory."""


@dataclass(frozen=True)
class Holder:
    """A process that works on a directory."""

    share: Share
    pid: int
    host: str

    def __str__(self) -> str:
        who = "another run" if self.share.is_whole else str(self.share)
        process = str(self.pid or "unknown")
        where = f" on {self.host}" if self.host not in ("", socket.gethostname()) else ""
        return f"{who} (process {process}{where})"


class Lock:
    """Held by the process tree of one run, or of one rank, and gone with it.

    The parent holds a lock of its own; every worker holds another in shared mode, so that a new run waits until
    orphans of a killed one have ended and cannot publish any more. A run excludes ranks, and ranks exclude those
    of another number of ranks, whose shares are others.
    """

    def __init__(self, store: Path, share: Share = WHOLE) -> None:
        self._store = store
        self._share = share
        self._files: list[BinaryIO] = []
        self.is_real = True
        """False where the file system has no locks."""

    def acquire(self) -> None:
        """Take the directory, or say who has it."""
        lock = self._open(_name(self._share))
        if not self._lock_soon(lock):
            raise self._in_use(_read_holder(lock, self._share))
        if not _is_same_file(lock, self._store / _name(self._share)):
            # The run that had it has just ended and taken the file away.
            lock.close()
            self.acquire()
            return
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        rivals = find_holders(self._store, self._excludes)
        if rivals:
            self.release()
            raise self._in_use(rivals[0])
        self._wait_for_orphans()

    def join(self) -> None:
        """Called in a worker: hold the directory until this process ends."""
        try_lock(self._open(_name(self._share, "workers.")), fcntl.LOCK_SH)

    def leave(self) -> None:
        """Called in a worker that lives on after its work: let go, and leave the files to the run."""
        for file in self._files:
            file.close()
        self._files = []

    def release(self) -> None:
        """Let go, and take the lock files away."""
        for kind in ("workers.", ""):
            (self._store / _name(self._share, kind)).unlink(missing_ok=True)
        self.leave()

    def _excludes(self, other: Share) -> bool:
        return other != self._share and (other.is_whole or other.world_size != self._share.world_size)

    def _in_use(self, holder: Holder) -> StoreInUseError:
        return StoreInUseError(f"{self._store} is in use by {holder}; wait for it, or choose another directory")

    def _lock_soon(self, file: BinaryIO) -> bool:
        """Take a lock, trying more than once: `tokenmill status` and rivals look at it for an instant."""
        for _ in range(LOCK_TRIES):
            taken = try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if taken is not False:
                self.is_real = taken is True
                return True
            time.sleep(0.1)
        return False

    def _wait_for_orphans(self) -> None:
        """Workers of a killed run end by themselves, after what they are at."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        self._open(_name(self._share, "workers."))
        while _held(self._store, "workers.", lambda share: share == self._share or self._excludes(share)):
            if time.monotonic() > deadline:
                self.release()
                raise StoreError(f"{self._store} is still being written by workers of a killed run; end them first")
            time.sleep(0.05)

    def _open(self, name: str) -> BinaryIO:
        file = (self._store / name).open("a+b", buffering=0)
        self._files.append(file)
        return file


@contextmanager
def taking_turns(store: Path) -> Iterator[None]:
    """Held while a run finds out where a directory stands, and while one finishes it: ranks do so one at a time."""
    path = store / TURN
    while True:
        with path.open("ab", buffering=0) as file:
            try_lock(file, fcntl.LOCK_EX)
            if not _is_same_file(file, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def find_directory(store: str | Path) -> Path:
    """The directory of a store that somebody wants to look at; what is none, or cannot be read, is refused."""
    folder = Path(store)
    try:
        if not folder.exists():
            raise StoreError(f"{folder} does not exist; make a store with: tokenmill tokenize INPUT -o {folder}")
        if not folder.is_dir():
            raise StoreError(f"{folder} is a file; expected the directory of a token store, or its URL")
        for part in filter(Path.exists, (folder, folder / ".tasks")):
            next(part.iterdir(), None)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be read: {error.strerror}; ask its owner, or run this as the user who made it"
        ) from None
    return folder


def find_holders(store: Path, wanted: Callable[[Share], bool] = lambda _: True) -> list[Holder]:
    """The processes that hold a directory, or those of wanted shares."""
    holders = []
    for share, path in _held(store, "", wanted).items():
        with suppress(OSError), path.open("rb", buffering=0) as file:
            holders.append(_read_holder(file, share))
    return holders


def is_in_use(store: Path) -> bool:
    """Whether a run has the directory, without disturbing it."""
    return bool(find_holders(store))


def is_lock(name: str) -> bool:
    """Whether a file of a directory is one of its locks."""
    return name == TURN or NAME.fullmatch(name) is not None


def sweep_locks(store: Path) -> None:
    """Remove the lock files of killed processes: those that nobody holds."""
    for path in store.glob(".*lock"):
        # A lock that is held, also by this process, is not to be had here; who holds the turn takes its file away.
        if is_lock(path.name):
            with suppress(OSError), path.open("r+b", buffering=0) as file:
                if try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    path.unlink(missing_ok=True)


def _name(share: Share, kind: str = "") -> str:
    return f".{share.name}.{kind}lock" if share.name else f".{kind}lock"


def _held(store: Path, kind: str, wanted: Callable[[Share], bool]) -> dict[Share, Path]:
    """The locks of one kind and of wanted shares that somebody holds."""
    found = {}
    # Only who may write asks for workers, which share their lock: it takes an exclusive one to see them.
    mode, open_mode = (fcntl.LOCK_EX, "r+b") if kind else (fcntl.LOCK_SH, "rb")
    for path in sorted(store.glob(".*lock")):
        match = NAME.fullmatch(path.name)
        share = Share(int(match[1] or 0), int(match[2] or 1)) if match else None
        if match is None or share is None or (match[3] or "") != kind or not wanted(share):
            continue
        with suppress(OSError), path.open(open_mode, buffering=0) as file:
            # Given back at once: it can only be had when nobody is there to be disturbed.
            if try_lock(file, mode | fcntl.LOCK_NB) is False:
                found[share] = path
    return found


def _read_holder(lock: BinaryIO, share: Share) -> Holder:
    lock.seek(0)
    pid, _, host = lock.read(300).decode("ascii", "replace").strip().partition(" ")
    return Holder(share, int(pid) if pid.isdecimal() else 0, host)


def try_lock(file: IO[Any], mode: int) -> bool | None:
    """Whether a lock was taken; None where the file system has no locks, so that nobody can have it."""
    try:
        fcntl.flock(file, mode)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
