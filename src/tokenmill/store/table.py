"""Many shards as a few arrays: where their tokens are in memory, and where their documents start.

Shards are mapped when they are first read and stay mapped. Under a global shuffle every row is
in another shard, so a cache of some mappings would miss all the time (28 us a row, where reading
at a position takes 5); shards past the cap on mappings are read at positions instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.store import mapping
from tokenmill.store.mapping import MappedFile, everywhere, let_go, will_need
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC, dtype_code

__all__ = ["Keeper", "ShardTable"]

Integers = npt.NDArray[np.int64]

UNKNOWN, UNMAPPED = 0, -1
LONG_READ = 1 << 16
_POINTER_STEP = 2
"""Pointers lie behind a header of 34 bytes and 4 bytes a document, so at even addresses."""


class Keeper(Protocol):
    """Whoever has the files of shards that may not be on this machine; knows them by the paths that they would have."""

    @property
    def room_bytes(self) -> int:
        """How many bytes of files there may be here."""

    def hold(self, path: str) -> bool:
        """Whether a file is here, to be mapped; one that is stays."""

    def bring(self, paths: Sequence[str]) -> None:
        """Have files here when this returns, to stay."""

    def want(self, paths: Sequence[str]) -> None:
        """Fetch files in the background, in this order, if they are to be fetched whole."""

    def expect(self, paths: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Be told which bytes will be read, in this order."""

    def read_into(self, path: str, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes of a file from `offset` on, wherever it is."""


class ShardTable:
    """The shards of one split, by number; `stems` are their paths without `.bin` and `.idx`.

    `starts` has the first byte of each document, counted from the first token, for shards that have no index
    of their own, by number. `suffix`, `offsets` and `sizes` are for files of other makers: how the files of
    tokens end, how many bytes come before the first token of each, and how many bytes each has in all. `keepers`
    has whoever fetches the files of each shard; None for files of this machine.
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
        keepers: Sequence[Keeper | None] | None = None,
    ) -> None:
        self.dtype = dtype
        self._keepers = keepers
        self._index_dtype = dtype
        self._suffixes = [suffix] * len(stems)
        self._offsets = np.zeros(len(stems), np.int64) if offsets is None else np.array(offsets, np.int64)
        self.stems = list(stems)
        self.num_documents = np.array(num_documents, np.int64)
        self.num_tokens = np.array(num_tokens, np.int64)
        ends = self._offsets + self.num_tokens * dtype.itemsize
        self._sizes = ends if sizes is None else np.array(sizes, np.int64)
        self._token_addresses = np.zeros(len(stems), np.int64)
        self._pointer_addresses = np.zeros(len(stems), np.int64)
        self._kept: list[Any] = []
        self._all_mapped = True
        self._lock = threading.Lock()
        self._starts = {shard: np.ascontiguousarray(some, "<i8") for shard, some in (starts or {}).items()}
        for shard, pointers in self._starts.items():
            self._pointer_addresses[shard] = pointers.ctypes.data

    @classmethod
    def join(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """The shards of several tables in one, in order."""
        firsts = np.cumsum([0, *(len(table.stems) for table in tables)]).tolist()
        joined = cls(
            [stem for table in tables for stem in table.stems],
            np.concatenate([table.num_documents for table in tables]),
            np.concatenate([table.num_tokens for table in tables]),
            tables[0].dtype,
            {
                first + n: some
                for first, table in zip(firsts, tables, strict=False)
                for n, some in table._starts.items()
            },
            offsets=np.concatenate([table._offsets for table in tables]),
            sizes=np.concatenate([table._sizes for table in tables]),
            keepers=_join_keepers(tables),
        )
        joined._suffixes = [suffix for table in tables for suffix in table._suffixes]
        joined._index_dtype = tables[0]._index_dtype
        return joined

    def beside(self, suffix: str, dtype: npt.DTypeLike) -> ShardTable:
        """Files beside the tokens that have another value for each of them, such as a loss mask."""
        table = ShardTable(
            self.stems,
            self.num_documents,
            self.num_tokens,
            np.dtype(dtype),
            self._starts,
            suffix=suffix,
            keepers=self._keepers,
        )
        table._index_dtype = self._index_dtype
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        # Mappings belong to a process; a copy in another one makes its own.
        state = {name: value for name, value in vars(self).items() if name in _KEPT_IN_COPIES}
        return _restore, (self.stems, self.num_documents, self.num_tokens, self.dtype, self._starts, state)

    def token_addresses(self, shards: Integers, positions: Integers) -> Integers:
        """The address of a token, by its shard and its position there; 0 where the shard is not mapped."""
        bases = self._token_addresses[shards]
        if (bases == UNKNOWN).any():
            self._map_tokens(shards[bases == UNKNOWN])
            bases = self._token_addresses[shards]
        addresses = bases + positions * self.dtype.itemsize
        nowhere = bases <= UNKNOWN
        if nowhere.any():
            addresses[nowhere] = 0
        return addresses

    def expect(self, shards: Integers, starts: Integers, stops: Integers) -> None:
        """Say which tokens will be read, in this order, so that those which are not here can be fetched meanwhile."""
        if self._keepers is None:
            return
        elsewhere = np.flatnonzero(self._token_addresses[shards] == UNKNOWN)
        if not len(elsewhere):
            return
        first = self._offsets[shards[elsewhere]]
        begins = (first + starts[elsewhere] * self.dtype.itemsize).tolist()
        ends = (first + stops[elsewhere] * self.dtype.itemsize).tolist()
        told: dict[Keeper, list[tuple[str, int, int]]] = {}
        for shard, begin, end in zip(shards[elsewhere].tolist(), begins, ends, strict=True):
            keeper = self._keepers[shard]
            if keeper is not None:
                told.setdefault(keeper, []).append((self.stems[shard] + self._suffixes[shard], begin, end))
        for keeper, stretches in told.items():
            keeper.expect(*zip(*stretches, strict=True))

    @property
    def room_bytes(self) -> int | None:
        """How many bytes of files from elsewhere may be on this machine; None where all are here anyway."""
        rooms = [keeper.room_bytes for keeper in set(self._keepers or ()) if keeper is not None]
        return min(rooms, default=None)

    def want(self, shards: Sequence[int]) -> None:
        """Say which shards are the next ones, in this order."""
        for shard in shards:
            keeper = self._keepers[shard] if self._keepers is not None else None
            if keeper is not None and self._token_addresses[shard] == UNKNOWN:
                keeper.want([self.stems[shard] + self._suffixes[shard]])

    def local_path(self, shard: int, suffix: str) -> str:
        """The path of a file of a shard, which is fetched if it is elsewhere; it need not exist."""
        path = self.stems[shard] + suffix
        keeper = self._keepers[shard] if self._keepers is not None else None
        if keeper is not None:
            keeper.bring([path])
        return path

    def document_starts(self, shards: Integers, documents: Integers) -> Integers:
        """The position in its shard of a document's first token; documents may be one past the last."""
        past = documents == self.num_documents[shards]
        bases = self._index_addresses(shards)
        inner = np.where(past, 0, documents)
        positions = self._pointers(shards, bases, inner) // self._index_dtype.itemsize
        positions = np.where(past, self.num_tokens[shards], positions)
        if (positions < 0).any() or (positions > self.num_tokens[shards]).any():
            raise self.damage(int(shards[np.argmax((positions < 0) | (positions > self.num_tokens[shards]))]))
        return positions

    def document_bounds(self, shards: Integers, documents: Integers) -> tuple[Integers, Integers]:
        """The positions in its shard of a document's first token and of the one past its last."""
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
        """The positions of documents that follow each other, and of the one behind the last; for many at once."""
        end = first + count
        base = int(self._index_addresses(np.array([shard]))[0])
        if base == UNMAPPED:
            return self.document_starts(np.full(count + 1, shard), np.arange(first, end + 1))
        place = (base + 8 * first) // _POINTER_STEP - 1
        pointers = everywhere("<i8", _POINTER_STEP)[place : place + 4 * count : 4]
        last = self.document_starts(np.array([shard]), np.array([end]))
        return np.concatenate([pointers // self._index_dtype.itemsize, last])

    def find_documents(self, shards: Integers, positions: Integers) -> Integers:
        """The document of its shard that holds each token; a binary search for all tokens at once."""
        bases = self._index_addresses(shards)
        offsets = positions * self._index_dtype.itemsize
        found = np.zeros(len(shards), np.int64)
        sizes = self.num_documents[shards]
        # Of `sizes` documents from `found` on, one is the last that starts at or before the token; it is the one left.
        for _ in range(int(sizes.max(initial=1) - 1).bit_length()):
            half = sizes >> 1
            found += half * (self._pointers(shards, bases, found + half) <= offsets)
            sizes = sizes - half
        return found

    def read(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens of one shard: mapped where possible, so the array costs nothing, else read."""
        if self._keepers is not None and self._token_addresses[shard] == UNKNOWN:
            return self._read_at(shard, start, stop)
        address = int(self.token_addresses(np.array([shard]), np.array([start]))[0]) if stop > start else 0
        if address:
            if (stop - start) * self.dtype.itemsize > LONG_READ:
                will_need(address, (stop - start) * self.dtype.itemsize)
            first = address // self.dtype.itemsize - 1
            return everywhere(self.dtype.str, self.dtype.itemsize)[first : first + stop - start]
        return self._read_at(shard, start, stop)

    def release(self, shard: int) -> None:
        """Take no more memory for the tokens of a shard that was read through; they stay readable."""
        address = int(self._token_addresses[shard])
        if address > UNKNOWN:
            let_go(address, int(self.num_tokens[shard]) * self.dtype.itemsize)

    def _read_at(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        tokens = np.empty(stop - start, self.dtype)
        if len(tokens):
            offset = int(self._offsets[shard]) + start * self.dtype.itemsize
            keeper = self._keepers[shard] if self._keepers is not None else None
            read_into = _read_into if keeper is None else keeper.read_into
            read_into(self.stems[shard] + self._suffixes[shard], tokens.view(np.uint8).data, offset)
        return tokens

    def _map_tokens(self, shards: Integers) -> None:
        with self._lock:
            for shard in sorted(set(shards.tolist())):
                if self._token_addresses[shard] == UNKNOWN:
                    self._token_addresses[shard] = self._map_shard(shard)

    def _map_shard(self, shard: int) -> int:
        offset = int(self._offsets[shard])
        if not self.num_tokens[shard] or offset % self.dtype.itemsize:
            return UNMAPPED  # arrays over memory begin at whole tokens
        path = self.stems[shard] + self._suffixes[shard]
        keeper = self._keepers[shard] if self._keepers is not None else None
        if keeper is not None and not keeper.hold(path):
            return UNKNOWN
        address = self._map(path, int(self._sizes[shard]), is_random=True)
        return address if address == UNMAPPED else address + offset

    def _map(self, path: str, size: int, *, is_random: bool = False) -> int:
        if size == 0 or MappedFile.num_live >= mapping.MAX_MAPPINGS:
            self._all_mapped = False
            return UNMAPPED
        try:
            mapped = MappedFile(path, size, is_random=is_random)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        self._kept.append(mapped)
        return mapped.address

    def _index_addresses(self, shards: Integers) -> Integers:
        """Where the pointers of each shard start in memory, -1 where they are not mapped."""
        bases = self._pointer_addresses[shards]
        unknown = bases == UNKNOWN
        if unknown.any():
            with self._lock:
                missing = sorted(set(shards[unknown].tolist()))
                self._bring_indexes(missing)
                for shard in missing:
                    self._pointer_addresses[shard] = self._map_index(shard)
            bases = self._pointer_addresses[shards]
        return bases

    def _bring_indexes(self, shards: Sequence[int]) -> None:
        """Fetch what is elsewhere, many at once: an index is small, and needed whole."""
        told: dict[Keeper, list[str]] = {}
        for shard in shards if self._keepers is not None else ():
            keeper = self._keepers[shard] if self._keepers is not None else None
            if keeper is not None:
                told.setdefault(keeper, []).append(f"{self.stems[shard]}.idx")
        for keeper, paths in told.items():
            keeper.bring(paths)

    def _map_index(self, shard: int) -> int:
        count = int(self.num_documents[shard])
        path = f"{self.stems[shard]}.idx"
        address = self._map(path, INDEX_HEADER_BYTES + 20 * count + 8)
        header = bytearray(INDEX_HEADER_BYTES)
        _read_into(path, memoryview(header), 0)
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
            _read_into(f"{self.stems[shard]}.idx", buffer.data.cast("B"), offset)
            values[at] = buffer[0]
        return values

    def damage(self, shard: int) -> StoreError:
        """What to say of a shard whose index makes no sense."""
        return StoreError(
            f"{self.stems[shard]}.idx is damaged: a document starts outside the shard; run tokenmill verify"
        )


_KEPT_IN_COPIES = {"_index_dtype", "_suffixes", "_offsets", "_sizes", "_keepers"}


def _join_keepers(tables: Sequence[ShardTable]) -> list[Keeper | None] | None:
    if all(table._keepers is None for table in tables):
        return None
    return [keeper for table in tables for keeper in table._keepers or [None] * len(table.stems)]


def _restore(*arguments: Any) -> ShardTable:
    *fields, state = arguments
    table = ShardTable(*fields)
    vars(table).update(state)
    return table


def _read_into(path: str, buffer: memoryview, offset: int) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    try:
        while len(buffer):
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise StoreError(f"{path} ends too early; restore it, or tokenize again with --overwrite")
            buffer, offset = buffer[count:], offset + count
    finally:
        os.close(descriptor)
