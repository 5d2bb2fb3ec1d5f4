"""Many shards as a few arrays: the memory addresses of their tokens, and the starts of their documents.

Shards are mapped when they are first read and stay mapped. Under a global shuffle every row is
in another shard, so an LRU cache of mappings would always miss (28 us a row, where `preadv`
takes 5). Shards beyond the limit on mappings are read by `preadv` instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.regular_files import regular_descriptor
from tokenmill.store import mapping
from tokenmill.store.manifest import RESTORE
from tokenmill.store.mapping import MappedFile, everywhere, let_go, will_need
from tokenmill.store.opened_files import OpenedFiles
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC, dtype_code

__all__ = ["Integers", "ShardCache", "ShardTable", "read_into"]

Integers = npt.NDArray[np.int64]

UNKNOWN, UNMAPPED = 0, -1
LONG_READ = 1 << 16
_POINTER_STEP = 2
"""Pointers follow a header of 34 bytes and 4 bytes a document, so their addresses are even."""


class ShardCache(Protocol):
    """A local cache of the files of a remote store. Files are named by the paths that they have in the cache."""

    @property
    def room_bytes(self) -> int:
        """How many bytes of files the cache may hold."""

    @property
    def reads_ranges(self) -> bool:
        """Whether parts of files may be read by range."""

    def pin(self, path: str) -> bool:
        """Keep a file from being evicted, so that it can be mapped; False if it is not here."""

    def fetch(self, paths: Sequence[str]) -> None:
        """Download files now, and pin them."""

    def prefetch(self, paths: Sequence[str]) -> None:
        """Download files in the background, in this order, if the store is loaded in whole shards."""

    def prefetch_ranges(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Announce the byte ranges that will be read, in this order."""

    def read_into(self, path: str, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes of a file from `offset` on, from the cache or by range."""


class ShardTable:
    """The shards of one split, by number; `stems` are their paths without `.bin` and `.idx`.

    `starts` maps shards without an `.idx` to the first byte of each of their documents, counted from the first token.
    `suffix`, `offsets` and `sizes` describe files of foreign formats: the end of their names, the bytes before the
    first token, and the bytes of the whole file. `caches` has the cache of each remote shard, and None for local ones.
    """

    def __init__(
        self,
        stems: Sequence[str],
        num_documents: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        dtype: np.dtype[Any],
        starts: Mapping[int, Integers] | None = None,
        *,
        suffix: str = ".bin",
        offsets: npt.ArrayLike | None = None,
        sizes: npt.ArrayLike | None = None,
        caches: Sequence[ShardCache | None] | None = None,
    ) -> None:
        self.dtype = dtype
        self._caches: list[ShardCache | None] = [None] * len(stems) if caches is None else list(caches)
        self.room_bytes = min((cache.room_bytes for cache in set(self._caches) if cache is not None), default=None)
        """How many bytes the smallest cache of remote files may hold; None if all files are local."""
        self._index_dtype = dtype
        self._suffixes = [suffix] * len(stems)
        self._offsets = np.zeros(len(stems), np.int64) if offsets is None else np.array(offsets, np.int64)
        self.stems = list(stems)
        self.num_documents = np.array(num_documents, np.int64)
        self.num_tokens = np.array(num_tokens, np.int64)
        ends = self._offsets + self.num_tokens * dtype.itemsize
        self._sizes = ends if sizes is None else np.array(sizes, np.int64)
        self.files = OpenedFiles([{}] * len(stems))
        """Which files the paths named when the store was opened."""
        self._starts = {shard: np.ascontiguousarray(some, "<i8") for shard, some in (starts or {}).items()}
        self._forget_mappings()

    def _forget_mappings(self) -> None:
        self._token_addresses = np.zeros(len(self.stems), np.int64)
        self._pointer_addresses = np.zeros(len(self.stems), np.int64)
        self._kept: list[Any] = []
        self._all_mapped = True
        self._lock = threading.Lock()
        for shard, pointers in self._starts.items():
            self._pointer_addresses[shard] = pointers.ctypes.data

    @classmethod
    def join(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """Concatenate the shards of several tables."""
        firsts = np.cumsum([0, *(len(table.stems) for table in tables)]).tolist()
        joined = cls(
            [stem for table in tables for stem in table.stems],
            np.concatenate([table.num_documents for table in tables]),
            np.concatenate([table.num_tokens for table in tables]),
            tables[0].dtype,
            {
                first + shard: starts
                for first, table in zip(firsts, tables, strict=False)
                for shard, starts in table._starts.items()
            },
            offsets=np.concatenate([table._offsets for table in tables]),
            sizes=np.concatenate([table._sizes for table in tables]),
            caches=[cache for table in tables for cache in table._caches],
        )
        joined.files = OpenedFiles.join([table.files for table in tables])
        joined._suffixes = [suffix for table in tables for suffix in table._suffixes]
        joined._index_dtype = tables[0]._index_dtype
        return joined

    def beside(self, suffix: str, dtype: npt.DTypeLike) -> ShardTable:
        """The table of companion files that have another value for each token, such as a loss mask."""
        counts = self.num_documents, self.num_tokens
        table = ShardTable(self.stems, *counts, np.dtype(dtype), self._starts, suffix=suffix, caches=self._caches)
        table.files = self.files
        table._index_dtype = self._index_dtype
        return table

    def __getstate__(self) -> dict[str, Any]:
        # A forked process makes mappings of its own.
        own = {"_token_addresses", "_pointer_addresses", "_kept", "_lock"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_mappings()

    def token_addresses(self, shards: Integers, positions: Integers) -> Integers:
        """The memory addresses of tokens, by shard and position in it; 0 where the shard is not mapped."""
        bases = self._token_addresses[shards]
        if (bases == UNKNOWN).any():
            self._map_tokens(shards[bases == UNKNOWN])
            bases = self._token_addresses[shards]
        addresses = bases + positions * self.dtype.itemsize
        nowhere = bases <= UNKNOWN
        if nowhere.any():
            addresses[nowhere] = 0
        return addresses

    def prefetch_tokens(self, shards: Integers, starts: Integers, stops: Integers) -> None:
        """Announce the tokens that will be read, in this order, so that those of remote shards are prefetched."""
        remote = np.flatnonzero(self._token_addresses[shards] == UNKNOWN)
        if not len(remote):
            return
        first = self._offsets[shards[remote]]
        begins = (first + starts[remote] * self.dtype.itemsize).tolist()
        ends = (first + stops[remote] * self.dtype.itemsize).tolist()
        ranges: dict[ShardCache, list[tuple[str, int, int]]] = {}
        for shard, begin, end in zip(shards[remote].tolist(), begins, ends, strict=True):
            cache = self._caches[shard]
            if cache is not None:
                ranges.setdefault(cache, []).append((self._token_path(shard), begin, end))
        for cache, some in ranges.items():
            cache.prefetch_ranges(*zip(*some, strict=True))

    def prefetch(self, shards: Sequence[int]) -> None:
        """Prefetch whole shards, in this order."""
        for shard in shards:
            cache = self._caches[shard]
            if cache is not None and self._token_addresses[shard] == UNKNOWN:
                cache.prefetch([self._token_path(shard)])

    def local_path(self, shard: int, suffix: str) -> str:
        """The path of a file of a shard, which is downloaded if it is remote; the file need not exist."""
        path = self.stems[shard] + suffix
        if (cache := self._caches[shard]) is not None:
            cache.fetch([path])
        return path

    @property
    def reads_ranges(self) -> bool:
        """Whether parts of remote shards are read, which no checksum covers."""
        return any(cache.reads_ranges for cache in set(self._caches) if cache is not None)

    def _token_path(self, shard: int) -> str:
        return self.stems[shard] + self._suffixes[shard]

    def note_files(self) -> None:
        """Record the identity of all files of tokens; a file without a name cannot be replaced."""
        for shard in range(len(self.stems)):
            status = os.stat(self._token_path(shard))  # noqa: PTH116
            if status.st_nlink:
                self.files.note(shard, self._suffixes[shard], status)

    def _confirm(self, shard: int, suffix: str) -> Callable[[int], None]:
        """Return the check that an open file is the one that was there when the store was opened."""
        return partial(self.files.confirm, shard, suffix, self.stems[shard] + suffix)

    def document_bounds(self, shards: Integers, documents: Integers) -> tuple[Integers, Integers]:
        """The positions in its shard of each document's first token and of the one past its last."""
        bases, sizes = self._index_addresses(shards), self.num_tokens[shards]
        last = self.num_documents[shards] - 1
        starts = self._pointers(shards, bases, documents) // self._index_dtype.itemsize
        stops = self._pointers(shards, bases, np.minimum(documents + 1, last)) // self._index_dtype.itemsize
        stops = np.where(documents == last, sizes, stops)
        wrong = (starts < 0) | (stops < starts) | (stops > sizes)
        if wrong.any():
            raise self.damage(int(shards[np.argmax(wrong)]))
        return starts, stops

    def all_starts(self, shard: int, first: int, count: int) -> Integers:
        """The starts of `count` consecutive documents and the end of the last one, without an index array."""
        base = int(self._index_addresses(np.array([shard]))[0])
        if base == UNMAPPED:
            starts, stops = self.document_bounds(np.full(count, shard), np.arange(first, first + count))
            return np.append(starts, stops[-1])
        place = (base + 8 * first) // _POINTER_STEP - 1
        pointers = everywhere("<i8", _POINTER_STEP)[place : place + 4 * count : 4]
        _, end = self.document_bounds(np.array([shard]), np.array([first + count - 1]))
        return np.append(pointers // self._index_dtype.itemsize, end)

    def find_documents(self, shards: Integers, positions: Integers) -> Integers:
        """The document that contains each token, by a binary search for all tokens at once."""
        bases = self._index_addresses(shards)
        offsets = positions * self._index_dtype.itemsize
        found = np.zeros(len(shards), np.int64)
        sizes = self.num_documents[shards]
        # Invariant: the document is one of the `sizes` documents from `found` on.
        for _ in range(int(sizes.max(initial=1) - 1).bit_length()):
            half = sizes >> 1
            found += half * (self._pointers(shards, bases, found + half) <= offsets)
            sizes = sizes - half
        return found

    def read(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens of one shard: a view of the mapped file if possible, else a copy."""
        if self._caches[shard] is not None and self._token_addresses[shard] == UNKNOWN:
            return self._read_at(shard, start, stop)
        address = int(self.token_addresses(np.array([shard]), np.array([start]))[0]) if stop > start else 0
        if address:
            if (stop - start) * self.dtype.itemsize > LONG_READ:
                will_need(address, (stop - start) * self.dtype.itemsize)
            first = address // self.dtype.itemsize - 1
            return everywhere(self.dtype.str, self.dtype.itemsize)[first : first + stop - start]
        return self._read_at(shard, start, stop)

    def release(self, shard: int) -> None:
        """Return the pages of a shard that was read to the kernel; its tokens stay readable."""
        address = int(self._token_addresses[shard])
        if address > UNKNOWN:
            let_go(address, int(self.num_tokens[shard]) * self.dtype.itemsize)

    def _read_at(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        tokens = np.empty(stop - start, self.dtype)
        if len(tokens):
            offset = int(self._offsets[shard]) + start * self.dtype.itemsize
            path, buffer, cache = self._token_path(shard), tokens.view(np.uint8).data, self._caches[shard]
            if cache is None:
                read_into(path, buffer, offset, self._confirm(shard, self._suffixes[shard]))
            else:
                cache.read_into(path, buffer, offset)
        return tokens

    def _map_tokens(self, shards: Integers) -> None:
        with self._lock:
            for shard in sorted(set(shards.tolist())):
                offset, cache = int(self._offsets[shard]), self._caches[shard]
                if not self.num_tokens[shard] or offset % self.dtype.itemsize:
                    self._token_addresses[shard] = UNMAPPED  # an array over memory needs aligned tokens
                elif self._token_addresses[shard] == UNKNOWN and (cache is None or cache.pin(self._token_path(shard))):
                    address = self._map(shard, self._suffixes[shard], int(self._sizes[shard]), is_random=True)
                    self._token_addresses[shard] = address if address == UNMAPPED else address + offset

    def _map(self, shard: int, suffix: str, size: int, *, is_random: bool = False) -> int:
        if size == 0 or MappedFile.num_live >= mapping.MAX_MAPPINGS:
            self._all_mapped = False
            return UNMAPPED
        path = self.stems[shard] + suffix
        try:
            mapped = MappedFile(path, size, self._confirm(shard, suffix), is_random=is_random)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        self._kept.append(mapped)
        return mapped.address

    def _index_addresses(self, shards: Integers) -> Integers:
        """The memory address of each shard's first pointer; -1 where the index is not mapped."""
        bases = self._pointer_addresses[shards]
        unknown = bases == UNKNOWN
        if unknown.any():
            with self._lock:
                missing = sorted(set(shards[unknown].tolist()))
                self._fetch_indexes(missing)
                for shard in missing:
                    self._pointer_addresses[shard] = self._map_index(shard)
            bases = self._pointer_addresses[shards]
        return bases

    def _fetch_indexes(self, shards: Sequence[int]) -> None:
        """Download the indexes of remote shards, many at once: an index is small, and needed whole."""
        for cache in {cache for shard in shards if (cache := self._caches[shard]) is not None}:
            cache.fetch([f"{self.stems[shard]}.idx" for shard in shards if self._caches[shard] is cache])

    def _map_index(self, shard: int) -> int:
        count = int(self.num_documents[shard])
        path = f"{self.stems[shard]}.idx"
        address = self._map(shard, ".idx", INDEX_HEADER_BYTES + 20 * count + 8)
        header = bytearray(INDEX_HEADER_BYTES)
        read_into(path, memoryview(header), 0, self._confirm(shard, ".idx"))
        if HEADER.unpack(header) != (MAGIC, 1, dtype_code(self._index_dtype), count, count + 1):
            raise StoreError(f"{path} is not the index of a {self._index_dtype} shard of {count} documents")
        base = address if address == UNMAPPED else address + INDEX_HEADER_BYTES + 4 * count
        if count:
            (first,) = self._pointers(np.array([shard]), np.array([base]), np.zeros(1, np.int64)).tolist()
            if first:
                raise StoreError(f"{path} is damaged: its first document starts at byte {first}; run tokenmill verify")
        return base

    def _pointers(self, shards: Integers, bases: Integers, documents: Integers) -> Integers:
        places = (bases + 8 * documents) // _POINTER_STEP - 1
        if self._all_mapped:
            mapped: Integers = everywhere("<i8", _POINTER_STEP)[places]
            return mapped
        unmapped = bases == UNMAPPED
        values = np.empty(len(places), np.int64)
        values[~unmapped] = everywhere("<i8", _POINTER_STEP)[places[~unmapped]]
        buffer = np.empty(1, "<i8")
        for at in np.flatnonzero(unmapped).tolist():
            shard = int(shards[at])
            offset = INDEX_HEADER_BYTES + 4 * int(self.num_documents[shard]) + 8 * int(documents[at])
            read_into(f"{self.stems[shard]}.idx", buffer.data.cast("B"), offset, self._confirm(shard, ".idx"))
            values[at] = buffer[0]
        return values

    def damage(self, shard: int) -> StoreError:
        """The error for a shard whose index contradicts itself."""
        return StoreError(
            f"{self.stems[shard]}.idx is damaged: a document starts outside the shard; run tokenmill verify"
        )


def read_into(path: str, buffer: memoryview, offset: int, confirm: Callable[[int], None] = lambda _: None) -> None:
    """Fill a buffer with the bytes of a local file from `offset` on; `confirm` may refuse the open file."""
    try:
        descriptor, _ = regular_descriptor(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    try:
        confirm(descriptor)
        while len(buffer):
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise StoreError(f"{path} ends too early; {RESTORE}")
            buffer, offset = buffer[count:], offset + count
    finally:
        os.close(descriptor)
