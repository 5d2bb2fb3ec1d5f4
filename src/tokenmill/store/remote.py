"""A store in a bucket: the manifest first, then shards by range or whole, through a cache on this machine.

A file has the same place in the cache as in the store, so that everything which reads a store finds it there; a keeper
fetches what is missing before it is mapped, and reads from the bucket what is not to be fetched. Whole files are
compared with the checksums of the manifest. Ranges cannot be; their lengths and the object's ETag are.
"""

from __future__ import annotations

import os
import sys
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
from tokenmill.remote.client import NoSuchObject, Unreachable, describe_endpoint
from tokenmill.remote.fetching import Fetcher, RemoteFile
from tokenmill.remote.ranges import AHEAD_BYTES, RangeReader, Stretch
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
    Without a server, a store that was open before is read as far as it is in the cache.
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
        key, kept = self.key(MANIFEST), f"{xxhash.xxh3_64_hexdigest(self.url.encode())}/{MANIFEST}"
        try:
            data = self._bucket.read(key)
        except NoSuchObject as error:
            if "/" + MANIFEST not in str(error):
                raise
            raise StoreError(f"{self.url} is not a finished store: it has no {MANIFEST}; check the URL") from None
        except Unreachable:
            data = self.cache.recall(kept) or b""
            if not data:
                raise
            if checksum is None:
                where = describe_endpoint(self._bucket.scheme)
                print(f"tokenmill: {where} cannot be reached; {self.url} is read from the cache", file=sys.stderr)
        else:
            self.cache.keep(kept, data)
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

    def file_of(self, key: str) -> RemoteFile:
        """What there is to know of the file that an object is."""
        name = key.removeprefix(self._folder).lstrip("/")
        return self._describe(name, self._files[name])

    def _describe(self, name: str, file: FileInfo) -> RemoteFile:
        return RemoteFile(f"{self._cached}/{name}", ObjectInfo(self.key(name), file.bytes, None), file.xxh3)

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
    """Has the files of a store in a bucket.

    Where the store does not fit the cache, whole shards are fetched only if somebody says which come next, as a shuffle
    in blocks does. In any other order, what is fetched would push out what is needed soon after; rows come by range.
    """

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        ahead_bytes = None if store.fits_cache else store.cache.most_bytes // 2
        self._fetcher = Fetcher(store.cache, store.bucket, ahead_bytes)
        self._has_all = store.fetch == "shard" and store.fits_cache
        self._num_early = 0
        self._promised: set[str] = set()
        # Rows until their shard is here: few at a time, because most will find it here when they are wanted.
        few = FEW_BYTES if self._has_all else AHEAD_BYTES
        self._ranges = RangeReader(store.bucket, few, self._has_object)

    def __reduce__(self) -> tuple[Any, ...]:
        return _keeper_of, (self._store,)

    @property
    def room_bytes(self) -> int:
        """The size of the cache."""
        return self._store.cache.most_bytes

    def _has_object(self, key: str) -> bool:
        return self._fetcher.has(self._store.file_of(key))

    def hold(self, path: str) -> bool:
        """Whether a file is here, to stay; where the store does not fit the cache, files come and go."""
        if not self._store.fits_cache:
            return False
        file = self._store.file(path)
        self._fetcher.check(file)
        self._fetcher.use(file)
        return self._store.cache.use(file.name, file.info.num_bytes)

    def bring(self, paths: Sequence[str]) -> None:
        """Fetch files that are needed whole; what the store does not have is left out."""
        self.bring_files([self._store.file(path) for path in paths if self._store.has(path)])

    def bring_files(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files now, and keep them."""
        for _ in range(TRIES):
            self._fetcher.fetch_now(files)
            if all(self._store.cache.use(file.name, file.info.num_bytes) for file in files):
                return
        raise StoreError(
            f"files of {self._store.url} go from the cache as fast as they come; pass a larger cache_bytes"
        )

    def want(self, paths: Sequence[str]) -> None:
        """Fetch shards in the background, if they are to be fetched whole."""
        if self._store.fetch == "shard":
            files = [self._store.file(path) for path in paths]
            self._promised.update(file.name for file in files)
            for file in files:
                # What was wanted longest ago goes first, also if it was read later than what is yet to be read.
                self._store.cache.touch(file.name)
            self._fetcher.want(file for file in files if not self._fetcher.has(file))

    def expect(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Fetch what will be read from shards that are not here; and these shards after that, if all of them fit."""
        missing: dict[str, RemoteFile] = {}
        for path in dict.fromkeys(paths):
            file = self._store.file(path)
            if not self._fetcher.has(file):
                missing[path] = file
        coming = {path for path, file in missing.items() if not self._has_all and self._fetcher.is_coming(file)}
        stretches = []
        for path, start, stop in zip(paths, starts, stops, strict=True):
            if path in missing and stop > start and not (path in coming and self._num_early >= EARLY_ROWS):
                stretches.append(Stretch(missing[path].info.key, start, stop))
                self._num_early += path in coming
        self._ranges.expect(stretches, {file.info.key: file.info.num_bytes for file in missing.values()})
        if self._has_all:
            self.want(list(missing))

    def read_into(self, path: str, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from the file in the cache, or from the bucket."""
        file = self._store.file(path)
        self._fetcher.check(file)
        stretch = Stretch(file.info.key, offset, offset + len(buffer))
        # What starts with a shard is the end of a row of the shard before, which may be in use at another time.
        if offset > 0:
            self._fetcher.use(file)
            if not self._has_all and file.name in self._promised and not self._ranges.is_expected(stretch):
                self._await(file)
        if self._fetcher.has(file) and _read_here(path, buffer, offset):
            return
        if len(buffer) <= PIECE_BYTES:
            buffer[:] = self._ranges.read(stretch, file.info.num_bytes)
        else:
            self._read_pieces(file, buffer, offset)

    def _await(self, file: RemoteFile) -> None:
        """Wait for a shard that comes just in time, and fetch it again if it had to go before its turn."""
        if not self._fetcher.has(file):
            self._fetcher.want([file])
            self._fetcher.wait_for(file)
            self._fetcher.check(file)

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
