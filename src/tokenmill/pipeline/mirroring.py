"""A run whose store is in a bucket: it works in a scratch directory, and what counts goes to the bucket, task by task.

    read what is done from the bucket -> run in a scratch directory -> per task: upload its files, then create its entry
    -> upload the rest, then create the manifest -> remove the journal, and what nobody knows

There is no rename in a bucket, and no lock: an entry is created only where there is none, so a task is done when its
entry is there, whoever made it. The bytes of a store depend on its inputs and flags, so a second run at the same time
does some work twice and harms nothing. Whatever a kill leaves in the bucket has no entry, and is written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tokenmill.errors import StoreError, UsageError
from tokenmill.pipeline.scratch import scratch_directory
from tokenmill.remote.bucket import ObjectInfo, split_url
from tokenmill.remote.client import AlreadyThere, NoSuchObject, describe_endpoint, reached
from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, read_manifest

__all__ = ["JOURNAL", "PLAN", "Mirror", "find_orphans", "find_unentered", "named", "pulled"]

JOURNAL = ".tasks"
PLAN = f"{JOURNAL}/plan.json"
TRIES = 5
REQUESTS_AT_ONCE = 16
_ENTRY = re.compile(rf"{re.escape(JOURNAL)}/[A-Za-z0-9][A-Za-z0-9.-]*")
_SHARD = re.compile(r"(?:train|val)/shard-(\d+-\d+)(?:\.[a-z]+)+")
_OURS = re.compile(rf"{_SHARD.pattern}|{re.escape(JOURNAL)}/[^/]+|tokenizer/[^/]+")
"""What a run may write, and so may remove: whatever else is in the place is somebody's."""
RUN = "run.json"
KEPT = (RUN, "rejects.jsonl")
TOKENIZER = "tokenizer"


