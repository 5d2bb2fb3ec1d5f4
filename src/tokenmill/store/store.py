"""A finished store, opened for reading: documents by number, tokens by range, memory-mapped.

Opening reads the manifest and compares file sizes, and maps files only when they are used, so a
large store opens quickly. `tokenmill verify` reads every byte.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.arguments import path_of, show, whole_number
from tokenmill.engines.decoder import Decoder
from tokenmill.engines.tokenizer import Tokenizer, open_tokenizer
from tokenmill.errors import DataError, StoreError, UsageError
from tokenmill.formatting import plural
from tokenmill.regular_files import UnfitFile, check_regular
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST, RESTORE, Manifest, ShardInfo, SplitInfo, read_manifest
from tokenmill.store.opened_files import OpenedFiles
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES, dtype_for
from tokenmill.store.table import ShardCache, ShardTable
from tokenmill.text_batch import IntArray

__all__ = [
    "LOADED",
    "Split",
    "TokenSource",
    "TokenStore",
    "check_inside",
    "check_manifest",
    "check_vocabulary",
    "open_shards",
]

TOKENIZER = "tokenizer"
_NEEDED = {".bin", ".idx"}
LOADED = (".bin", ".idx", *BESIDE)
"""The files of a shard that loading needs."""


class TokenSource:
    """Documents of ids by split, of any format. Counts and reads are those of the first split, `train`."""

    path: Path
    splits: dict[str, Any]
    vocab_size: int | None
    """One more than the largest id; None if unknown."""

    @property
    def place(self) -> str:
        """The path or URL, as a user names it."""
        return str(self.path)

    def make_local(self) -> None:
        """Download all files of a remote source, so that they can be read by their paths."""

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
            f"{name}: {plural(s.num_documents, 'document')}, {plural(s.num_tokens, 'token')}"
            for name, s in self.splits.items()
        )
        return f"{type(self).__name__}({self.place!r}, {parts})"


class TokenStore(TokenSource):
    """A directory of shards with a manifest."""

    shard_cache: ShardCache | None = None
    """The cache that holds the files of a remote store."""

    def __init__(self, path: str | Path, checksum: str | None = None) -> None:
        """Open a store; a copy of it in another process must find the manifest with the same `checksum`."""
        self.path = Path(path_of(path, "the path of a store"))
        self.manifest: Manifest = read_manifest(self.path)
        if checksum is not None and self.manifest.checksum != checksum:
            raise StoreError(f"{self.path} was replaced by another store while it was in use; open it again")
        check_manifest(self.path, self.manifest)
        self.vocab_size: int = self.manifest.tokenizer.vocab_size
        self.splits: dict[str, Split] = {name: Split(self, name, info) for name, info in self.manifest.splits.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path, self.manifest.checksum)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the store's own copy."""
        self._fetch_tokenizer()
        folder = self.path / TOKENIZER
        try:
            for path in sorted(folder.iterdir()):
                check_inside(self.path, path)
            return open_tokenizer(folder, self.manifest.tokenizer.name)
        except DataError as error:
            raise StoreError(f"{folder} is damaged ({error}); {RESTORE}") from None
        except (UsageError, OSError):
            raise StoreError(f"{folder} is missing or has no tokenizer in it; {RESTORE}") from None

    def _fetch_tokenizer(self) -> None:
        """Download the files of the tokenizer, if the store is remote."""


