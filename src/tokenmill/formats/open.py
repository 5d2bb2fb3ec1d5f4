"""`tokenmill.open`: a store, several stores as one, or token files of other projects."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.arguments import is_remote, path_of, show
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import load_openers
from tokenmill.formats.base import Opener, TokenFile
from tokenmill.regular_files import open_regular
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST
from tokenmill.store.shard import BESIDE
from tokenmill.store.store import TokenSource, TokenStore, check_vocabulary
from tokenmill.store.table import ShardTable

__all__ = ["open_tokens"]

A_PATH = "the path of a store or of tokens, or a list of such paths"
SAMPLE_BYTES = 1 << 16
MOST_SAMPLES = 256
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
}
"""Words in the names of files and folders, and the split that each stands for."""


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
    if len({split.holds for split in splits}) > 1:
        held = ", ".join(f"{split.name} {split.holds or 'documents'}" for split in splits)
        raise UsageError(f"these stores hold different things ({held}); open them one by one")
    fingerprint = xxhash.xxh3_64_hexdigest(" ".join(split.fingerprint for split in splits).encode())
    joined = Documents(
        ShardTable.join([split.table for split in splits]),
        " + ".join(split.name for split in splits),
        fingerprint,
        beside={suffix: ShardTable.join([split.beside[suffix] for split in splits]) for suffix in suffixes.pop()},
        holds=splits[0].holds,
    )
    joined.tokenizer = splits[0].tokenizer
    firsts = np.cumsum([0, *(len(split.table.stems) for split in splits)]).tolist()
    parts = zip(splits, firsts, strict=False)
    joined.sources = tuple((name, first + shard) for split, first in parts for name, shard in split.sources)
    return joined


def _open_token_files(path: Path, dtype: str | None) -> TokenSource | None:
    """Open files of other projects; None if the path can only be a store."""
    if path.is_dir():
        # A store without a manifest is unfinished, or only partly copied.
        if any((path / name).exists() for name in (MANIFEST, ".tasks", "tokenizer")):
            return None
        found = _choose_format(path, _list_files(path))
        return found and _open_splits(path, *found, dtype)
    if not path.exists() and glob.has_magic(str(path)):
        return _open_glob(path, dtype)
    known = _recognise(path)
    if known is not None:
        opener, tokens = known
        return _FileSource(tokens, {"train": _join_files(tokens.name, opener.describe([tokens], dtype))})
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
    unknown = next((hit for hit in hits if _recognise(hit) is None), None)
    found = _choose_format(path, hits)
    if unknown is not None or found is None:
        raise UsageError(f"{path} matches {(unknown or hits[0]).name}, which has no tokens that tokenmill can read")
    return _open_splits(path.parent, *found, dtype)


def _open_splits(path: Path, opener: Opener, files: Sequence[Path], dtype: str | None) -> _FileSource:
    """Group files of one format into splits by their names; files that name no split are for training."""
    groups: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in files:
        groups[_split_of(path, file)].append(file)
    splits = {
        name: _join_files(f"{path.name}/{name}", opener.describe(group, dtype))
        for name, group in groups.items()
        if group
    }
    return _FileSource(path, splits)


def _recognise(path: Path) -> tuple[Opener, Path] | None:
    """Find the format of a file, and the file of tokens that it belongs to."""
    for opener in load_openers():
        tokens = opener.recognise(path)
        if tokens is not None:
            return opener, tokens
    return None


def _list_files(folder: Path) -> list[Path]:
    """List the files in a folder that are named like files of tokens; if there are none, those in folders of splits."""
    patterns = {opener.pattern for opener in load_openers()}
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = [path for path in inside if any(fnmatch(path.name, pattern) for pattern in patterns)]
    return found or [file for path in inside if path.name in SPLITS and path.is_dir() for file in _list_files(path)]


def _choose_format(place: Path, paths: Iterable[Path]) -> tuple[Opener, list[Path]] | None:
    """Find the one format of some files, and their files of tokens sorted by name; None if no file is recognised."""
    found: dict[Path, Opener] = {}
    for path in paths:
        known = _recognise(path)
        if known is not None:
            found[known[1]] = known[0]
    formats = {opener.label: path for path, opener in found.items()}
    if len(formats) > 1:
        named = " and ".join(f"{label} ({path.name})" for label, path in sorted(formats.items()))
        raise UsageError(f"{place} has tokens of several formats, {named}; name the files you want")
    return (next(iter(found.values())), sorted(found)) if found else None


def _split_of(folder: Path, file: Path) -> str:
    """Tell the split of a file from its own folder, or from a word in its name, such as `fineweb_val_000000.bin`."""
    is_split = file.parent != folder and file.parent.name in SPLITS
    words = [file.parent.name] if is_split else re.split(r"[^a-z]+", file.name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _join_files(name: str, files: Sequence[TokenFile]) -> Documents:
    """Make one sequence of the documents of all files, in the order of the files."""
    first = files[0]
    for other in files[1:]:
        if other.dtype != first.dtype:
            raise UsageError(
                f"{first.path} has {first.dtype} ids and {other.path} has {other.dtype}; open files of one type"
            )
        if other.mask != first.mask:
            bare = other if first.mask else first
            raise UsageError(f"{bare.path} has no {first.mask or other.mask} file, but others do; open them separately")
    ending = ".bin" if first.path.endswith(".bin") else ""
    table = ShardTable(
        [file.path[: -len(ending)] if ending else file.path for file in files],
        [len(file.starts) for file in files],
        [file.num_tokens for file in files],
        first.dtype,
        {number: file.starts for number, file in enumerate(files)},
        suffix=ending,
        offsets=[file.offset for file in files],
        sizes=[file.size for file in files],
    )
    table.note_files()
    beside = {".mask": table.beside(ending + first.mask, BESIDE[".mask"])} if first.mask else {}
    return Documents(table, name, _fingerprint(files), beside=beside)


def _fingerprint(files: Sequence[TokenFile]) -> str:
    """Hash the sizes, the documents, and the first and last bytes of files, since they come without checksums."""
    step = -(-len(files) // MOST_SAMPLES)
    digests = [_digest(file, sample=not number % step) for number, file in enumerate(files)]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_hexdigest(" ".join(digests).encode())


def _digest(file: TokenFile, *, sample: bool) -> str:
    digest = xxhash.xxh3_64(f"{file.size} ".encode())
    digest.update(np.ascontiguousarray(file.starts, "<i8").tobytes())
    paths = [file.path, file.path + file.mask] if file.mask else [file.path]
    for path in paths if sample else []:
        with open_regular(path) as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    return str(digest.hexdigest())
