"""Megatron-LM, NeMo, GPT-NeoX: `train.bin` and `train.idx`, or the shards as they are.

The store's own shards are pairs of this format, so a merged pair is their bytes end to end and one index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.exporters.base import Array, Shape, SplitSource, is_narrow
from tokenmill.exporters.writing import OutputFile, file_blocks, link_or_copy, shard_name, write_stream
from tokenmill.store.shard import DTYPES, HEADER, MAGIC

__all__ = ["Megatron"]

INDEX_PIECE = 1 << 20


class Megatron:
    """One merged pair per split, or links to the shards."""

    shape: Shape = "documents"
    is_folder = False
    carries_mask = False
    can_link = True

    def check(self, split: SplitSource) -> None:
        """Every split fits."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Link the pairs, or join the tokens and index them anew."""
        code, dtype = DTYPES["uint16" if is_narrow(split) else "int32"]
        if split.links:
            for stem, count in zip(split.stems, split.documents.table.num_tokens.tolist(), strict=True):
                for suffix in (".bin", ".idx"):
                    link_or_copy(stem + suffix, folder / split.name / f"{shard_name(stem)}{suffix}")
                split.advance(count)
            return
        write_stream(split, folder / f"{split.name}.bin", dtype)
        self._write_index(split, folder / f"{split.name}.idx", code, dtype.itemsize)

    def _write_index(self, split: SplitSource, path: Path, code: int, itemsize: int) -> None:
        documents = split.documents
        count = documents.num_documents
        with OutputFile(path) as file:
            file.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
            for lengths in documents.lengths():
                file.write(lengths.astype("<i4"))
            start = 0
            for lengths in documents.lengths():
                ends = np.cumsum(lengths) + start
                file.write(((ends - lengths) * itemsize).astype("<i8"))
                start = int(ends[-1])
            for first in range(0, count + 1, INDEX_PIECE):
                file.write(np.arange(first, min(first + INDEX_PIECE, count + 1), dtype="<i8"))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The tokens of the merged file, or of one shard after the other."""
        dtype = DTYPES["uint16" if is_narrow(split) else "int32"][1]
        if split.links:
            for stem in split.stems:
                yield from file_blocks(folder / split.name / f"{shard_name(stem)}.bin", dtype)
        else:
            yield from file_blocks(folder / f"{split.name}.bin", dtype)
