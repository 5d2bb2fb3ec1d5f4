"""Locks on a store directory: one run may write to it, or one process for each rank of a run.

These are kernel locks (flock), which end with the process that holds them, even if it is killed. A disk shared by
several machines may not support them. Published files are still whole then, because every file is renamed into place
and has the same bytes from every writer.

No lock reaches processes on the machines of a cluster. For these, `attempt.json` in the journal holds the digest of
the attempt that claimed the store last. They read it before they publish a task, so a call that outlives its run does
not write into the store of the next one.
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
from typing import IO, BinaryIO

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.errors import StoreError
from tokenmill.file_lock import is_same_file, try_lock
from tokenmill.files import write_durably
from tokenmill.pipeline.journal.mirror import JOURNAL, Mirror
from tokenmill.pipeline.plan.ranks import WHOLE, Share
from tokenmill.regular_files import read_regular

__all__ = [
    "SHARED",
    "Holder",
    "StoreInUseError",
    "check_claim",
    "claim",
    "count_other_ranks_here",
    "find_directory",
    "find_holders",
    "is_lock",
    "join_workers",
    "lock_if_possible",
    "locked",
    "sweep_locks",
    "taking_turns",
    "wait_for_claim",
]

ORPHAN_SECONDS = 15.0
LOCK_TRIES = 4
TURN = ".turn.lock"
NAME = re.compile(r"\.(?:rank-(\d+)-of-(\d+)\.)?(workers\.)?lock")
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors of file systems without locks."""
SEEN_SECONDS = 5.0
"""How long a file may take to become visible on another machine."""
SHARED = "it must be on storage that all machines of the cluster share"
ATTEMPT = f"{JOURNAL}/attempt.json"
MOST_CLAIM_BYTES = 1 << 16


class StoreInUseError(StoreError):
    """Another run holds the lock of the directory."""


@dataclass(frozen=True)
class Holder:
    """A process that holds the lock of a directory."""

    share: Share
    pid: int
    host: str

    def __str__(self) -> str:
        who = "another run" if self.share.is_whole else str(self.share)
        process = str(self.pid or "unknown")
        where = f" on {self.host}" if self.host not in ("", socket.gethostname()) else ""
        return f"{who} (process {process}{where})"


@contextmanager
def locked(store: Path, share: Share = WHOLE) -> Iterator[bool]:
    """Hold the lock of a directory for a run or for one rank of it; yield False if the file system has no locks.

    Every worker holds a second lock in shared mode, so that a new run waits until orphaned workers of a killed run have
    ended and can no longer publish. A run excludes ranks. Ranks exclude those of another world size, which divide the
    plan differently. The error names the holder if the directory is in use.
    """
    path = store / _lock_name(share)
    lock, is_real = _take_lock(path, share)
    try:
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        rivals = find_holders(store, lambda other: other.world_size != share.world_size)
        if rivals:
            raise _in_use(store, rivals[0])
        deadline = time.monotonic() + ORPHAN_SECONDS
        # Workers of a killed run end by themselves after their current task.
        while find_holders(store, lambda other: other == share or other.world_size != share.world_size, "workers."):
            if time.monotonic() > deadline:
                raise StoreError(f"{store} is still being written by workers of a killed run; stop them first")
            time.sleep(0.05)
        yield is_real
    finally:
        (store / _lock_name(share, "workers.")).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        lock.close()


def _take_lock(path: Path, share: Share) -> tuple[BinaryIO, bool]:
    """Take a lock with a few retries: `tokenmill status` and other runs hold it for a moment when they test it."""
    num_tries = 0
    while True:
        file = path.open("a+b", buffering=0)
        taken = lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file is another one if the run that held the lock has just ended and removed it.
        if taken is not False and is_same_file(file, path):
            return file, taken is True
        with file:
            if taken is False:
                num_tries += 1
                if num_tries == LOCK_TRIES:
                    raise _in_use(path.parent, _read_holder(file, share))
                time.sleep(0.1)


def join_workers(store: Path, share: Share = WHOLE) -> BinaryIO:
    """Take the shared lock of workers; closing the file, or the end of the process, releases it."""
    file = (store / _lock_name(share, "workers.")).open("a+b", buffering=0)
    lock_if_possible(file, fcntl.LOCK_SH)
    return file


