"""A finished store, opened for reading: documents by number, tokens by range, memory-mapped.

Opening reads the manifest and compares file sizes; nothing is mapped before it is used, so a
store of any size opens at once. `tokenmill verify` reads every byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.batch import IntArray
from tokenmill.engines.decoding import Decoder
from tokenmill.engines.tokenizer import Tokenizer, open_tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.store.manifest import Manifest, ShardInfo, read_manifest
from tokenmill.store.shard import DTYPES, index_lengths, index_pointers

__all__ = ["Shard", "Split", "TokenStore"]


class TokenStore:
    """A directory of shards. Numbers and reads are of the `train` split; others are in `splits`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self.splits = {name: Split(self, name) for name in self.manifest.splits}

    @property
    def num_documents(self) -> int:
        """Documents of the train split."""
        return self.splits["train"].num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of the train split."""
        return self.splits["train"].num_tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the stored ids."""
        return DTYPES[self.manifest.dtype][1]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer can give."""
        return self.manifest.tokenizer.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the store's own copy."""
        return open_tokenizer(self.path / "tokenizer", self.manifest.tokenizer.name)

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self.tokenizer)

    def document(self, number: int) -> IntArray:
        """The ids of one document of the train split."""
        return self.splits["train"].document(number)

    def decode(self, ids: IntArray) -> str:
        """The text of ids, special tokens included."""
        return self._decoder.decode(ids.tolist())

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}: {s.num_documents:,} documents, {s.num_tokens:,} tokens" for name, s in self.splits.items()
        )
        return f"TokenStore({str(self.path)!r}, {self.manifest.tokenizer.name}, {parts})"


class Split:
    """The documents of one split, numbered through all its shards in input order."""

    def __init__(self, store: TokenStore, name: str) -> None:
        info = store.manifest.splits[name]
        self.name = name
        self.num_documents = info.num_documents
        self.num_tokens = info.num_tokens
        self.shards = [Shard(store, shard) for shard in info.shards]
        self._ends = list(accumulate(shard.num_documents for shard in info.shards))

    def locate(self, number: int) -> tuple[Shard, int]:
        """The shard that has a document, and the document's number in it."""
        if not 0 <= number < self.num_documents:
            raise UsageError(
                f"document {number} is not in {self.name}, which has documents 0 to {self.num_documents - 1}"
            )
        index = bisect_right(self._ends, number)
        return self.shards[index], number - (self._ends[index - 1] if index else 0)

    def document(self, number: int) -> IntArray:
        """The ids of one document."""
        shard, inner = self.locate(number)
        return shard.document(inner)

    def lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        """Tokens per document, shard after shard."""
        return (shard.lengths for shard in self.shards)


class Shard:
    """One shard, mapped when it is first read."""

    def __init__(self, store: TokenStore, info: ShardInfo) -> None:
        self.info = info
        self._path = _inside(store.path, info.name)
        self._manifest_dtype = store.manifest.dtype
        self._dtype = store.dtype
        for suffix, file in info.files.items():
            self._check_size(Path(f"{self._path}{suffix}"), file.bytes)

    @cached_property
    def tokens(self) -> IntArray:
        """All ids of the shard, end to end."""
        path = Path(f"{self._path}.bin")
        if self.info.num_tokens == 0:
            return np.empty(0, self._dtype)
        return np.memmap(path, self._dtype, mode="r", shape=(self.info.num_tokens,))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per document."""
        return index_lengths(Path(f"{self._path}.idx"), self.info, self._manifest_dtype)

    @cached_property
    def pointers(self) -> npt.NDArray[np.int64]:
        """The byte of `.bin` at which each document starts."""
        return index_pointers(Path(f"{self._path}.idx"), self.info)

    def document(self, number: int) -> IntArray:
        """The ids of one document, by its number in the shard."""
        start = int(self.pointers[number]) // self._dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]

    def sources(self) -> Any:
        """The table of documents: input number, position, and kept fields, as a pyarrow table."""
        import pyarrow.parquet as pq

        return pq.read_table(f"{self._path}.docs.parquet")

    def _check_size(self, path: Path, expected: int) -> None:
        try:
            size = path.stat().st_size
        except OSError:
            raise StoreError(f"{path} is missing; restore it, or tokenize again with --overwrite") from None
        if size != expected:
            raise StoreError(
                f"{path} has {size} bytes and the manifest says {expected}; restore it, or tokenize again with "
                "--overwrite"
            )


def _inside(store: Path, name: str) -> Path:
    """The path of a shard, which must lie in the store."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise StoreError(f"{store / 'manifest.json'} names a shard outside the store: {name!r}")
    return store / parts
