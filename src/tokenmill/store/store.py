"""A finished store, opened for reading: documents by number, tokens by range, memory-mapped.

Opening reads the manifest and compares file sizes; nothing is mapped before it is used, so a
store of any size opens at once. `tokenmill verify` reads every byte.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.arguments import path_of, show, whole_number
from tokenmill.batch import IntArray
from tokenmill.engines.decoding import Decoder
from tokenmill.engines.tokenizer import Tokenizer, open_tokenizer
from tokenmill.errors import DataError, StoreError, UsageError
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, SplitInfo, read_manifest
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES
from tokenmill.store.table import Keeper, ShardTable

__all__ = ["Split", "TokenSource", "TokenStore", "check_manifest", "check_room", "check_vocabulary", "open_shards"]

RESTORE = "restore it, or tokenize again with --overwrite"
_NOWHERE = {"", ".", ".."}
_NEEDED = {".bin", ".idx"}


class TokenSource:
    """Documents of ids by split, wherever they come from. Numbers and reads are of the first split, `train`."""

    path: Path
    splits: dict[str, Any]
    vocab_size: int | None
    """One more than the largest id, where that is known."""

    @property
    def place(self) -> str:
        """Where it is, as a user names it."""
        return str(self.path)

    def make_local(self) -> None:
        """Have all its files on this machine, for whoever reads them by their paths."""

    @property
    def num_documents(self) -> int:
        """Documents of the train split."""
        return self.split().num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of the train split."""
        return self.split().num_tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the stored ids."""
        return self.split().dtype

    def split(self, name: str | None = None) -> Documents:
        """The documents of one split."""
        name = name if name is not None else next(iter(self.splits))
        if not isinstance(name, str) or name not in self.splits:
            raise UsageError(f"{self.place} has no split {show(name)}; it has {', '.join(self.splits)}")
        documents: Documents = self.splits[name]
        return documents

    def document(self, number: int) -> IntArray:
        """The ids of one document."""
        return self.split().document(number)

    def read(self, start: int, stop: int) -> IntArray:
        """The ids from token `start` up to token `stop`, across documents."""
        return self.split().read(start, stop)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        raise UsageError(f"{self.path} has no tokenizer of its own; decode with the one that made it")

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self.tokenizer)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids, special tokens included."""
        try:
            return self._decoder.decode(_as_ids(ids, self.tokenizer.vocab_size))
        except KeyError as error:
            raise UsageError(f"id {error} is not a token of {self.tokenizer.name}") from None

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}: {s.num_documents:,} documents, {s.num_tokens:,} tokens" for name, s in self.splits.items()
        )
        return f"{type(self).__name__}({self.place!r}, {parts})"


class TokenStore(TokenSource):
    """A directory of shards with a manifest."""

    keeper: Keeper | None = None
    """Who fetches its files, where they are not on this machine."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path_of(path, "the path of a store"))
        self.manifest: Manifest = read_manifest(self.path)
        check_manifest(self.path, self.manifest)
        self.vocab_size: int = self.manifest.tokenizer.vocab_size
        self.splits: dict[str, Split] = {name: Split(self, name, info) for name, info in self.manifest.splits.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the store's own copy."""
        folder = self.path / "tokenizer"
        try:
            return open_tokenizer(folder, self.manifest.tokenizer.name)
        except DataError as error:
            raise StoreError(f"{folder} is damaged ({error}); {RESTORE}") from None
        except (UsageError, OSError):
            raise StoreError(f"{folder} is missing or has no tokenizer in it; {RESTORE}") from None


