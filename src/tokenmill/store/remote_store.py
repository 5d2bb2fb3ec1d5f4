"""A store in a bucket: the manifest first, then whole shards or byte ranges, through a cache on this machine.

A file has the same relative path in the cache as in the store, so that all code which reads stores finds it there.
`RemoteShardCache` downloads a file before it is mapped, or reads ranges of it from the bucket. Whole files are compared
with the checksums of the manifest; ranges cannot be, so their lengths and the object's ETag are checked, and
`verify="background"` reads the whole object.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tokenmill.arguments import is_remote, one_of, path_of, show
from tokenmill.errors import StoreError, UsageError
from tokenmill.machine import parse_bytes
from tokenmill.remote.bucket import Bucket, ObjectInfo, split_url
from tokenmill.remote.cache import Cache, CacheEntry
from tokenmill.remote.fetcher import Fetcher
from tokenmill.remote.object_request import describe_endpoint
from tokenmill.remote.ranges import AHEAD_BYTES, ByteRange, RangeReader
from tokenmill.remote.remote_errors import NoSuchObject, ServerUnreachable
from tokenmill.store.background_check import CheckedFile, LocalFile
from tokenmill.store.manifest import MANIFEST, FileInfo, Manifest, decode_manifest
from tokenmill.store.store import LOADED, Split, TokenStore, check_manifest
from tokenmill.store.table import read_into

__all__ = ["FETCHES", "RemoteStore", "open_remote", "open_store"]

FETCHES = ("shard", "range")
FEW_BYTES = 1 << 20
EARLY_ROWS = 512
"""How many rows are read by range while their shard is being downloaded; later ones wait for the shard."""
PIN_ATTEMPTS = 5
MANIFEST_ATTEMPTS = 3
PIECE_BYTES = 4 << 20
"""Bytes of one request for a long range."""


def open_remote(
    url: str, *, cache_dir: str | Path | None = None, cache_bytes: str | int | None = None, fetch: str | None = None
) -> RemoteStore:
    """Open a store by its URL.

    `fetch` is `"shard"` or `"range"`; by default whole shards are downloaded if the store fits the cache. If the server
    cannot be reached, a store that was opened before is read from the cache.
    """
    folder = None if cache_dir is None else Path(path_of(cache_dir, "the folder of a cache"))
    if fetch is not None:
        one_of(fetch, FETCHES, "fetch")
    return RemoteStore(url, Cache(folder, _parse_size(cache_bytes)), fetch)


def open_store(place: str | Path) -> TokenStore:
    """Open a finished store in a directory or in a bucket."""
    return open_remote(str(place)) if is_remote(str(place)) else TokenStore(Path(place))


def _parse_size(value: str | int | None) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if not isinstance(value, str):
        raise UsageError(f"cache_bytes {show(value)} is not a size; write it like '50GB'")
    return parse_bytes(value, "cache_bytes")


class RemoteStore(TokenStore):
    """A store in a bucket; `path` is the folder of its files in the cache."""

    def __init__(self, url: str, cache: Cache, fetch: str | None = None, checksum: str | None = None) -> None:
        self.bucket, self._folder = split_url(url)
        self.url = self.bucket.url(self._folder)
        self.cache = cache
        self._fetch = fetch
        self.manifest: Manifest = self._read_manifest(checksum)
        self._cache_name = self._folder_in_cache(self.manifest.checksum)
        self.path = cache.make_folder(self._cache_name)
        check_manifest(self.path, self.manifest)
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.num_bytes = sum(file.bytes for name, file in self._files.items() if name.endswith(LOADED))
        self.fits_cache = self.num_bytes <= cache.max_bytes
        self.fetch = fetch or ("shard" if self.fits_cache else "range")
        self.shard_cache: RemoteShardCache = RemoteShardCache(self)
        self.splits = {name: Split(self, name, info) for name, info in self.manifest.splits.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.url, self.cache, self._fetch, self.manifest.checksum)

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    def make_local(self) -> None:
        """Download all files of all shards and pin them in the cache."""
        self.shard_cache.fetch_entries([self._describe(name, file) for name, file in self._files.items()])

    def _folder_in_cache(self, checksum: str) -> str:
        """The folder of this manifest at this URL: another manifest has other files of the same names."""
        mark = xxhash.xxh3_64_hexdigest(f"{self.url} {checksum}".encode())
        return f"{mark}/{self._folder.rpartition('/')[2] or self.bucket.name}"

    def _read_manifest(self, checksum: str | None) -> Manifest:
        """Read the manifest from the bucket; a copy of this store in another process must find the same one."""
        key, kept = self.key(MANIFEST), f"{xxhash.xxh3_64_hexdigest(self.url.encode())}/{MANIFEST}"
        try:
            data, manifest = self._ask_for_manifest(key)
        except NoSuchObject as error:
            if "/" + MANIFEST not in str(error):
                raise
            raise StoreError(f"{self.url} is not a finished store: it has no {MANIFEST}; check the URL") from None
        except ServerUnreachable:
            kept_data = self.cache.read_small(kept)
            if not kept_data:
                raise
            manifest = decode_manifest(kept_data, self.bucket.url(key))
            if checksum is None:
                where = describe_endpoint(self.bucket.scheme)
                print(f"tokenmill: {where} cannot be reached; {self.url} is read from the cache", file=sys.stderr)
        else:
            self.cache.write_small(kept, data)
        if checksum is not None and manifest.checksum != checksum:
            raise StoreError(f"{self.url} was replaced by another store while it was in use; open it again")
        return manifest

    def _ask_for_manifest(self, key: str) -> tuple[bytes, Manifest]:
        """Read the manifest; retry if it is damaged, because a server or proxy may have sent only the start of it."""
        for _ in range(MANIFEST_ATTEMPTS):
            data = self.bucket.read(key)
            try:
                return data, decode_manifest(data, self.bucket.url(key))
            except StoreError as error:
                damage = error
        raise damage

    def key(self, name: str) -> str:
        """The key of the object that holds a file of the store."""
        return f"{self._folder}/{name}" if self._folder else name

    @cached_property
    def _files(self) -> dict[str, FileInfo]:
        """The files of all shards, by name."""
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        return {f"{shard.name}{suffix}": file for shard in shards for suffix, file in shard.files.items()}

    def entry(self, path: str) -> CacheEntry:
        """The cache entry of a file, by its path in the cache."""
        name = path[len(str(self.path)) + 1 :]
        file = self._files.get(name)
        if file is None:
            raise StoreError(f"{self.url}/{name} is not in the manifest")
        return self._describe(name, file)

    def has(self, path: str) -> bool:
        """Whether the manifest lists the file with this path in the cache."""
        return path[len(str(self.path)) + 1 :] in self._files

    def entry_of_object(self, key: str) -> CacheEntry:
        """The cache entry of a file, by the key of its object."""
        name = key.removeprefix(self._folder).lstrip("/")
        return self._describe(name, self._files[name])

    def _describe(self, name: str, file: FileInfo) -> CacheEntry:
        return CacheEntry(f"{self._cache_name}/{name}", ObjectInfo(self.key(name), file.bytes, None), file.xxh3)

    def _fetch_tokenizer(self) -> None:
        files = self.manifest.tokenizer.files
        wrong = next((name for name in files if "/" in name or "\0" in name or name in ("", ".", "..")), None)
        if wrong is not None:
            raise StoreError(f"{self.url}/{MANIFEST} names a file of the tokenizer outside the store: {wrong!r}")
        self.shard_cache.fetch_entries([self._describe(f"tokenizer/{name}", file) for name, file in files.items()])


class RemoteShardCache:
    """The files of a store in a bucket, read from the cache or by range.

    If the store does not fit the cache, whole shards are downloaded only for a reader that announces them in order, as
    a block shuffle does. In any other order a download would evict a shard that is needed soon; rows are read by range.
    """

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._cache = store.cache
        self._fetcher = Fetcher(store.cache, store.bucket, None if store.fits_cache else store.cache.max_bytes // 2)
        self._downloads_all = store.fetch == "shard" and store.fits_cache
        self._num_early = 0
        self._announced: set[str] = set()
        # When most rows are read, their shard has been downloaded, so few rows are prefetched by range.
        ahead_bytes = FEW_BYTES if self._downloads_all else AHEAD_BYTES
        self._ranges = RangeReader(store.bucket, ahead_bytes, self._has_object)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.attrgetter("shard_cache"), (self._store,)

    @property
    def room_bytes(self) -> int:
        """The size of the cache."""
        return self._cache.max_bytes

    def _has_object(self, key: str) -> bool:
        return self._cache.has(self._store.entry_of_object(key))

    def pin(self, path: str) -> bool:
        """Keep a file in the cache; False if it is not here, or if the store does not fit the cache."""
        if not self._store.fits_cache:
            return False
        file = self._store.entry(path)
        self._fetcher.raise_failure(file)
        self._fetcher.mark_used(file)
        return self._cache.pin(file)

    def fetch(self, paths: Sequence[str]) -> None:
        """Download files now and pin them, except those that the manifest does not list."""
        self.fetch_entries([self._store.entry(path) for path in paths if self._store.has(path)])

    def fetch_entries(self, files: Sequence[CacheEntry]) -> None:
        """Download files now and pin them."""
        for _ in range(PIN_ATTEMPTS):
            self._fetcher.fetch(files)
            if all(self._cache.pin(file) for file in files):
                return
        raise StoreError(
            f"files of {self._store.url} are evicted from the cache as fast as they arrive; pass a larger cache_bytes"
        )

    def prefetch(self, paths: Sequence[str]) -> None:
        """Download shards in the background, if the store is loaded in whole shards."""
        if self._store.fetch == "shard":
            files = [self._store.entry(path) for path in paths]
            self._announced.update(file.name for file in files)
            for file in files:
                # Eviction follows the order of announcements, even if an earlier shard is read later.
                self._cache.touch(file.name)
            self._fetcher.prefetch(file for file in files if not self._cache.has(file))

    def prefetch_ranges(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Prefetch ranges of shards that are not here, and then these shards, if the whole store fits the cache."""
        entries = {path: self._store.entry(path) for path in dict.fromkeys(paths)}
        missing = {path: file for path, file in entries.items() if not self._cache.has(file)}
        pending: set[str] = set()
        if not self._downloads_all:
            pending = {path for path, file in missing.items() if self._fetcher.is_pending(file)}
        ranges = []
        for path, start, stop in zip(paths, starts, stops, strict=True):
            if path in missing and stop > start and not (path in pending and self._num_early >= EARLY_ROWS):
                ranges.append(ByteRange(missing[path].info.key, start, stop))
                self._num_early += path in pending
        self._ranges.prefetch(ranges, {file.info.key: file.info.num_bytes for file in missing.values()})
        if self._downloads_all:
            self.prefetch(list(missing))

    def read_into(self, path: str, buffer: memoryview, offset: int) -> CheckedFile:
        """Fill a buffer from the file in the cache, or from the bucket."""
        file = self._store.entry(path)
        self._fetcher.raise_failure(file)
        byte_range = ByteRange(file.info.key, offset, offset + len(buffer))
        # A read at offset 0 is the end of a row of the previous shard, and does not mean that this shard is in use.
        if offset > 0:
            self._fetcher.mark_used(file)
            is_coming = file.name in self._announced and not self._downloads_all
            if is_coming and not self._ranges.is_announced(byte_range) and not self._cache.has(file):
                # Wait for the shard, and download it again if it was evicted too early.
                self._fetcher.prefetch([file])
                self._fetcher.wait_for(file)
                self._fetcher.raise_failure(file)
        if self._cache.has(file):
            with contextlib.suppress(StoreError):  # it may be evicted at this moment
                read_into(path, buffer, offset)
                return LocalFile(path, FileInfo(file.info.num_bytes, file.xxh3), is_copy=True)
        if len(buffer) <= PIECE_BYTES:
            buffer[:] = self._ranges.read(byte_range, file.info.num_bytes)
        else:
            self._read_pieces(file, buffer, offset)
        return _RemoteFile(self._store.bucket, file, self._fetcher)

    def _read_pieces(self, file: CacheEntry, buffer: memoryview, offset: int) -> None:
        """Read a long range with many requests, several of them at once."""
        pieces = [
            ByteRange(file.info.key, offset + first, offset + min(first + PIECE_BYTES, len(buffer)))
            for first in range(0, len(buffer), PIECE_BYTES)
        ]
        self._ranges.prefetch(pieces, {file.info.key: file.info.num_bytes})
        for piece in pieces:
            buffer[piece.start - offset : piece.stop - offset] = self._ranges.read(piece, file.info.num_bytes)


class _RemoteFile(NamedTuple):
    """An object of which ranges were read: no checksum covers them, so the whole of it is read once."""

    bucket: Bucket
    entry: CacheEntry
    fetcher: Fetcher

    @property
    def name(self) -> str:
        return self.bucket.url(self.entry.info.key)

    def key(self) -> str | None:
        info = self.bucket.head(self.entry.info.key)
        return f"{self.entry.xxh3} {info.num_bytes} {info.etag} {self.name}" if info.etag is not None else None

    def find_damage(self, look: Callable[[memoryview], None]) -> str | None:
        # A download compares the checksum.
        self.fetcher.wait_for(self.entry)
        self.fetcher.raise_failure(self.entry)
        if self.fetcher.cache.has(self.entry):
            return None
        digest, info = xxhash.xxh3_64(), self.bucket.head(self.entry.info.key)
        for start in range(0, info.num_bytes, PIECE_BYTES):
            piece = self.bucket.read_range(info, start, min(start + PIECE_BYTES, info.num_bytes))
            digest.update(piece)
            look(piece)
        found = digest.hexdigest()
        if found == self.entry.xxh3:
            return None
        return f"{self.name} is damaged: its checksum is {found}, not {self.entry.xxh3}; upload it again"
