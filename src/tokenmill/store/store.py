"""A finished store, opened for reading: documents by number, tokens by range, memory-mapped.

Opening reads the manifest and compares file sizes; nothing is mapped before it is used, so a
store of any size opens at once. `tokenmill verify` reads every byte.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.batch import IntArray
from tokenmill.engines.decoding import Decoder
from tokenmill.engines.tokenizer import Tokenizer, open_tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, SplitInfo, read_manifest
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES
from tokenmill.store.table import ShardTable

__all__ = ["Split", "TokenSource", "TokenStore"]


class TokenSource:
    """Documents of ids by split, wherever they come from. Numbers and reads are of the first split, `train`."""

    path: Path
    splits: dict[str, Any]
    vocab_size: int | None
    """One more than the largest id, where that is known."""

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
        if name not in self.splits:
            raise UsageError(f"{self.path} has no split {name!r}; it has {', '.join(self.splits)}")
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

    def decode(self, ids: IntArray) -> str:
        """The text of ids, special tokens included."""
        return self._decoder.decode(ids.tolist())

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}: {s.num_documents:,} documents, {s.num_tokens:,} tokens" for name, s in self.splits.items()
        )
        return f"{type(self).__name__}({str(self.path)!r}, {parts})"


class TokenStore(TokenSource):
    """A directory of shards with a manifest."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        if self.manifest.dtype not in DTYPES:
            known = " or ".join(DTYPES)
            raise StoreError(f"{self.path / MANIFEST} has ids of type {self.manifest.dtype!r}; expected {known}")
        self.vocab_size: int = self.manifest.tokenizer.vocab_size
        self.splits: dict[str, Split] = {name: Split(self, name, info) for name, info in self.manifest.splits.items()}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the store's own copy."""
        return open_tokenizer(self.path / "tokenizer", self.manifest.tokenizer.name)


class Split(Documents):
    """The documents of one split, numbered through all its shards in input order."""

    def __init__(self, store: TokenStore, name: str, info: SplitInfo) -> None:
        self._store = store
        dtype = DTYPES[store.manifest.dtype][1]
        stems = [_stem(store.path, shard) for shard in info.shards]
        for stem, shard in zip(stems, info.shards, strict=True):
            _check_sizes(stem, shard, dtype.itemsize)
        table = ShardTable(
            stems,
            [shard.num_documents for shard in info.shards],
            [shard.num_tokens for shard in info.shards],
            dtype,
        )
        fingerprint = xxhash.xxh3_64_hexdigest(f"{store.manifest.checksum} {name}".encode())
        suffixes = {suffix for shard in info.shards for suffix in shard.files}
        beside = {suffix: table.beside(suffix, dtype) for suffix, dtype in BESIDE.items() if suffix in suffixes}
        super().__init__(table, f"{store.path.name}/{name}", fingerprint, beside=beside)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_split, (self._store.path, self.name.rpartition("/")[2])


def _open_split(path: Path, name: str) -> Split:
    return TokenStore(path).splits[name]


def _stem(store: Path, shard: ShardInfo) -> str:
    """The path of a shard without its endings, which must lie in the store."""
    if not shard.name or shard.name.startswith("/") or ".." in shard.name.split("/"):
        raise StoreError(f"{store / 'manifest.json'} names a shard outside the store: {shard.name!r}")
    return f"{store}/{shard.name}"


def _check_sizes(stem: str, shard: ShardInfo, itemsize: int) -> None:
    """Look at the files that loading needs; the others are looked at when they are read, and by `verify`."""
    for suffix in (".bin", ".idx"):
        file = shard.files.get(suffix)
        if file is None:
            raise StoreError(f"the manifest lists no {suffix} file for shard {shard.name}; tokenize again")
        try:
            size = os.stat(stem + suffix).st_size  # noqa: PTH116 (a Path for each of 60,000 files takes a second)
        except OSError:
            raise StoreError(f"{stem}{suffix} is missing; restore it, or tokenize again with --overwrite") from None
        if size != file.bytes:
            raise StoreError(
                f"{stem}{suffix} has {size} bytes and the manifest says {file.bytes}; restore it, or tokenize again "
                "with --overwrite"
            )
    if shard.files[".bin"].bytes != shard.num_tokens * itemsize:
        raise StoreError(
            f"{stem}.bin has {shard.files['.bin'].bytes} bytes and the manifest says {shard.num_tokens} tokens"
        )
    if shard.files[".idx"].bytes != INDEX_HEADER_BYTES + 20 * shard.num_documents + 8:
        raise StoreError(f"{stem}.idx is not the index of {shard.num_documents} documents, as the manifest says")