def _in_use(store: Path, holder: Holder) -> StoreInUseError:
    return StoreInUseError(f"{store} is in use by {holder}; wait for it, or choose another directory")


@contextmanager
def taking_turns(store: Path) -> Iterator[None]:
    """Hold a lock while a run reads the state of a directory, or finishes it, so that ranks do so one at a time."""
    path = store / TURN
    while True:
        with path.open("a+b", buffering=0) as file:
            lock_if_possible(file, fcntl.LOCK_EX)
            if not is_same_file(file, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def find_directory(store: str | Path) -> Path:
    """Return the directory of a store that a command wants to read; raise if it is missing or unreadable."""
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


def find_holders(store: Path, wanted: Callable[[Share], bool] = lambda _: True, kind: str = "") -> list[Holder]:
    """List the processes that hold the locks of wanted shares; `kind` is empty for runs, `workers.` for workers."""
    holders = []
    # Workers share their lock, so only an exclusive lock detects them; it needs write access, which such callers have.
    mode, open_mode = (fcntl.LOCK_EX, "r+b") if kind else (fcntl.LOCK_SH, "rb")
    for path in sorted(store.glob(".*lock")):
        match = NAME.fullmatch(path.name)
        if match is None or (match[3] or "") != kind:
            continue
        share = Share(int(match[1] or 0), int(match[2] or 1))
        if not wanted(share):
            continue
        with suppress(OSError), path.open(open_mode, buffering=0) as file:
            # The lock is released at once, and it is granted only if no process holds it.
            if lock_if_possible(file, mode | fcntl.LOCK_NB) is False:
                holders.append(_read_holder(file, share))
    return holders


def count_other_ranks_here(store: Path, share: Share) -> int:
    """Count the other ranks of the run that work on this machine now."""
    here = socket.gethostname()
    return sum(holder.host == here for holder in find_holders(store, lambda other: other != share))


def is_lock(name: str) -> bool:
    """Whether a file name is that of a lock."""
    return name == TURN or NAME.fullmatch(name) is not None


def sweep_locks(store: Path) -> None:
    """Remove the lock files that no process holds, left by killed processes."""
    for path in store.glob(".*lock"):
        # This fails for a lock that any process holds, also this one; its holder removes the file of the turn lock.
        if is_lock(path.name):
            with suppress(OSError), path.open("r+b", buffering=0) as file:
                if lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    path.unlink(missing_ok=True)


def _lock_name(share: Share, kind: str = "") -> str:
    return f".{share.name}.{kind}lock" if share.name else f".{kind}lock"


def _read_holder(lock: IO[bytes], share: Share) -> Holder:
    lock.seek(0)
    pid, _, host = lock.read(300).decode("ascii", "replace").strip().partition(" ")
    return Holder(share, int(pid) if pid.isdecimal() else 0, host)


def lock_if_possible(file: IO[bytes], mode: int) -> bool | None:
    """Lock a file, without waiting if `mode` says so: whether it is locked, or None if the file system has no locks."""
    try:
        if mode & fcntl.LOCK_NB:
            return try_lock(file, mode)
        fcntl.flock(file, mode)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def claim(place: str, digest: str) -> None:
    """Take the right to publish at `place`, a directory or a URL, from earlier attempts."""
    data = msgspec.json.encode(digest)
    if is_remote(place):
        Mirror(place).put(ATTEMPT, data)
    else:
        write_durably(Path(place) / ATTEMPT, data)


def wait_for_claim(place: str, digest: str) -> None:
    """Wait until this machine sees the claim of its own run; raise if it does not share the storage."""
    deadline = time.monotonic() + SEEN_SECONDS
    while _read_claim(place) != digest:
        if time.monotonic() > deadline:
            raise StoreError(
                f"{socket.gethostname()} does not see the same {place} as the machine that started the run: {SHARED}"
            )
        time.sleep(0.2)


def check_claim(place: str, digest: str) -> None:
    """Raise if another attempt has claimed the store."""
    if _read_claim(place) != digest:
        raise StoreError(f"{place} has been taken over by another run")


def _read_claim(place: str) -> str | None:
    data = None
    if is_remote(place):
        data = Mirror(place).read(ATTEMPT)
    else:
        with suppress(FileNotFoundError):
            data = read_regular(Path(place) / ATTEMPT, MOST_CLAIM_BYTES)
    return None if data is None else msgspec.json.decode(data, type=str)
