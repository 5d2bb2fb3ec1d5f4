"""A run whose store is in a bucket: it works in a scratch directory, and what counts goes to the bucket, task by task.

    read what is done from the bucket -> run in a scratch directory -> per task: upload its files, then create its entry
    -> upload the rest, then create the manifest -> remove the journal, and what nobody knows

There is no rename in a bucket, and no lock: an entry is created only where there is none, so a task is done when its
entry is there, whoever made it. The bytes of a store depend on its inputs and flags, so a second run at the same time
does some work twice and harms nothing. Whatever a kill leaves in the bucket has no entry, and is written again.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tokenmill.errors import StoreError, UsageError
from tokenmill.remote.bucket import ObjectInfo, split_url
from tokenmill.remote.client import AlreadyThere, NoSuchObject
from tokenmill.store.manifest import MANIFEST, Manifest, read_manifest

__all__ = ["JOURNAL", "Mirror", "find_orphans", "scratch_directory"]

JOURNAL = ".tasks"
TRIES = 5
REQUESTS_AT_ONCE = 16
_ENTRY = re.compile(rf"{re.escape(JOURNAL)}/[A-Za-z0-9][A-Za-z0-9.-]*")
SCRATCH, ALIVE = "tokenmill-scratch-", ".alive"
KEPT = ("run.json", "rejects.jsonl")


class Mirror:
    """The place of a store in a bucket, and the files there; knows nothing of what they mean."""

    def __init__(self, url: str) -> None:
        self._bucket, self._folder = split_url(url)
        if not self._folder:
            raise UsageError(f"{url} is a whole bucket; name a folder in it: {url.rstrip('/')}/NAME")
        self.url = self._bucket.url(self._folder)
        self._sizes: dict[str, int] | None = None

    def key(self, name: str) -> str:
        """The object of a file of the store."""
        return f"{self._folder}/{name}"

    def names(self) -> dict[str, int]:
        """All files that are there now, and their sizes."""
        below = len(self._folder) + 1
        self._sizes = {info.key[below:]: info.num_bytes for info in self._bucket.list(self._folder)}
        return self._sizes

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is there with its size, as far as this process knows."""
        sizes = self._sizes if self._sizes is not None else self.names()
        return sizes.get(name) == num_bytes

    def pull(self, store: Path) -> None:
        """Have the journal here as it is in the bucket, or the manifest, if there is one."""
        for _ in range(TRIES):
            names = self.names()
            try:
                self._pull(store, names)
                return
            except NoSuchObject:
                # Another run has just finished the store, and removes its journal.
                continue
        raise self._changes()

    def _changes(self) -> StoreError:
        return StoreError(f"{self.url} changes all the time: other runs remove what this one reads; run it again later")

    def _pull(self, store: Path, names: dict[str, int]) -> None:
        if MANIFEST in names:
            self._bring(store, [MANIFEST])
            return
        if names and not any(name.startswith(f"{JOURNAL}/") for name in names):
            some = min(names)
            raise StoreError(f"{self.url} is not empty and not a token store: it has {some}; choose another with -o")
        self._bring(store, [name for name in names if _ENTRY.fullmatch(name)])

    def _bring(self, store: Path, names: list[str]) -> None:
        def bring(name: str) -> None:
            path = store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._bucket.read(self.key(name)))

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for _ in pool.map(bring, names):
                pass

    def fetch(self, store: Path, advance: Callable[[int, int], None]) -> list[str]:
        """Copy a finished store here, as far as it is there; gives back what lies beside it and is no part of it."""
        names = self.names()
        if MANIFEST not in names:
            what = "an unfinished run" if any(name.startswith(f"{JOURNAL}/") for name in names) else "no token store"
            raise StoreError(f"{self.url} is {what}: it has no {MANIFEST}")
        self._bring(store, [MANIFEST])
        manifest = read_manifest(store)
        orphans = find_orphans(names, manifest)
        wanted = {name: size for name, size in names.items() if name not in {*orphans, MANIFEST}}
        total, done = sum(wanted.values()), 0
        for name, size in sorted(wanted.items()):
            path = store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(ObjectInfo(self.key(name), size, None), path)
            done += size
            advance(done, total)
        return orphans

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        self._bucket.put(self.key(name), data)

    def upload(self, store: Path, names: list[str]) -> None:
        """Write files of a directory, each whole."""
        for name in names:
            self._bucket.upload(self.key(name), store / name)
            if self._sizes is not None:
                self._sizes[name] = (store / name).stat().st_size

    def commit(self, name: str, data: bytes, is_same: Callable[[bytes], bool]) -> None:
        """Create an entry; where another run has made one of the same files, it stays."""
        there = self.create(name, data)
        if there is not None and not is_same(there):
            raise StoreError(
                f"{self.url}/{name} was written by another run that found something else; end that run, or --overwrite"
            )

    def create(self, name: str, data: bytes) -> bytes | None:
        """Write a file that is not there; what is there instead, if another run was faster and wrote something else."""
        for _ in range(TRIES):
            try:
                self._bucket.create(self.key(name), data)
                return None
            except AlreadyThere:
                with suppress(NoSuchObject):
                    return self._bucket.read(self.key(name))
        raise self._changes()

    def delete(self, names: list[str]) -> None:
        """Remove files."""
        self._bucket.delete([self.key(name) for name in names])

    def erase(self) -> None:
        """Remove a store, the manifest first, so that a kill in between leaves no store that looks whole."""
        names = list(self.names())
        if names and MANIFEST not in names and not any(name.startswith(f"{JOURNAL}/") for name in names):
            raise StoreError(f"{self.url} is not a token store: it has {min(names)}; choose another with -o")
        for some in (
            [name for name in names if name in (MANIFEST, f"{JOURNAL}/plan.json")],
            [name for name in names if not name.startswith(f"{JOURNAL}/") and name != MANIFEST],
            [name for name in names if name.startswith(f"{JOURNAL}/") and not name.endswith("/plan.json")],
        ):
            self.delete(some)
        self._sizes = None

    def finish(self, store: Path, data: bytes) -> None:
        """Write what belongs to no task, and then the manifest, if it is not there."""
        tokenizer = [f"tokenizer/{path.name}" for path in sorted((store / "tokenizer").iterdir())]
        self.upload(store, [*tokenizer, *(name for name in KEPT if (store / name).exists())])
        there = self.create(MANIFEST, data)
        if there is not None:
            raise StoreError(f"{self.url} was finished by another run, with another manifest; run with --overwrite")

    def collect(self) -> None:
        """Remove the journal of a finished store, and whatever its manifest does not know."""
        try:
            manifest = msgspec.json.decode(self._bucket.read(self.key(MANIFEST)), type=Manifest)
        except NoSuchObject:
            return
        self.delete(find_orphans(self.names(), manifest))


def find_orphans(names: dict[str, int], manifest: Manifest) -> list[str]:
    """Files beside a finished store that its manifest does not know: of its journal, or of runs that were killed."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    known = {f"{shard.name}{suffix}" for shard in shards for suffix in shard.files}
    known |= {MANIFEST, *KEPT, *manifest.files, *(f"tokenizer/{name}" for name in manifest.tokenizer.files)}
    return sorted(name for name in names if name not in known)


@contextmanager
def scratch_directory(folder: str | None) -> Iterator[Path]:
    """A directory for one attempt, which goes with it: the bucket has everything that counts.

    Its process holds a lock in it, so that what a killed one has left is known, and removed by the next.
    """
    place = Path(folder or tempfile.gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
        alive = (path / ALIVE).open("wb")
        fcntl.flock(alive, fcntl.LOCK_EX)
    except OSError as error:
        raise UsageError(f"--scratch {place} cannot be used: {error.strerror}") from None
    with alive:
        _sweep_scratch(place)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _sweep_scratch(place: Path) -> None:
    for path in place.glob(f"{SCRATCH}*/{ALIVE}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
