"""Files of object stores on a local disk, in bounded room, shared by all processes of a machine.

    FOLDER/lock           taken to begin to use a file (shared), and to make room (alone)
    FOLDER/leases/NAME    held by a living process: the files that it has mapped, one a line
    FOLDER/STORE/...      files with their names in the store; `.tmp` while one is being fetched

A file is fetched under a temporary name by whoever holds the lock on it, compared with its checksum, synced and
renamed. What a process has mapped is never removed, because its blocks would stay in use with no name to count them
by. All locks are of the system and end with their process: whatever a kill leaves is taken over or swept.
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

import xxhash

from tokenmill.errors import StoreError
from tokenmill.remote.bucket import Bucket, ObjectInfo

__all__ = ["Cache", "NoRoom", "default_folder"]

HASH_BYTES = 1 << 20
WAIT_SECONDS = 0.05


class NoRoom(StoreError):
    """A file does not fit the cache beside what processes have mapped, or does not fit the disk."""


def default_folder() -> Path:
    """Where files are kept unless the user says otherwise: `TOKENMILL_CACHE`, or a folder of the user's cache."""
    if told := os.environ.get("TOKENMILL_CACHE"):
        return Path(told)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenmill"


class Cache:
    """A folder of at most `most_bytes`, whoever fills it; half of what is free on its disk unless said."""

    def __init__(self, folder: Path | None = None, most_bytes: int | None = None) -> None:
        self.folder = (folder or default_folder()).absolute()
        with self._in_words():
            (self.folder / "leases").mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
            self.most_bytes = most_bytes if most_bytes is not None else self._half_of_disk()
        self._lease: tuple[int, int] | None = None
        self._leased: set[str] = set()
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Cache, (self.folder, self.most_bytes)

    def _half_of_disk(self) -> int:
        held = sum(size for _, size, _ in self._files())
        return (shutil.disk_usage(self.folder).free + held) // 2

    def make_folder(self, name: str) -> Path:
        """A folder for files of one store."""
        path = self.folder / name
        with self._in_words():
            path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NoRoom(f"the cache {self.folder} cannot be used: {error.strerror}; pass cache_dir") from None

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is here, whole; one of another size was damaged after it came, and counts as missing."""
        try:
            return os.stat(f"{self.folder}/{name}").st_size == num_bytes  # noqa: PTH116 (asked for every row)
        except OSError:
            return False

    def use(self, name: str, num_bytes: int) -> bool:
        """Whether a file is here; from then on it stays, until this process ends."""
        if name in self._leased:
            return True
        if not self.has(name, num_bytes):
            return False
        with self._locked(fcntl.LOCK_SH):
            if not self.has(name, num_bytes):
                return False
            self._write_lease(name)
        self.touch(name)
        return True

    def touch(self, name: str) -> None:
        """Note that a file is wanted, so that others go before it."""
        with suppress(OSError):
            os.utime(self.folder / name)

    def fetch(self, name: str, bucket: Bucket, info: ObjectInfo, xxh3: str, *, wait: bool = False) -> bool:
        """Bring a file here; False while another process is at it, which is waited for if that is asked."""
        path = self.make_folder(name.rpartition("/")[0]) / name.rpartition("/")[2]
        while not self.has(name, info.num_bytes):
            with self._in_words(), self._writing(path) as temporary:
                if temporary is not None:
                    if not self.has(name, info.num_bytes):
                        path.unlink(missing_ok=True)
                        self._fill(temporary, path, bucket, info, xxh3)
                    return True
            if not wait:
                return self.has(name, info.num_bytes)
            time.sleep(WAIT_SECONDS)
        return True

    def keep(self, name: str, data: bytes) -> None:
        """Have a small file with these bytes here; left out where there is no room for it."""
        path = self.make_folder(name.rpartition("/")[0]) / name.rpartition("/")[2]
        if self.recall(name) == data:
            self.touch(name)
            return
        with suppress(NoRoom), self._in_words(), self._writing(path) as temporary:
            if temporary is not None:
                self._make_room(temporary, len(data))
                temporary.write_bytes(data)
                with self._locked(fcntl.LOCK_SH):
                    temporary.replace(path)

    def recall(self, name: str) -> bytes | None:
        """The bytes of a small file, if it is here."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def _fill(self, temporary: Path, path: Path, bucket: Bucket, info: ObjectInfo, xxh3: str) -> None:
        self._make_room(temporary, info.num_bytes)
        for is_last in (False, True):
            bucket.download(info, temporary)
            found = _hash(temporary)
            if found == xxh3:
                break
            if is_last:
                raise StoreError(
                    f"{bucket.url(info.key)} is damaged: its checksum is {found}, not {xxh3}; upload it again"
                )
        with self._locked(fcntl.LOCK_SH):
            # Whoever makes room would otherwise find it under neither name.
            temporary.replace(path)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[Path | None]:
        """The temporary file of a file, for whoever locks it; None while another process has it."""
        temporary = Path(f"{path}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = _is_same(descriptor, temporary)
        except BlockingIOError:
            is_mine = False
        try:
            yield temporary if is_mine else None
        except BaseException:
            if is_mine:
                temporary.unlink(missing_ok=True)
            raise
        else:
            if is_mine:
                temporary.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _make_room(self, temporary: Path, num_bytes: int) -> None:
        """Remove what was used longest ago until a file fits, and give it its size, so that others count it."""
        with self._locked(fcntl.LOCK_EX):
            kept = self._leased_by_anyone()
            files = sorted(self._files(), key=lambda file: file[2])
            used = sum(size for _, size, _ in files)
            for name, size, _ in files:
                if used + num_bytes <= self.most_bytes:
                    break
                if name not in kept and self._remove(name):
                    used -= size
            if used + num_bytes > self.most_bytes:
                raise NoRoom(
                    f"the cache {self.folder} of {self.most_bytes:,} bytes has no room for {num_bytes:,} more beside "
                    "what is in use; pass a larger cache_bytes"
                )
            os.truncate(temporary, num_bytes)

    def _remove(self, name: str) -> bool:
        """Remove a file that nobody uses; a temporary one only where nobody writes it."""
        path = self.folder / name
        if name.endswith(".tmp"):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    return True
                finally:
                    os.close(descriptor)
            return False
        path.unlink(missing_ok=True)
        return True

    def _files(self) -> Iterator[tuple[str, int, float]]:
        """Everything that takes room: name, bytes, and when it was last used."""
        for folder, folders, names in os.walk(self.folder):
            if folder == str(self.folder):
                folders[:] = [name for name in folders if name != "leases"]
                names = [name for name in names if name != "lock"]
            for name in names:
                path = os.path.join(folder, name)  # noqa: PTH118 (a Path for each file takes too long)
                with suppress(OSError):
                    status = os.stat(path)  # noqa: PTH116
                    yield path[len(str(self.folder)) + 1 :], status.st_size, status.st_mtime

    def _write_lease(self, name: str) -> None:
        if self._lease is not None and self._lease[0] != os.getpid():
            # A lock that a thread of the parent held when this process was forked would stay so.
            self._mutex = threading.Lock()
        with self._mutex:
            if self._lease is None or self._lease[0] != os.getpid():
                self._lease = (os.getpid(), self._open_lease())
                self._leased.clear()
            os.write(self._lease[1], f"{name}\n".encode())
            self._leased.add(name)

    def _open_lease(self) -> int:
        path = self.folder / "leases" / os.urandom(8).hex()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def _leased_by_anyone(self) -> set[str]:
        """The files that living processes have mapped; what dead ones wrote down goes."""
        names: set[str] = set()
        for path in (self.folder / "leases").iterdir():
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    names.update(file.read().decode().split("\n"))
        return names

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self.folder / "lock").open("rb") as file:
            fcntl.flock(file, how)
            yield


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _hash(path: Path) -> str:
    """The XXH3-64 of a file, which is on the disk when this returns."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
        os.fsync(file.fileno())
    return digest.hexdigest()
