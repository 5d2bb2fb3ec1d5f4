"""llm.c and modded-nanogpt: shards of 10^8 tokens behind a header of 256 numbers.

There the end-of-text token comes *before* each document, in a store behind it. The two streams differ by one
token: `a EOS b EOS` becomes `EOS a EOS b`, the last token moved to the front, so that every document
has one in front of it and none is lost. Documents that begin with a BOS token have one already, and documents
without EOS have nothing to move: both are written as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.exporters.base import Array, Shape, SplitSource, is_narrow
from tokenmill.exporters.writing import OutputFile, convert, file_blocks, token_blocks

__all__ = ["LlmC"]

SHARD_TOKENS = 10**8
HEADER_NUMBERS = 256
GPT2, LLAMA3 = (20240520, 1, np.dtype("<u2")), (20240801, 7, np.dtype("<u4"))
"""Magic number, version and type of ids of the two variants."""


class LlmC:
    """`train_000000.bin`, `train_000001.bin`, ...; uint16, or uint32 for vocabularies above 65,536."""

    shape: Shape = "documents"
    is_folder = False
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Every split fits."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Cut the stream into shards, with the last EOS in front of the first."""
        shift = _has_moved(split)
        if not shift and split.bos_id is None:
            split.note(f"documents of split {split.name} do not end with an end-of-text token, so none is put in front")
        magic, version, dtype = GPT2 if is_narrow(split) else LLAMA3
        num_tokens = split.documents.num_tokens
        for number, first in enumerate(range(0, num_tokens, SHARD_TOKENS)):
            last = min(first + SHARD_TOKENS, num_tokens)
            header = np.zeros(HEADER_NUMBERS, "<i4")
            header[:3] = magic, version, last - first
            with OutputFile(_path(split, folder, number)) as file:
                file.write(header)
                if shift and first == 0:
                    file.write(np.array([split.eos_id], dtype))
                for block in token_blocks(split, max(0, first - shift), last - shift):
                    file.write(convert(block, dtype))
                    split.advance(len(block))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The shards without their headers, and the first token at the end again."""
        blocks = self._read_shards(split, folder)
        if not _has_moved(split):
            yield from blocks
            return
        block = next(blocks)
        moved = block[:1].copy()
        yield block[1:]
        yield from blocks
        yield moved

    def _read_shards(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        magic, version, dtype = GPT2 if is_narrow(split) else LLAMA3
        for number in range(-(-split.documents.num_tokens // SHARD_TOKENS)):
            path = _path(split, folder, number)
            header = np.fromfile(path, "<i4", HEADER_NUMBERS)
            if header[:2].tolist() != [magic, version] or path.stat().st_size != 1024 + int(header[2]) * dtype.itemsize:
                raise StoreError(f"{path} has a header that does not fit it")
            yield from file_blocks(path, dtype, offset=header.nbytes)


def _path(split: SplitSource, folder: Path, number: int) -> Path:
    return folder / f"{split.name}_{number:06d}.bin"


def _has_moved(split: SplitSource) -> bool:
    """Whether documents have an EOS behind them and nothing in front."""
    if split.eos_id is None or split.bos_id is not None:
        return False
    num_tokens = split.documents.num_tokens
    return int(split.documents.read(num_tokens - 1, num_tokens)[0]) == split.eos_id
