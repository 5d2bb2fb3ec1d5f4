"""Files of other projects: which format they have, which split they belong to, and their documents as one sequence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.errors import UsageError
from tokenmill.formats import load_openers
from tokenmill.formats.base import Opener, TokenFile
from tokenmill.store.documents import Documents
from tokenmill.store.shard import BESIDE
from tokenmill.store.table import ShardTable

__all__ = ["choose_format", "join_files", "list_files", "recognise", "split_of"]

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


def recognise(path: Path) -> tuple[Opener, Path] | None:
    """Find the format of a file, and the file of tokens that it belongs to."""
    for opener in load_openers():
        tokens = opener.recognise(path)
        if tokens is not None:
            return opener, tokens
    return None


def list_files(folder: Path) -> list[Path]:
    """List the files in a folder that are named like files of tokens; if there are none, those in folders of splits."""
    patterns = {opener.pattern for opener in load_openers()}
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = [path for path in inside if any(fnmatch(path.name, pattern) for pattern in patterns)]
    return found or [file for path in inside if path.name in SPLITS and path.is_dir() for file in list_files(path)]


def choose_format(place: Path, paths: Iterable[Path]) -> tuple[Opener, list[Path]] | None:
    """Find the one format of some files, and their files of tokens sorted by name; None if no file is recognised."""
    found: dict[Path, Opener] = {}
    for path in paths:
        known = recognise(path)
        if known is not None:
            found[known[1]] = known[0]
    formats = {opener.label: path for path, opener in found.items()}
    if len(formats) > 1:
        named = " and ".join(f"{label} ({path.name})" for label, path in sorted(formats.items()))
        raise UsageError(f"{place} has tokens of several formats, {named}; name the files you want")
    return (next(iter(found.values())), sorted(found)) if found else None


def split_of(folder: Path, file: Path) -> str:
    """Tell the split of a file from its own folder, or from a word in its name, such as `fineweb_val_000000.bin`."""
    is_split = file.parent != folder and file.parent.name in SPLITS
    words = [file.parent.name] if is_split else re.split(r"[^a-z]+", file.name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def join_files(name: str, files: Sequence[TokenFile]) -> Documents:
    """Number the documents of files through, one file after the other."""
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
        with Path(path).open("rb") as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - SAMPLE_BYTES))
            digest.update(opened.read(SAMPLE_BYTES))
    return str(digest.hexdigest())
