"""Files of one format as the documents of a split, in order of their names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.errors import UsageError
from tokenmill.store.documents import Documents
from tokenmill.store.foreign.base import TokenFile
from tokenmill.store.shard import BESIDE
from tokenmill.store.table import ShardTable

__all__ = ["SPLITS", "join_files", "split_of"]

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
"""Words in the names of files, and the split that they mean."""


def split_of(folder: Path, file: Path) -> str:
    """The split that the name of a file has as a word, such as `fineweb_val_000000.bin`, or that its own folder is."""
    is_split = file.parent != folder and file.parent.name in SPLITS
    words = [file.parent.name] if is_split else re.split(r"[^a-z]+", file.name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def join_files(name: str, files: Sequence[TokenFile]) -> Documents:
    """The documents of files, one file after the other."""
    first = files[0]
    for other in files[1:]:
        if other.dtype != first.dtype:
            raise UsageError(f"{first.path} has {first.dtype} ids and {other.path} {other.dtype}; open equal ones")
        if other.mask != first.mask:
            bare = other if first.mask else first
            raise UsageError(f"{bare.path} has no {first.mask or other.mask} file, and others have; open them apart")
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
    beside = {".mask": table.beside(ending + first.mask, BESIDE[".mask"])} if first.mask else {}
    return Documents(table, name, _fingerprint(files), beside=beside)


def _fingerprint(files: Sequence[TokenFile]) -> str:
    """Of the sizes, the documents, and the first and last bytes of files that have no checksums."""
    step = -(-len(files) // MOST_SAMPLES)
    digests = [_digest(file, sample=not number % step) for number, file in enumerate(files)]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_hexdigest(" ".join(digests).encode())


def _digest(file: TokenFile, *, sample: bool) -> str:
    digest = xxhash.xxh3_64(f"{file.size} ".encode())
    digest.update(np.ascontiguousarray(file.starts, "<i8").tobytes())
    paths = [file.path, file.path + file.mask] if file.mask else [file.path]
    for path in paths if sample else []:
        with Path(path).open("rb") as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    return str(digest.hexdigest())
