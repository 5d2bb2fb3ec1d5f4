"""A store in a bucket: the manifest first, then shards by range or whole, through a cache on this machine.

A file has the same place in the cache as in the store, so that everything which reads a store finds it there; a keeper
fetches what is missing before it is mapped, and reads from the bucket what is not to be fetched. Whole files are
compared with the checksums of the manifest. Ranges cannot be; their lengths and the object's ETag are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from tokenmill.arguments import one_of, path_of, show
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.machine import parse_bytes
from tokenmill.remote.bucket import Bucket, ObjectInfo, split_url
from tokenmill.remote.cache import Cache
from tokenmill.remote.client import NoSuchObject
from tokenmill.remote.fetching import Fetcher, RemoteFile
from tokenmill.remote.ranges import RangeReader, Stretch
from tokenmill.store.manifest import MANIFEST, FileInfo, Manifest, decode_manifest
from tokenmill.store.shard import BESIDE
from tokenmill.store.store import Split, TokenStore, check_manifest

__all__ = ["FETCHES", "RemoteStore", "open_remote"]

FETCHES = ("shard", "range")
FEW_BYTES = 1 << 20
EARLY_ROWS = 512
TRIES = 5
PIECE_BYTES = 4 << 20
"""What one request brings of a long stretch."""
LOADED = (".bin", ".idx", *BESIDE)
"""What loading needs of a shard."""


def open_remote(
    url: str, *, cache_dir: str | Path | None = None, cache_bytes: str | int | None = None, fetch: str | None = None
) -> RemoteStore:
    """Open a store by its URL.

    Tokens come in whole shards or by range, as `fetch` says; in whole shards unless said, if the store fits the cache.
    """
    folder = None if cache_dir is None else Path(path_of(cache_dir, "the folder of a cache"))
    if fetch is not None:
        one_of(fetch, FETCHES, "fetch")
    return RemoteStore(url, Cache(folder, _size(cache_bytes)), fetch)


def _size(value: str | int | None) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if not isinstance(value, str):
        raise UsageError(f"cache_bytes {show(value)} is not a size; write it like '50GB'")
    return parse_bytes(value, "cache_bytes")


class RemoteStore(TokenStore):
    """A store in a bucket. `path` is where its files are on this machine once they are fetched."""

    def __init__(self, url: str, cache: Cache, fetch: str | None = None, checksum: str | None = None) -> None:
        self._bucket, self._folder = split_url(url)
        self.url = self._bucket.url(self._folder)
        self.cache = cache
        self._fetch = fetch
        self.manifest: Manifest = self._read_manifest(checksum)
        self._cached = self._folder_in_cache(self.manifest.checksum)
        self.path = cache.make_folder(self._cached)
        check_manifest(self.path, self.manifest)
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.num_bytes = sum(file.bytes for name, file in self._files.items() if name.endswith(LOADED))
        self.fits_cache = self.num_bytes <= cache.most_bytes
        self.fetch = fetch or ("shard" if self.fits_cache else "range")
        self.keeper: RemoteKeeper = RemoteKeeper(self)
        self.splits = {name: Split(self, name, info) for name, info in self.manifest.splits.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self.url, self.cache, self._fetch, self.manifest.checksum)

    @property
    def place(self) -> str:
        """Its URL."""
        return self.url

    def make_local(self) -> None:
        """Fetch all files of all shards into the cache, to stay."""
        self.keeper.bring_files([self._describe(name, file) for name, file in self._files.items()])

    def _folder_in_cache(self, checksum: str) -> str:
        """A folder for this manifest at this URL: one that replaces it has other files of the same names."""
        mark = xxhash.xxh3_64_hexdigest(f"{self.url} {checksum}".encode())
        return f"{mark}/{self._folder.rpartition('/')[2] or self._bucket.name}"

    def _read_manifest(self, checksum: str | None) -> Manifest:
        """The manifest as it is in the bucket; a copy of this store in another process must have the same one."""
        key = self.key(MANIFEST)
        try:
            data = self._bucket.read(key)
        except NoSuchObject as error:
            if "/" + MANIFEST not in str(error):
                raise
            raise StoreError(f"{self.url} is not a finished store: it has no {MANIFEST}; check the URL") from None
        manifest = decode_manifest(data, self._bucket.url(key))
        if checksum is not None and manifest.checksum != checksum:
            raise StoreError(f"{self.url} was replaced by another store while it was in use; open it again")
        return manifest

    def key(self, name: str) -> str:
        """The object of a file of the store."""
        return f"{self._folder}/{name}" if self._folder else name

    @cached_property
    def _files(self) -> dict[str, FileInfo]:
        """The files of all shards, by name."""
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        return {f"{shard.name}{suffix}": file for shard in shards for suffix, file in shard.files.items()}

    def file(self, path: str) -> RemoteFile:
        """What there is to know of the file that has a path in the cache."""
        name = path[len(str(self.path)) + 1 :]
        file = self._files.get(name)
        if file is None:
            raise StoreError(f"{self.url}/{name} is not in the manifest")
        return self._describe(name, file)

    def has(self, path: str) -> bool:
        """Whether the manifest names a file that has this path in the cache."""
        return path[len(str(self.path)) + 1 :] in self._files

    def _describe(self, name: str, file: FileInfo) -> RemoteFile:
        info = ObjectInfo(self.key(name), file.bytes, None)
        return RemoteFile(self.name_in_cache(info.key), info, file.xxh3)

    def name_in_cache(self, key: str) -> str:
        """What the cache calls the file of an object."""
        return f"{self._cached}/{key.removeprefix(self._folder).lstrip('/')}"

    @property
    def bucket(self) -> Bucket:
        """Where it is."""
        return self._bucket

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the store's own copy."""
        files = self.manifest.tokenizer.files
        wrong = next((name for name in files if "/" in name or "\0" in name or name in ("", ".", "..")), None)
        if wrong is not None:
            raise StoreError(f"{self.url}/{MANIFEST} names a file of the tokenizer outside the store: {wrong!r}")
        self.keeper.bring_files([self._describe(f"tokenizer/{name}", file) for name, file in files.items()])
        tokenizer: Tokenizer = TokenStore.tokenizer.func(self)  # type: ignore[attr-defined]
        return tokenizer


