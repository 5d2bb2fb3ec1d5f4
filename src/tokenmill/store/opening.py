"""`tokenmill.open`: a store, several stores as one, or token files that other programs made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.store.documents import Documents
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC
from tokenmill.store.store import TokenSource, TokenStore
from tokenmill.store.table import ShardTable

__all__ = ["check_vocabulary", "open_tokens"]

MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
PLAIN_TYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
SAMPLE_BYTES = 1 << 16


def open_tokens(
    path: str | Path | Sequence[str | Path], *, vocab_size: int | None = None, dtype: str = "uint16"
) -> TokenSource:
    """Open a store for reading, or several as one, in order.

    Also a Megatron `.bin`/`.idx` pair, or a bare `.bin` as nanoGPT writes it, whose ids are of
    type `dtype` and which counts as one document. Ids that a model with `vocab_size` rows of
    embeddings has no row for are refused here, before they read past its end.
    """
    if not isinstance(path, (str, Path)):
        return _Joined([open_tokens(one, vocab_size=vocab_size, dtype=dtype) for one in path])
    path = Path(path).absolute()
    if not path.is_dir() and path.suffix in {".bin", ".idx"} and path.with_suffix(".bin").is_file():
        opened: TokenSource = _open_foreign(path.with_suffix(".bin"), dtype)
    else:
        opened = TokenStore(path)
    check_vocabulary(opened, vocab_size)
    return opened


def check_vocabulary(source: TokenSource, vocab_size: int | None) -> None:
    """Refuse ids that a model has no row for, as far as the source knows its vocabulary."""
    if vocab_size is not None and source.vocab_size is not None and source.vocab_size > vocab_size:
        raise UsageError(
            f"{source.path} has a vocabulary of {source.vocab_size} tokens and the model has room for {vocab_size}; "
            "make the model's embedding larger, or use the tokenizer it was made for"
        )


class _Foreign(TokenSource):
    """One pair of files without a manifest."""

    vocab_size = None

    def __init__(self, path: Path, documents: Documents) -> None:
        self.path = path
        self.splits = {"train": documents}


class _Joined(TokenSource):
    """Several sources as one: the documents of the second follow those of the first."""

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        if not sources:
            raise UsageError("there is nothing to open: the list of stores is empty")
        first = sources[0]
        for other in sources[1:]:
            if other.dtype != first.dtype:
                raise UsageError(f"{first.path} has {first.dtype} ids and {other.path} {other.dtype}; join equal ones")
            _compare_tokenizers(first, other)
        sizes = [source.vocab_size for source in sources]
        self.path = first.path
        self.vocab_size = None if None in sizes else max(size for size in sizes if size is not None)
        self._first = first
        names = [name for name in first.splits if all(name in source.splits for source in sources)]
        self.splits = {name: _join([source.split(name) for source in sources]) for name in names}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the first store, which is that of all."""
        return self._first.tokenizer


def _compare_tokenizers(first: TokenSource, other: TokenSource) -> None:
    if not isinstance(first, TokenStore) or not isinstance(other, TokenStore):
        return
    ours, theirs = first.manifest.tokenizer, other.manifest.tokenizer
    if ours.sha256 != theirs.sha256:
        raise UsageError(
            f"{first.path} was tokenized with {ours.name} ({ours.sha256[:6]}) and {other.path} with {theirs.name} "
            f"({theirs.sha256[:6]}); join stores of one tokenizer"
        )


def _join(splits: Sequence[Documents]) -> Documents:
    fingerprint = xxhash.xxh3_64_hexdigest(" ".join(split.fingerprint for split in splits).encode())
    return Documents(
        ShardTable.join([split.table for split in splits]),
        " + ".join(split.name for split in splits),
        fingerprint,
        beside=_join_beside(splits),
    )


def _join_beside(splits: Sequence[Documents]) -> dict[str, ShardTable]:
    suffixes = {tuple(sorted(split.beside)) for split in splits}
    if len(suffixes) > 1:
        raise UsageError("some of these stores are supervised data with a loss mask and some are not; use mix for them")
    return {suffix: ShardTable.join([split.beside[suffix] for split in splits]) for suffix in suffixes.pop()}


def _open_foreign(path: Path, dtype: str) -> _Foreign:
    size = path.stat().st_size
    index = path.with_suffix(".idx")
    if index.exists():
        kind, starts = _read_index(index, size)
    else:
        if str(dtype) not in PLAIN_TYPES:
            raise UsageError(f"dtype {dtype!r} is not one of ids; expected {', '.join(PLAIN_TYPES)}")
        kind, starts = np.dtype(PLAIN_TYPES[str(dtype)]), np.zeros(1, np.int64)
    if size % kind.itemsize:
        raise StoreError(f"{path} has {size} bytes, which is no whole number of {kind} ids")
    table = ShardTable([str(path.with_suffix(""))], [len(starts)], [size // kind.itemsize], kind, {0: starts})
    return _Foreign(path, Documents(table, path.name, _fingerprint(path, size, starts)))


def _read_index(path: Path, size: int) -> tuple[np.dtype[np.int64], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The type of the ids and the first byte of each document, checked against the size of the `.bin`."""
    data = path.read_bytes()
    wrong = StoreError(f"{path} is not a Megatron index for a .bin of {size} bytes; it has {len(data)} bytes")
    if len(data) < INDEX_HEADER_BYTES or not data.startswith(MAGIC):
        raise wrong
    _, version, code, num_sequences, num_edges = HEADER.unpack_from(data)
    if (
        version != 1
        or code not in MEGATRON_TYPES
        or len(data) < INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_edges
    ):
        raise wrong
    kind = np.dtype(MEGATRON_TYPES[code])
    lengths = np.frombuffer(data, "<i4", num_sequences, INDEX_HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", num_sequences, INDEX_HEADER_BYTES + 4 * num_sequences)
    edges = np.frombuffer(data, "<i8", num_edges, INDEX_HEADER_BYTES + 12 * num_sequences)
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    ordered = np.array_equal(pointers, ends - lengths.astype(np.int64) * kind.itemsize)
    if not ordered or (ends[-1] if num_sequences else 0) != size:
        raise StoreError(f"{path} does not describe its .bin front to back, which tokenmill needs; write it anew")
    if (np.diff(edges) < 0).any() or (num_edges and (edges[0] != 0 or edges[-1] != num_sequences)):
        raise wrong
    # A document of several sequences starts with the first of them.
    firsts = edges[:-1] if num_edges else np.arange(num_sequences)
    starts = np.append(pointers, size)[firsts]
    return kind, starts.astype(np.int64)


def _fingerprint(path: Path, size: int, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """Of the size, the index, and the first and last bytes of a file that has no checksum."""
    digest = xxhash.xxh3_64(f"{size} ".encode())
    digest.update(np.ascontiguousarray(starts, "<i8").tobytes())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - SAMPLE_BYTES), os.SEEK_SET)
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