class Mirror:
    """The place of a store in a bucket, and the files there; knows nothing of what they mean."""

    def __init__(self, url: str, plan_tag: str | None = None) -> None:
        self._bucket, self._folder = split_url(url)
        self._plan_tag = plan_tag
        """The ETag of the plan that this process works on, in a run that has reached the server: it is waited for."""
        if plan_tag is not None:
            reached.add(describe_endpoint(self._bucket.scheme))
        if not self._folder:
            raise UsageError(f"{url} is a whole bucket; name a folder in it: {url.rstrip('/')}/NAME")
        self.url = self._bucket.url(self._folder)
        self._sizes: dict[str, int] | None = None
        self._found: set[str] = set()
        self._is_erased = False

    def key(self, name: str) -> str:
        """The object of a file of the store."""
        return f"{self._folder}/{name}"

    def names(self) -> dict[str, int]:
        """All files that are there now, and their sizes."""
        below = len(self._folder) + 1
        self._sizes = {info.key[below:]: info.num_bytes for info in self._bucket.list(self._folder)}
        return self._sizes

    def journal(self) -> set[str]:
        """The names of the journal's files that are there now, without their contents; none of a finished store."""
        below = len(self.key(JOURNAL)) + 1
        names = {info.key[below:] for info in self._bucket.list(self.key(JOURNAL))}
        return set() if self._bucket.exists(self.key(MANIFEST)) else names

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is there with its size, as far as this process knows."""
        sizes = self._sizes if self._sizes is not None else self.names()
        return sizes.get(name) == num_bytes

    def pull(self, store: Path, *, is_outline: bool = False) -> None:
        """Have the journal here as it is in the bucket, or the manifest, if there is one.

        An outline has empty files for the entries of tasks: their names say what is done.
        """
        for _ in range(TRIES):
            names = self.names()
            try:
                self._pull(store, names, is_outline)
                return
            except NoSuchObject:
                # Another run has just finished the store, and removes its journal.
                continue
        raise self._changes()

    def _changes(self) -> StoreError:
        return StoreError(f"{self.url} changes all the time: other runs remove what this one reads; run it again later")

    def _pull(self, store: Path, names: dict[str, int], is_outline: bool) -> None:
        if MANIFEST in names:
            self._bring(store, [name for name in (MANIFEST, RUN) if name in names])
            if not is_outline:
                self._check_sizes(read_manifest(store), names)
            return
        if names and not self._is_erased and not any(name.startswith(f"{JOURNAL}/") for name in names):
            some = min(names)
            raise StoreError(f"{self.url} is not empty and not a token store: it has {some}; choose another with -o")
        entries = [name for name in names if _ENTRY.fullmatch(name)]
        here = {name for name in entries if _is_of_task(name)}
        if is_outline:
            for name in here:
                (store / JOURNAL).mkdir(exist_ok=True)
                (store / name).touch()
        else:
            # What this run has made it need not fetch; what it found may have been made again by another.
            here = {name for name in here - self._found if (store / name).exists()}
        self._bring(store, [name for name in entries if name not in here])
        self._found |= {name for name in entries if name not in here}

    def _check_sizes(self, manifest: Manifest, names: dict[str, int]) -> None:
        """Do not call a store finished whose files are not what its manifest says, as far as a list of them shows."""
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        sizes = {f"{shard.name}{suffix}": file.bytes for shard in shards for suffix, file in shard.files.items()}
        for name, size in sizes.items():
            if names.get(name) != size:
                found = f"has {names[name]:,} bytes" if name in names else "is missing"
                raise StoreError(
                    f"{self.url}/{name} {found}, and the manifest says {size:,}; make the store anew with --overwrite"
                )

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
        """The ETag of a file, which changes with its content; of one that is not there, what no file has."""
        try:
            return self._bucket.head(self.key(name)).etag or ""
        except NoSuchObject:
            return "none"

    def is_wanted(self, shards: list[ShardInfo]) -> bool:
        """Whether the run that made shards is still the one of this place; False where a twin has finished the store.

        Shards have the same names in every run, so one that was overtaken must not upload what it has.
        """
        if self._plan_tag is None or self.tag(PLAN) == self._plan_tag:
            return True
        data = self.read(MANIFEST)
        manifest = msgspec.json.decode(data, type=Manifest) if data is not None else None
        finished = [shard for split in manifest.splits.values() for shard in split.shards] if manifest else []
        if not all(shard in finished for shard in shards):
            raise StoreError(
                f"{self.url} was begun anew by another run, with other flags or inputs; this one ends here"
            )
        return False

    def read(self, name: str) -> bytes | None:
        """A small file as it is now; None if it is not there."""
        try:
            return self._bucket.read(self.key(name))
        except NoSuchObject:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        self._bucket.put(self.key(name), data)

    def note(self, name: str, data: bytes) -> None:
        """Write a file of the journal while there is one: a finished store has none."""
        if self.tag(PLAN) != "none":
            self.put(name, data)

    def upload(self, store: Path, names: list[str]) -> None:
        """Write files of a directory, each whole."""
        for name in names:
            self._bucket.upload(self.key(name), store / name)
            if self._sizes is not None:
                self._sizes[name] = (store / name).stat().st_size

    def push_tokenizer(self, store: Path) -> None:
        """Write the tokenizer, if it is not there: whoever helps or finishes needs it, and may not have it."""
        names = [f"{TOKENIZER}/{path.name}" for path in sorted((store / TOKENIZER).iterdir())]
        self.upload(store, [name for name in names if not self.has(name, (store / name).stat().st_size)])

    def pull_tokenizer(self, store: Path) -> None:
        """Have the tokenizer here."""
        below = len(self._folder) + 1
        self._bring(store, [info.key[below:] for info in self._bucket.list(self.key(TOKENIZER))])

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
        first = [name for name in names if name in (MANIFEST, PLAN)]
        ours = [name for name in names if _is_ours(name) and name not in first]
        for some in (
            first,
            [name for name in ours if not name.startswith(f"{JOURNAL}/")],
            [name for name in ours if name.startswith(f"{JOURNAL}/")],
        ):
            self.delete(some)
        self._sizes, self._is_erased = None, True

    def finish(self, store: Path, data: bytes) -> None:
        """Write what belongs to no task, and then the manifest, if it is not there."""
        self.upload(store, [name for name in KEPT if (store / name).exists()])
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


def _is_of_task(name: str) -> bool:
    """Whether a file of the journal is the entry of a task, or its rejects."""
    return name.removeprefix(f"{JOURNAL}/")[0].isdigit()


def find_orphans(names: dict[str, int], manifest: Manifest) -> list[str]:
    """Files of runs that the manifest of a finished store does not know: a journal, or what a kill has left."""
    known = _known(manifest)
    return sorted(name for name in names if _is_ours(name) and name not in known)


def find_unentered(names: dict[str, int]) -> list[str]:
    """Files of tasks that have no entry in an unfinished run: they are being written, or a kill has left them."""
    entered = {name.removeprefix(f"{JOURNAL}/").removesuffix(".json") for name in names if _ENTRY.fullmatch(name)}
    shards = ((name, found[1]) for name in names if (found := _SHARD.fullmatch(name)))
    return sorted(name for name, task in shards if task not in entered)


def _known(manifest: Manifest) -> set[str]:
    """The files of a finished store."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    known = {f"{shard.name}{suffix}" for shard in shards for suffix in shard.files}
    return known | {MANIFEST, *KEPT, *manifest.files, *(f"{TOKENIZER}/{name}" for name in manifest.tokenizer.files)}


def _is_ours(name: str) -> bool:
    return name == MANIFEST or name in KEPT or _OURS.fullmatch(name) is not None


@contextmanager
def pulled(url: str, *, is_outline: bool = False) -> Iterator[tuple[Path, Mirror]]:
    """What there is to know of a store in a bucket, in a scratch directory; errors are about the URL."""
    mirror = Mirror(url)
    with scratch_directory(None) as folder:
        store = folder / mirror.url.rpartition("/")[2]
        store.mkdir()
        with named(mirror.url, store):
            mirror.pull(store, is_outline=is_outline)
            yield store, mirror


@contextmanager
def named(url: str, store: Path) -> Iterator[None]:
    """The user knows the URL, and not the scratch directory."""
    try:
        yield
    except BaseException as error:
        error.args = tuple(arg.replace(str(store), url) if isinstance(arg, str) else arg for arg in error.args)
        raise