class RemoteKeeper:
    """Has the files of a store in a bucket."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        ahead_bytes = None if store.fits_cache else store.cache.most_bytes // 2
        self._fetcher = Fetcher(store.cache, store.bucket, ahead_bytes)
        # Shards of a block come just in time, and are worth waiting for once training has begun.
        self._waits = store.fetch == "shard" and not store.fits_cache
        self._num_early = 0
        if store.fetch == "shard":
            # Rows until their shard is here: few at a time, because most will find it here when they are wanted.
            self._ranges = RangeReader(store.bucket, FEW_BYTES, self._has_object)
        else:
            self._ranges = RangeReader(store.bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return _keeper_of, (self._store,)

    @property
    def room_bytes(self) -> int:
        """The size of the cache."""
        return self._store.cache.most_bytes

    def _has_object(self, key: str) -> bool:
        return self._store.cache.has(self._store.name_in_cache(key))

    def hold(self, path: str) -> bool:
        """Whether a file is here, to stay; where the store does not fit the cache, files come and go."""
        if not self._store.fits_cache:
            return False
        file = self._store.file(path)
        self._fetcher.check(file)
        self._fetcher.use(file)
        return self._store.cache.use(file.name)

    def bring(self, paths: Sequence[str]) -> None:
        """Fetch files that are needed whole; what the store does not have is left out."""
        self.bring_files([self._store.file(path) for path in paths if self._store.has(path)])

    def bring_files(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files now, and keep them."""
        for _ in range(TRIES):
            self._fetcher.fetch_now(files)
            if all(self._store.cache.use(file.name) for file in files):
                return
        raise StoreError(
            f"files of {self._store.url} go from the cache as fast as they come; pass a larger cache_bytes"
        )

    def want(self, paths: Sequence[str]) -> None:
        """Fetch shards in the background, if they are to be fetched whole."""
        if self._store.fetch == "shard":
            files = [self._store.file(path) for path in paths]
            for file in files:
                # What was wanted longest ago goes first, also if it was read later than what is yet to be read.
                self._store.cache.touch(file.name)
            self._fetcher.want(file for file in files if not self._store.cache.has(file.name))

    def expect(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Fetch what will be read from shards that are not here, and these shards after that."""
        missing: dict[str, RemoteFile] = {}
        for path in dict.fromkeys(paths):
            file = self._store.file(path)
            if not self._store.cache.has(file.name):
                missing[path] = file
        stretches = [
            Stretch(missing[path].info.key, start, stop)
            for path, start, stop in zip(paths, starts, stops, strict=True)
            if path in missing and stop > start
        ]
        if self._waits:
            stretches = stretches[: max(0, EARLY_ROWS - self._num_early)]
            self._num_early += len(stretches)
        self._ranges.expect(stretches, {file.info.key: file.info.num_bytes for file in missing.values()})
        self.want(list(missing))

    def read_into(self, path: str, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from the file in the cache, or from the bucket."""
        file = self._store.file(path)
        self._fetcher.check(file)
        self._fetcher.use(file)
        stretch = Stretch(file.info.key, offset, offset + len(buffer))
        if self._waits and not self._ranges.is_expected(stretch):
            self._fetcher.wait_for(file)
            self._fetcher.check(file)
        if self._store.cache.has(file.name) and _read_here(path, buffer, offset):
            return
        if len(buffer) <= PIECE_BYTES:
            buffer[:] = self._ranges.read(stretch, file.info.num_bytes)
        else:
            self._read_pieces(file, buffer, offset)

    def _read_pieces(self, file: RemoteFile, buffer: memoryview, offset: int) -> None:
        """Read a long stretch by many requests, several of them at once."""
        pieces = [
            Stretch(file.info.key, offset + first, offset + min(first + PIECE_BYTES, len(buffer)))
            for first in range(0, len(buffer), PIECE_BYTES)
        ]
        self._ranges.expect(pieces, {file.info.key: file.info.num_bytes})
        for piece in pieces:
            buffer[piece.start - offset : piece.stop - offset] = self._ranges.read(piece, file.info.num_bytes)


def _keeper_of(store: RemoteStore) -> RemoteKeeper:
    return store.keeper


def _read_here(path: str, buffer: memoryview, offset: int) -> bool:
    """Read a file that may be removed at any time; False if it was."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        while len(buffer):
            count = os.preadv(descriptor, [buffer], offset)
            if count <= 0:
                return False
            buffer, offset = buffer[count:], offset + count
        return True
    finally:
        os.close(descriptor)