class Split(Documents):
    """The documents of one split, numbered through all its shards in input order."""

    def __init__(self, store: TokenStore, name: str, info: SplitInfo) -> None:
        self._store = store
        self.vocab_size = store.vocab_size
        table, beside = _map_shards(store.path, info.shards, store.manifest.dtype, store.keeper)
        fingerprint = xxhash.xxh3_64_hexdigest(f"{store.manifest.checksum} {name}".encode())
        super().__init__(table, f"{store.path.name}/{name}", fingerprint, beside=beside)
        if (self.num_documents, self.num_tokens) != (info.num_documents, info.num_tokens):
            raise StoreError(
                f"{store.path / MANIFEST} says that {name} has {info.num_documents} documents of {info.num_tokens} "
                f"tokens, and its shards have {self.num_documents} of {self.num_tokens}; {RESTORE}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_split, (self._store, self.name.rpartition("/")[2])


def check_vocabulary(source: TokenSource | Documents, vocab_size: int | None) -> None:
    """Refuse ids that a model has no row for, as far as the source knows its vocabulary."""
    check_room(source.name if isinstance(source, Documents) else source.path, source.vocab_size, vocab_size)


def check_room(name: str | Path, vocab_size: int | None, room: int | None) -> None:
    """Refuse a vocabulary that is larger than a model's, where both are known."""
    if room is not None and vocab_size is not None and vocab_size > whole_number(room, "vocab_size", 1):
        raise UsageError(
            f"{name} has a vocabulary of {vocab_size} tokens and the model has room for {room}; "
            "make the model's embedding larger, or use the tokenizer it was made for"
        )


def _open_split(store: TokenStore, name: str) -> Split:
    return store.splits[name]


def check_manifest(store: Path, manifest: Manifest) -> None:
    """Refuse what no run of tokenmill writes, before any file is looked at."""
    path = store / MANIFEST
    if manifest.dtype not in DTYPES:
        raise StoreError(f"{path} has ids of type {manifest.dtype!r}; expected {' or '.join(DTYPES)}")
    if manifest.tokenizer.vocab_size < 1:
        raise StoreError(f"{path} has a vocabulary of {manifest.tokenizer.vocab_size} tokens; {RESTORE}")
    if not manifest.splits:
        raise StoreError(f"{path} has no splits; {RESTORE}")
    names = [shard.name for split in manifest.splits.values() for shard in split.shards]
    _check_names(store, names)
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise StoreError(f"{path} lists the shard {twice!r} twice; {RESTORE}")


def _check_names(store: Path, names: Sequence[str]) -> None:
    """Shards must lie in the store, and so must the folders that they are in, wherever these lead."""
    for name in names:
        if "\0" in name or not _NOWHERE.isdisjoint(name.split("/")):
            raise StoreError(f"{store / MANIFEST} names a shard outside the store: {name!r}")
    for folder in {name.rpartition("/")[0] for name in names}:
        if not _is_inside(store, f"{store}/{folder}"):
            raise StoreError(f"{store / folder} leads out of the store; copy what it has into the store")


def _is_inside(store: Path, path: str) -> bool:
    root, real = os.path.realpath(store), os.path.realpath(path)
    return real == root or real.startswith(f"{root}/")


def open_shards(store: Path, shards: Sequence[ShardInfo], dtype: str, name: str) -> Documents:
    """The documents of some shards of a store that need not be finished."""
    table, beside = _map_shards(store, shards, dtype)
    hashes = " ".join(shard.files[".bin"].xxh3 for shard in shards)
    return Documents(table, name, xxhash.xxh3_64_hexdigest(f"{name} {hashes}".encode()), beside=beside)


def _map_shards(
    store: Path, shards: Sequence[ShardInfo], dtype: str, keeper: Keeper | None = None
) -> tuple[ShardTable, dict[str, ShardTable]]:
    """The tokens of shards whose sizes are right, and the files beside these."""
    kind = DTYPES[dtype][1]
    stems = [f"{store}/{shard.name}" for shard in shards]
    for stem, shard in zip(stems, shards, strict=True):
        _check_counts(stem, shard, kind.itemsize)
        if keeper is None:
            _check_sizes(store, stem, shard)
    counts = [shard.num_documents for shard in shards], [shard.num_tokens for shard in shards]
    table = ShardTable(stems, *counts, kind, keepers=None if keeper is None else [keeper] * len(stems))
    suffixes = {suffix for shard in shards for suffix in shard.files}
    return table, {suffix: table.beside(suffix, kind) for suffix, kind in BESIDE.items() if suffix in suffixes}


def _check_sizes(store: Path, stem: str, shard: ShardInfo) -> None:
    """Look at the files that loading needs; the others are looked at when they are read, and by `verify`."""
    for suffix in (".bin", ".idx"):
        size = _size_of(store, stem + suffix)
        if size != shard.files[suffix].bytes:
            said = shard.files[suffix].bytes
            raise StoreError(f"{stem}{suffix} has {size} bytes and the manifest says {said}; {RESTORE}")


def _check_counts(stem: str, shard: ShardInfo, itemsize: int) -> None:
    """Refuse a shard whose counts and sizes do not fit each other."""
    missing = _NEEDED - shard.files.keys()
    if missing:
        raise StoreError(f"the manifest lists no {min(missing)} file for shard {shard.name}; tokenize again")
    if shard.files[".bin"].bytes != shard.num_tokens * itemsize:
        raise StoreError(
            f"{stem}.bin has {shard.files['.bin'].bytes} bytes and the manifest says {shard.num_tokens} tokens"
        )
    if shard.files[".idx"].bytes != INDEX_HEADER_BYTES + 20 * shard.num_documents + 8 or shard.num_documents < 0:
        raise StoreError(f"{stem}.idx is not the index of {shard.num_documents} documents, as the manifest says")
    if shard.num_tokens and not shard.num_documents:
        raise StoreError(f"{stem}.bin has {shard.num_tokens} tokens of no document; {RESTORE}")


def _size_of(store: Path, path: str) -> int:
    """The bytes of a file; a link must not lead out of the store."""
    try:
        found = os.lstat(path)  # a Path for each of 60,000 files would take a second
        if stat.S_ISLNK(found.st_mode):
            if not _is_inside(store, path):
                raise StoreError(f"{path} is a link that leads out of the store; copy the file into the store")
            found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        raise StoreError(f"{path} is missing; {RESTORE}") from None
    return found.st_size


def _as_ids(ids: npt.ArrayLike, vocab_size: int) -> list[int]:
    """Ids as plain numbers: one after the other, and each in the vocabulary."""
    try:
        array = np.asarray(ids)
    except (RuntimeError, TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{show(ids)} is not a list of ids; decode takes those of one text")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        hint = "; leave out targets that have no loss" if wrong[0] == -100 else ""
        raise UsageError(f"id {wrong[0]} is not in the vocabulary of {vocab_size} tokens{hint}")
    found: list[int] = array.tolist()
    return found