class Split(Documents):
    """The documents of one split, numbered across its shards in input order."""

    def __init__(self, store: TokenStore, name: str, info: SplitInfo) -> None:
        self._store = store
        table, beside = _map_shards(store.path, info.shards, store.manifest.dtype, store.shard_cache)
        fingerprint = xxhash.xxh3_64_hexdigest(f"{store.manifest.checksum} {name}".encode())
        super().__init__(
            table,
            f"{store.path.name}/{name}",
            fingerprint,
            beside=beside,
            vocab_size=store.vocab_size,
            holds=store.manifest.holds if isinstance(store.manifest.holds, str) else None,
        )
        self.tokenizer = (store.manifest.tokenizer.name, store.manifest.tokenizer.sha256)
        if (self.num_documents, self.num_tokens) != (info.num_documents, info.num_tokens):
            raise StoreError(
                f"{store.path / MANIFEST} says that {name} has {info.num_documents} documents of {info.num_tokens} "
                f"tokens, and its shards have {self.num_documents} of {self.num_tokens}; {RESTORE}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenSource.split, (self._store, self.name.rpartition("/")[2])


def check_vocabulary(name: str | Path, vocab_size: int | None, room: int | None) -> None:
    """Refuse a vocabulary that is larger than that of the model, if both are known."""
    if room is not None and vocab_size is not None and vocab_size > whole_number(room, "vocab_size", 1):
        raise UsageError(
            f"{name} has a vocabulary of {vocab_size} tokens and the model has room for {room}; "
            "make the model's embedding larger, or use the tokenizer it was made for"
        )


def check_manifest(store: Path, manifest: Manifest) -> None:
    """Refuse a manifest that tokenmill cannot have written, before any file is opened."""
    path = store / MANIFEST
    if manifest.dtype not in DTYPES:
        raise StoreError(f"{path} has ids of type {manifest.dtype!r}; expected {' or '.join(DTYPES)}")
    if manifest.tokenizer.vocab_size < 1:
        raise StoreError(f"{path} has a vocabulary of {manifest.tokenizer.vocab_size} tokens; {RESTORE}")
    if not manifest.splits:
        raise StoreError(f"{path} has no splits; {RESTORE}")
    names = [shard.name for split in manifest.splits.values() for shard in split.shards]
    for inside in sorted({name.rpartition("/")[0] for name in names} | {MANIFEST, TOKENIZER}):
        check_inside(store, store / inside)
    if len(set(names)) < len(names):
        duplicate = Counter(names).most_common(1)[0][0]
        raise StoreError(f"{path} lists the shard {duplicate!r} twice; {RESTORE}")


def check_inside(store: Path, path: str | Path) -> None:
    """Refuse a link from a store to a file or folder elsewhere: a store contains all of its files."""
    root, real = os.path.realpath(store), os.path.realpath(path)
    if real != root and not real.startswith(f"{root}/"):
        raise StoreError(f"{path} is a link that leads out of the store; copy what it leads to into the store")


def open_shards(store: Path, shards: Sequence[ShardInfo], vocab_size: int, name: str) -> Documents:
    """Open some shards of a store, which may be unfinished."""
    table, beside = _map_shards(store, shards, dtype_for(vocab_size))
    hashes = " ".join(shard.files[".bin"].xxh3 for shard in shards)
    fingerprint = xxhash.xxh3_64_hexdigest(f"{name} {hashes}".encode())
    return Documents(table, name, fingerprint, beside=beside, vocab_size=vocab_size)


def _map_shards(
    store: Path, shards: Sequence[ShardInfo], dtype: str, cache: ShardCache | None = None
) -> tuple[ShardTable, dict[str, ShardTable]]:
    """Check the sizes of shards, and make the tables of their tokens and of the companion files."""
    kind = DTYPES[dtype][1]
    stems = [f"{store}/{shard.name}" for shard in shards]
    files = OpenedFiles([shard.files for shard in shards])
    for number, (stem, shard) in enumerate(zip(stems, shards, strict=True)):
        _check_counts(stem, shard, kind.itemsize)
        for suffix in LOADED if cache is None else ():
            if suffix in shard.files:
                files.note(number, suffix, _check_size(store, stem + suffix, shard.files[suffix].bytes))
    counts = [shard.num_documents for shard in shards], [shard.num_tokens for shard in shards]
    caches = None if cache is None else [cache] * len(stems)
    table = ShardTable(stems, *counts, kind, caches=caches)
    table.files = files
    suffixes = {suffix for shard in shards for suffix in shard.files}
    return table, {suffix: table.beside(suffix, kind) for suffix, kind in BESIDE.items() if suffix in suffixes}


def _check_counts(stem: str, shard: ShardInfo, itemsize: int) -> None:
    """Refuse a shard whose counts and sizes contradict each other."""
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


def _check_size(store: Path, path: str, expected: int) -> os.stat_result:
    """Refuse a file that has another size than the manifest says, that is not a regular one or is outside the store."""
    try:
        if os.path.islink(path):  # noqa: PTH114 (a Path for each of 60,000 files takes a second)
            check_inside(store, path)
        found = check_regular(path)
    except UnfitFile as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; {RESTORE}") from None
    except (OSError, ValueError):
        raise StoreError(f"{path} is missing; {RESTORE}") from None
    if found.st_size != expected:
        raise StoreError(f"{path} has {found.st_size} bytes and the manifest says {expected}; {RESTORE}")
    return found


def _as_ids(ids: npt.ArrayLike, vocab_size: int) -> list[int]:
    """Check that ids are a list of whole numbers in the vocabulary."""
    try:
        array = np.asarray(ids)
    except (RuntimeError, TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{show(ids)} is not a list of ids; decode takes the ids of one text")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        hint = "; leave out targets that have no loss" if wrong[0] == -100 else ""
        raise UsageError(f"id {wrong[0]} is not in the vocabulary of {vocab_size} tokens{hint}")
    found: list[int] = array.tolist()
    return found
