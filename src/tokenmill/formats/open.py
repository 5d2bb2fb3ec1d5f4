"""`tokenmill.open`: a store, several stores as one, or token files of other projects."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from tokenmill.arguments import is_remote, path_of, show
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import load_openers
from tokenmill.formats._token_files import choose_format, join_files, list_files, recognise, split_of
from tokenmill.formats.base import Opener
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST
from tokenmill.store.store import TokenSource, TokenStore, check_vocabulary
from tokenmill.store.table import ShardTable

__all__ = ["open_tokens"]

A_PATH = "the path of a store or of tokens, or a list of such paths"


def open_tokens(
    path: str | Path | Iterable[str | Path],
    *,
    vocab_size: int | None = None,
    dtype: str | None = None,
    cache_dir: str | Path | None = None,
    cache_bytes: str | int | None = None,
    fetch: str | None = None,
) -> TokenSource:
    """Open a store for reading, or several as one, in order.

    `path` may also be a file, a folder or a glob of files of other projects: Megatron, nanoGPT, llm.c, datatrove, OLMo,
    NumPy, `chunk_*.pt`, or Parquet with `input_ids`. `dtype` is the type of their ids if the files do not say it;
    the default is uint16. If `vocab_size`, the number of rows of a model's embedding, is smaller than the vocabulary of
    the store, opening it is an error.

    A URL (`s3://`, `gs://`, `az://`) is a store in a bucket. It is read through a cache in the folder `cache_dir` of at
    most `cache_bytes` ("50GB"): `fetch="shard"` downloads whole shards, `"range"` only the rows that are read.
    """
    settings = {"cache_dir": cache_dir, "cache_bytes": cache_bytes, "fetch": fetch}
    if isinstance(path, Iterable) and not isinstance(path, (str, bytes, os.PathLike)):
        paths = [path_of(one, A_PATH) for one in path]
        return _JoinedSources([_open_one(one, vocab_size, dtype, settings) for one in paths])
    return _open_one(path_of(path, A_PATH), vocab_size, dtype, settings)


def _open_one(name: str, vocab_size: int | None, dtype: str | None, settings: dict[str, Any]) -> TokenSource:
    if is_remote(name):
        from tokenmill.store.remote_store import open_remote

        found: TokenSource = open_remote(name, **settings)
        check_vocabulary(found.path, found.vocab_size, vocab_size)
        return found
    given = next((setting for setting, value in settings.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"{given}={show(settings[given])} has no effect: {name} is on this machine; leave it out")
    path = Path(name).absolute()
    try:
        opened = _open_token_files(path, dtype)
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if opened is None:
        opened = TokenStore(path)
    check_vocabulary(opened.path, opened.vocab_size, vocab_size)
    return opened


class _FileSource(TokenSource):
    """Token files without a manifest."""

    vocab_size = None

    def __init__(self, path: Path, splits: dict[str, Documents]) -> None:
        self.path = path
        self.splits = splits


class _JoinedSources(TokenSource):
    """Several sources as one: in each split, the documents of one source follow those of the source before it."""

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        if not sources:
            raise UsageError("the list of stores is empty; name at least one")
        first = sources[0]
        for other in sources[1:]:
            if other.dtype != first.dtype:
                raise UsageError(
                    f"{first.path} has {first.dtype} ids and {other.path} has {other.dtype}; join sources of one type"
                )
            _compare_tokenizers(first, other)
        sizes = [source.vocab_size for source in sources]
        self.path = first.path
        self.vocab_size = None if None in sizes else max(size for size in sizes if size is not None)
        self._first = first
        if not any(all(name in source.splits for source in sources) for name in first.splits):
            raise UsageError(
                f"no split of {first.path} ({', '.join(first.splits)}) is in all sources; join equal splits"
            )
        names = dict.fromkeys(name for source in sources for name in source.splits)
        self.splits = {name: _join([s.split(name) for s in sources if name in s.splits]) for name in names}
        for documents in self.splits.values():
            documents.vocab_size = self.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the first store; all stores have the same."""
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
    suffixes = {tuple(sorted(split.beside)) for split in splits}
    if len(suffixes) > 1:
        raise UsageError("some of these stores have a loss mask and some do not; combine them with mix instead")
    fingerprint = xxhash.xxh3_64_hexdigest(" ".join(split.fingerprint for split in splits).encode())
    return Documents(
        ShardTable.join([split.table for split in splits]),
        " + ".join(split.name for split in splits),
        fingerprint,
        beside={suffix: ShardTable.join([split.beside[suffix] for split in splits]) for suffix in suffixes.pop()},
    )


def _open_token_files(path: Path, dtype: str | None) -> TokenSource | None:
    """Open files of other projects; None if the path can only be a store."""
    if path.is_dir():
        # A store without a manifest is unfinished, or only partly copied.
        if any((path / name).exists() for name in (MANIFEST, ".tasks", "tokenizer")):
            return None
        found = choose_format(path, list_files(path))
        return found and _open_splits(path, *found, dtype)
    if not path.exists() and glob.has_magic(str(path)):
        return _open_glob(path, dtype)
    known = recognise(path)
    if known is not None:
        opener, tokens = known
        return _FileSource(tokens, {"train": join_files(tokens.name, opener.describe([tokens], dtype))})
    if path.is_file():
        labels = ", ".join(opener.label for opener in load_openers())
        raise StoreError(
            f"{path} is neither a store nor a file of tokens in a format that tokenmill reads: "
            f"{labels}; tokenize text first, or pass a tokenizer"
        )
    return None


def _open_glob(path: Path, dtype: str | None) -> TokenSource:
    """Open the files or folders that match a pattern as one source."""
    hits = [Path(hit) for hit in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (the pattern is absolute)
    if not hits:
        raise UsageError(f"no file matches {path}")
    if any(hit.is_dir() for hit in hits):
        return _JoinedSources([open_tokens(hit, dtype=dtype) for hit in hits])
    unknown = next((hit for hit in hits if recognise(hit) is None), None)
    found = choose_format(path, hits)
    if unknown is not None or found is None:
        raise UsageError(f"{path} matches {(unknown or hits[0]).name}, which has no tokens that tokenmill can read")
    return _open_splits(path.parent, *found, dtype)


def _open_splits(path: Path, opener: Opener, files: Sequence[Path], dtype: str | None) -> _FileSource:
    """Group files of one format into splits by their names; files that name no split are for training."""
    groups: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in files:
        groups[split_of(path, file)].append(file)
    splits = {
        name: join_files(f"{path.name}/{name}", opener.describe(group, dtype))
        for name, group in groups.items()
        if group
    }
    return _FileSource(path, splits)
