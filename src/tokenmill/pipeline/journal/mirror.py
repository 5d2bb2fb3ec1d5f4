"""A store in a bucket: the run works in a scratch directory and uploads each finished task.

    read the journal from the bucket -> run in a scratch directory -> per task: upload its files, then create its entry
    -> upload the other files, then create the manifest -> remove the journal and orphaned files

A bucket has no rename and no lock. An entry is created only if none exists, and a task is done when its entry exists,
whichever run made it. The bytes of a store depend only on inputs and flags, so a second run at the same time does some
work twice and harms nothing. Files that a killed run leaves in the bucket have no entry and are written again.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tokenmill.errors import StoreError, UsageError
from tokenmill.file_lock import try_lock
from tokenmill.remote.bucket import ObjectInfo, split_url
from tokenmill.remote.client import mark_reachable
from tokenmill.remote.remote_errors import AlreadyThere, NoSuchObject
from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, read_manifest

__all__ = [
    "JOURNAL",
    "PLAN",
    "RUN",
    "Mirror",
    "file_sizes",
    "find_orphans",
    "find_unentered",
    "pulled",
    "scratch_directory",
    "scratch_store",
]

JOURNAL = ".tasks"
PLAN = f"{JOURNAL}/plan.json"
TRIES = 5
REQUESTS_AT_ONCE = 16
_ENTRY = re.compile(rf"{re.escape(JOURNAL)}/[A-Za-z0-9][A-Za-z0-9.-]*")
_SHARD = re.compile(r"(?:train|val)/shard-(\d+-\d+)(?:\.[a-z]+)+")
_OURS = re.compile(rf"{_SHARD.pattern}|{re.escape(JOURNAL)}/[^/]+|tokenizer/[^/]+")
"""The files that a run writes and may therefore remove; it never touches other objects in the folder."""
RUN = "run.json"
KEPT = (RUN, "rejects.jsonl")
TOKENIZER = "tokenizer"
SCRATCH, ALIVE = "tokenmill-scratch-", ".alive"


class Mirror:
    """The folder of a store in a bucket, and its files; does not interpret the records in them."""

    def __init__(self, url: str, plan_tag: str | None = None) -> None:
        self._bucket, self._folder = split_url(url)
        self._plan_tag = plan_tag
        """The ETag of the plan that this process works on; its run has reached the server, so requests wait for it."""
        if plan_tag is not None:
            mark_reachable(self._bucket.scheme)
        if not self._folder:
            raise UsageError(f"{url} is a whole bucket; name a folder in it: {url.rstrip('/')}/NAME")
        self.url = self._bucket.url(self._folder)
        self._sizes: dict[str, int] | None = None
        self._found: set[str] = set()
        self._is_erased = False

    def key(self, name: str) -> str:
        """Return the object key of a file of the store."""
        return f"{self._folder}/{name}"

    def names(self) -> dict[str, int]:
        """List all files in the bucket now, with their sizes."""
        self._sizes = self._list(self._folder)
        return self._sizes

    def _list(self, prefix: str) -> dict[str, int]:
        below = len(self._folder) + 1
        return {info.key[below:]: info.num_bytes for info in self._bucket.list(prefix)}

    def journal_names(self) -> set[str]:
        """List the names of the journal's files in the bucket now; none if the store is finished."""
        names = {name.removeprefix(f"{JOURNAL}/") for name in self._list(self.key(JOURNAL))}
        return set() if self._bucket.exists(self.key(MANIFEST)) else names

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether the bucket has a file of this size, as of the last listing."""
        sizes = self._sizes if self._sizes is not None else self.names()
        return sizes.get(name) == num_bytes

    def pull(self, store: Path, *, is_outline: bool = False) -> None:
        """Copy the journal from the bucket, or only the manifest if the store is finished.

        In an outline, the entries of tasks are empty files: their names are enough to know which tasks are done.
        """
        for _ in range(TRIES):
            names = self.names()
            # Another run may have finished the store a moment ago and be removing the journal.
            with suppress(NoSuchObject):
                self._pull(store, names, is_outline)
                return
        raise self._changing_error()

    def _changing_error(self) -> StoreError:
        return StoreError(f"{self.url} keeps changing: other runs remove files that this one reads; run it again later")

    def _pull(self, store: Path, names: dict[str, int], is_outline: bool) -> None:
        if MANIFEST in names:
            self._download(store, [name for name in (MANIFEST, RUN) if name in names])
            if not is_outline:
                self._check_sizes(read_manifest(store), names)
            return
        if names and not self._is_erased and not _has_journal(names):
            some = min(names)
            raise StoreError(f"{self.url} is not empty and not a token store: it has {some}; choose another with -o")
        entries = [name for name in names if _ENTRY.fullmatch(name)]
        # Entries of tasks, and the files of their rejects, begin with a digit.
        here = {name for name in entries if name.removeprefix(f"{JOURNAL}/")[0].isdigit()}
        if is_outline:
            for name in here:
                (store / JOURNAL).mkdir(exist_ok=True)
                (store / name).touch()
        else:
            # Skip the entries that this run wrote; another run may have replaced those that it found.
            here = {name for name in here - self._found if (store / name).exists()}
        self._download(store, [name for name in entries if name not in here])
        self._found |= {name for name in entries if name not in here}

    def _check_sizes(self, manifest: Manifest, names: dict[str, int]) -> None:
        """Raise if the listed files of a finished store do not have the sizes in its manifest."""
        for name, size in file_sizes(_shards(manifest)).items():
            if names.get(name) != size:
                found = f"has {names[name]:,} bytes" if name in names else "is missing"
                raise StoreError(
                    f"{self.url}/{name} {found}, and the manifest says {size:,}; make the store again with --overwrite"
                )

    def _download(self, store: Path, names: list[str]) -> None:
        def download(name: str) -> None:
            path = store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = self._bucket.read(self.key(name))
            if self._sizes is not None and len(data) < self._sizes.get(name, 0):
                # A server or proxy may have given only the start.
                data = self._bucket.read(self.key(name))
            path.write_bytes(data)

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for _ in pool.map(download, names):
                pass

    def fetch(self, store: Path, advance: Callable[[int, int], None]) -> list[str]:
        """Download the files of a finished store that exist; return the orphaned files beside them."""
        names = self.names()
        if MANIFEST not in names:
            what = "an unfinished run" if _has_journal(names) else "no token store"
            raise StoreError(f"{self.url} is {what}: it has no {MANIFEST}")
        self._download(store, [MANIFEST])
        manifest = read_manifest(store)
        known = _known(manifest) - {MANIFEST}
        wanted = {name: size for name, size in names.items() if name in known}
        total, done = sum(wanted.values()), 0
        for name, size in sorted(wanted.items()):
            path = store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(ObjectInfo(self.key(name), size, None), path)
            done += size
            advance(done, total)
        return find_orphans(names, manifest)

    def tag(self, name: str) -> str:
        """Return the ETag of a file, which changes with its content; `none` if the file does not exist."""
        try:
            return self._bucket.head(self.key(name)).etag or ""
        except NoSuchObject:
            return "none"

    def is_wanted(self, shards: list[ShardInfo]) -> bool:
        """Whether the run that made these shards still owns the folder; False if an equal run has finished the store.

        Shards have the same names in every run, so a run that was replaced by another must not upload its own.
        """
        if self._plan_tag is None or self.tag(PLAN) == self._plan_tag:
            return True
        data = self.read(MANIFEST)
        manifest = msgspec.json.decode(data, type=Manifest) if data is not None else None
        finished = _shards(manifest) if manifest else []
        if not all(shard in finished for shard in shards):
            raise StoreError(
                f"{self.url} was started over by another run with other flags or inputs; this run stops here"
            )
        return False

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        try:
            return self._bucket.read(self.key(name))
        except NoSuchObject:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        self._bucket.put(self.key(name), data)

    def put_if_unfinished(self, name: str, data: bytes) -> None:
        """Write a file of the journal, unless the store is finished and has no journal."""
        if self.tag(PLAN) != "none":
            self.put(name, data)

    def upload(self, store: Path, names: list[str]) -> None:
        """Upload files of a local directory."""
        for name in names:
            self._bucket.upload(self.key(name), store / name)
            if self._sizes is not None:
                self._sizes[name] = (store / name).stat().st_size

    def push_tokenizer(self, store: Path) -> None:
        """Upload the tokenizer if it is missing: other ranks and `tokenmill finish` need it and may not have it."""
        names = [f"{TOKENIZER}/{path.name}" for path in sorted((store / TOKENIZER).iterdir())]
        self.upload(store, [name for name in names if not self.has(name, (store / name).stat().st_size)])

    def pull_tokenizer(self, store: Path) -> None:
        """Download the tokenizer."""
        self._download(store, list(self._list(self.key(TOKENIZER))))

    def commit(self, name: str, data: bytes, is_same: Callable[[bytes], bool]) -> None:
        """Create an entry; an equal one from another run stays as it is."""
        there = self.create(name, data)
        if there is not None and not is_same(there):
            raise StoreError(
                f"{self.url}/{name} was written by another run with another result; stop that run, or pass --overwrite"
            )

    def create(self, name: str, data: bytes) -> bytes | None:
        """Create a file and return None; if it exists with other content, return that content."""
        for _ in range(TRIES):
            try:
                self._bucket.create(self.key(name), data)
                return None
            except AlreadyThere:
                with suppress(NoSuchObject):
                    return self._bucket.read(self.key(name))
        raise self._changing_error()

    def delete(self, names: list[str]) -> None:
        """Remove files."""
        self._bucket.delete([self.key(name) for name in names])

    def erase(self) -> None:
        """Remove a store, the manifest first, so that an interrupted removal leaves nothing that looks finished."""
        names = list(self.names())
        if names and MANIFEST not in names and not _has_journal(names):
            raise StoreError(f"{self.url} is not a token store: it has {min(names)}; choose another with -o")
        first = [name for name in names if name in (MANIFEST, PLAN)]
        ours = [name for name in names if _is_ours(name) and name not in first]
        last = {name for name in ours if name.startswith(f"{JOURNAL}/")}
        for some in (first, [name for name in ours if name not in last], sorted(last)):
            self.delete(some)
        self._sizes, self._is_erased = None, True

    def finish(self, store: Path, data: bytes) -> None:
        """Upload the files that belong to no task, then create the manifest."""
        self.upload(store, [name for name in KEPT if (store / name).exists()])
        there = self.create(MANIFEST, data)
        if there is not None:
            raise StoreError(f"{self.url} was finished by another run, with another manifest; run with --overwrite")

    def remove_orphans(self) -> None:
        """Remove the journal of a finished store, and other files of runs that its manifest does not list."""
        try:
            manifest = msgspec.json.decode(self._bucket.read(self.key(MANIFEST)), type=Manifest)
        except NoSuchObject:
            return
        self.delete(find_orphans(self.names(), manifest))


def find_orphans(names: dict[str, int], manifest: Manifest) -> list[str]:
    """List files of runs that are not in the manifest of a finished store: a journal, or leftovers of killed runs."""
    known = _known(manifest)
    return sorted(name for name in names if _is_ours(name) and name not in known)


def find_unentered(names: dict[str, int]) -> list[str]:
    """List shards without an entry in an unfinished run: they are being written, or a killed run left them."""
    entered = {name.removeprefix(f"{JOURNAL}/").removesuffix(".json") for name in names if _ENTRY.fullmatch(name)}
    shards = ((name, found[1]) for name in names if (found := _SHARD.fullmatch(name)))
    return sorted(name for name, task in shards if task not in entered)


def _known(manifest: Manifest) -> set[str]:
    """List the files of a finished store."""
    return {
        *file_sizes(_shards(manifest)),
        MANIFEST,
        *KEPT,
        *manifest.files,
        *(f"{TOKENIZER}/{name}" for name in manifest.tokenizer.files),
    }


def _shards(manifest: Manifest) -> list[ShardInfo]:
    return [shard for split in manifest.splits.values() for shard in split.shards]


def file_sizes(shards: Iterable[ShardInfo]) -> dict[str, int]:
    """List the files of shards with their sizes."""
    return {f"{shard.name}{suffix}": file.bytes for shard in shards for suffix, file in shard.files.items()}


def _has_journal(names: Iterable[str]) -> bool:
    return any(name.startswith(f"{JOURNAL}/") for name in names)


def _is_ours(name: str) -> bool:
    return name == MANIFEST or name in KEPT or _OURS.fullmatch(name) is not None


@contextmanager
def pulled(url: str, *, is_outline: bool = False) -> Iterator[tuple[Path, Mirror]]:
    """Copy the manifest or journal of a store in a bucket to a scratch directory."""
    mirror = Mirror(url)
    with scratch_store(mirror) as store:
        mirror.pull(store, is_outline=is_outline)
        yield store, mirror


@contextmanager
def scratch_store(mirror: Mirror, folder: str | None = None) -> Iterator[Path]:
    """Create a scratch directory for the files of a store; in error messages the URL replaces it."""
    with scratch_directory(folder) as place:
        store = place / mirror.url.rpartition("/")[2]
        store.mkdir()
        try:
            yield store
        except BaseException as error:
            known = (arg.replace(str(store), mirror.url) if isinstance(arg, str) else arg for arg in error.args)
            error.args = tuple(known)
            raise


@contextmanager
def scratch_directory(folder: str | None) -> Iterator[Path]:
    """Create a directory for one attempt and remove it afterwards; everything of value is in the bucket.

    The process holds a lock inside it. An unlocked directory was left by a killed attempt; the next attempt removes it.
    """
    place = Path(folder or tempfile.gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
        alive = (path / "new").open("wb")
        fcntl.flock(alive, fcntl.LOCK_EX)
        # Rename the lock file only when it is locked, so that no other process sweeps this directory before that.
        (path / "new").rename(path / ALIVE)
    except OSError as error:
        raise UsageError(f"--scratch {place} cannot be used: {error.strerror}") from None
    with alive:
        _sweep(place)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            # Also remove the directories of this run's cluster processes on this machine.
            _sweep(place)


def _sweep(place: Path) -> None:
    for path in place.glob(f"{SCRATCH}*/{ALIVE}"):
        with suppress(OSError), path.open("rb") as file:
            if try_lock(file):
                shutil.rmtree(path.parent, ignore_errors=True)
