"""Tokens to files and back: hard links and kernel copies where bytes are equal, else blocks of a few megabytes.

Nothing here syncs: `_destination` makes the finished folder durable as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.formats.base import Array, Exporter, Shape, SplitSource
from tokenmill.regular_files import open_regular
from tokenmill.store.shard import OutputFile

__all__ = ["BLOCK_TOKENS", "BareTokens", "convert", "file_blocks", "link_or_copy", "token_blocks"]

BLOCK_TOKENS = 1 << 20
"""2 to 8 MB: large enough that the cost per call does not matter, small enough for any limit on memory."""


def link_or_copy(source: str, target: Path) -> None:
    """Make a hard link, or a copy where the file system refuses the link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(os.path.realpath(source))
    except OSError:
        with OutputFile(target) as file:
            file.append(source)


class BareTokens(Exporter):
    """A format with the bare ids of a split in one file, and perhaps files beside it that index them.

    With `--links`, each shard has such a file, which is a hard link to it.
    """

    shape: Shape = "documents"
    tokens_suffix: str
    mask_suffix: str
    narrow: str
    wide: str
    """The types of ids for vocabularies that fit 16 bits, and for others."""

    def id_type(self, split: SplitSource) -> np.dtype[Any]:
        """Return the type of the ids in the files of a split."""
        return np.dtype(self.narrow if split.is_narrow else self.wide)

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write or link the tokens, the mask if there is one, and the files that index them."""
        for stem, shards in self._parts(split, folder):
            _write_stream(split, Path(f"{stem}{self.tokens_suffix}"), self.id_type(split), shards)
            if self.carries_mask and split.mask is not None:
                _write_stream(split.mask, Path(f"{stem}{self.mask_suffix}"), np.dtype("u1"), shards)
            self.write_index(split, stem, shards)

    def write_index(self, split: SplitSource, stem: Path, shards: range) -> None:
        """Write the files beside the tokens of some shards, named `stem` and a suffix."""

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the files of tokens in order."""
        for stem, _ in self._parts(split, folder):
            yield from file_blocks(Path(f"{stem}{self.tokens_suffix}"), self.id_type(split))

    def _parts(self, split: SplitSource, folder: Path) -> list[tuple[Path, range]]:
        """List the files of tokens as paths without suffix, each with the shards it holds."""
        if not split.links:
            return [(folder / split.name, range(len(split.documents.table.stems)))]
        own = folder if self.is_folder else folder / split.name
        return [(own / Path(stem).name, range(shard, shard + 1)) for shard, stem in enumerate(split.stems)]


def _write_stream(split: SplitSource, path: Path, dtype: np.dtype[Any], shards: range) -> None:
    """Write the tokens of shards to one file; a single shard becomes a hard link."""
    documents = split.documents
    if not split.stems or documents.dtype.itemsize != dtype.itemsize:
        with OutputFile(path) as file:
            for block in token_blocks(split, 0, documents.num_tokens, dtype):
                file.write(block)
                split.advance(len(block))
        return
    if len(shards) == 1:
        link_or_copy(split.stems[shards[0]] + split.suffix, path)
        split.advance(int(documents.table.num_tokens[shards[0]]))
        return
    with OutputFile(path) as file:
        for shard in shards:
            file.append(split.stems[shard] + split.suffix)
            split.advance(int(documents.table.num_tokens[shard]))


def token_blocks(
    split: SplitSource, start: int, stop: int, dtype: npt.DTypeLike, size: int | None = None
) -> Iterator[Array]:
    """Yield the tokens from `start` up to `stop` in blocks of `size`; all blocks share one buffer."""
    size = size or BLOCK_TOKENS
    stored = split.documents.dtype
    # The cast happens while copying, unless it could change an id.
    is_safe = np.can_cast(stored, dtype)
    buffer = np.empty(min(size, stop - start), dtype if is_safe else stored)
    for first in range(start, stop, size):
        block = buffer[: min(size, stop - first)]
        _copy_tokens(split, first, block)
        yield block if is_safe else convert(block, dtype)


def _copy_tokens(split: SplitSource, start: int, out: Array) -> None:
    """Fill an array with the tokens from `start` on.

    Shards are read rather than mapped: each is read once and in order, and mapped pages would count as memory of the
    process until it held the whole store.
    """
    if not split.stems:
        split.documents.copy(start, out)
        return
    stored, counts = split.documents.dtype, split.documents.table.num_tokens
    ends = np.cumsum(counts)
    shard, done = int(np.searchsorted(ends, start, "right")), 0
    while done < len(out):
        first = start + done - int(ends[shard] - counts[shard])
        some = out[done : done + int(counts[shard]) - first]
        raw = some if some.dtype == stored else np.empty(len(some), stored)
        with open_regular(split.stems[shard] + split.suffix, buffering=0) as file:
            file.seek(first * raw.itemsize)
            _read_exactly(file, raw.view("u1").data)
        if raw is not some:
            some[:] = raw
        done, shard = done + len(some), shard + 1


def convert(block: Array, dtype: npt.DTypeLike) -> Array:
    """Return the same ids in another type; an id that does not fit is an error, never another id."""
    kind = np.dtype(dtype)
    if block.dtype == kind:
        return block
    if not np.can_cast(block.dtype, kind) and block.size:
        least, most = int(block.min()), int(block.max())
        if least < 0 or most > np.iinfo(kind).max:
            wrong = least if least < 0 else most
            raise StoreError(f"id {wrong} does not fit into {kind}; choose a format with larger ids")
    return block.astype(kind)


def file_blocks(path: Path, dtype: npt.DTypeLike, *, offset: int = 0) -> Iterator[Array]:
    """Yield the bare ids of a file from byte `offset` to its end; all blocks share one buffer."""
    kind: np.dtype[Any] = np.dtype(dtype)
    buffer = bytearray(BLOCK_TOKENS * kind.itemsize)
    left = path.stat().st_size - offset
    if left < 0 or left % kind.itemsize:
        raise StoreError(f"{path} does not hold a whole number of {kind} ids after byte {offset}")
    with open_regular(path, buffering=0) as file:
        file.seek(offset)
        while left:
            view = memoryview(buffer)[: min(left, len(buffer))]
            _read_exactly(file, view)
            left -= len(view)
            yield np.frombuffer(view, kind)


def _read_exactly(file: Any, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise StoreError(f"{file.name} ends too early")
        view = view[count:]
