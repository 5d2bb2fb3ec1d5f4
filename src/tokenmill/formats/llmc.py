"""llm.c and modded-nanogpt: shards of 10^8 tokens after a header of 256 integers.

The first integer is a magic number, the second a version, the third the number of tokens. These projects put the
end-of-text token *before* each document, a store puts it after. The two streams differ by one token: `a EOS b EOS`
becomes `EOS a EOS b`. So an export moves the last token to the front, and every other token keeps its order. Documents
that begin with BOS already have a token in front, and documents without EOS have nothing to move; both stay unchanged.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.formats._boundaries import check_boundaries
from tokenmill.formats._token_blocks import file_blocks, token_blocks
from tokenmill.formats.base import Array, Exporter, Opener, Shape, SplitSource, TokenFile
from tokenmill.regular_files import open_regular
from tokenmill.store.shard import OutputFile

__all__ = ["LlmC"]

SHARD_TOKENS = 10**8
HEADER_BYTES = 1024
FRONT = struct.Struct("<iii")
"""Magic number, version and number of tokens; the rest of the header is zero."""
GPT2, LLAMA3 = 20240520, 20240801
VARIANTS: dict[int, tuple[int, np.dtype[Any]]] = {GPT2: (1, np.dtype("<u2")), LLAMA3: (7, np.dtype("<u4"))}
"""The version and the type of ids for each magic number."""
OTHERS = {20240326: "a model", 20240327: "the state of a run", 20240522: "questions to evaluate with"}
"""Other `.bin` files of llm.c, which must not be taken for nanoGPT's tokens."""


class LlmC(Opener, Exporter):
    """`train_000000.bin`, `train_000001.bin`, ...; nothing says where documents end, so a file is opened as one."""

    label = "llm.c"
    pattern = "*.bin"
    magics = tuple(magic.to_bytes(4, "little") for magic in (*VARIANTS, *OTHERS))
    shape: Shape = "documents"
    boundary_reader = "modded-nanogpt"

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Read the header, which says what the ids are; `dtype` is not needed."""
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            front = file.read(FRONT.size)
        magic, version, count = FRONT.unpack(front.ljust(FRONT.size, b"\0"))
        if magic not in VARIANTS:
            raise StoreError(f"{path} is {OTHERS.get(magic, 'a file')} of llm.c, not tokens")
        expected, kind = VARIANTS[magic]
        if version != expected:
            raise StoreError(f"{path} has version {version} of llm.c's format; tokenmill reads version {expected}")
        if count < 0 or size != HEADER_BYTES + count * kind.itemsize:
            raise StoreError(
                f"{path} has {size} bytes and its header says {count} ids of {kind.itemsize} bytes after "
                f"{HEADER_BYTES}; it is damaged, or not finished"
            )
        return TokenFile(str(path), kind, count, size, offset=HEADER_BYTES)

    def check_documents(self, split: SplitSource) -> None:
        """Refuse a store unless each document has one EOS or BOS, which gets or keeps its place in front.

        llm.c looks at no documents, but modded-nanogpt does, which reads the same files.
        """
        is_first = split.bos_id is not None
        token = split.bos_id if is_first else split.eos_id
        check_boundaries(split, self.boundary_reader, token, is_first=is_first)

    def write(self, split: SplitSource, folder: Path) -> None:
        """Cut the stream into shards, with the last EOS before the first document."""
        shift = _is_shifted(split)
        if not shift and split.bos_id is None:
            split.note(f"documents of split {split.name} do not end with an end-of-text token, so none is put in front")
        magic = GPT2 if split.is_narrow else LLAMA3
        version, dtype = VARIANTS[magic]
        num_tokens = split.documents.num_tokens
        for path, first in _shards(split, folder):
            last = min(first + SHARD_TOKENS, num_tokens)
            with OutputFile(path) as file:
                file.write(FRONT.pack(magic, version, last - first).ljust(HEADER_BYTES, b"\0"))
                if shift and first == 0:
                    file.write(np.array([split.eos_id], dtype))
                for block in token_blocks(split, max(0, first - shift), last - shift, dtype):
                    file.write(block)
                    split.advance(len(block))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the shards after their headers, and move the first token to the end again."""
        files = [self.describe_file(path, None) for path, _ in _shards(split, folder)]
        blocks = (block for file in files for block in file_blocks(Path(file.path), file.dtype, offset=file.offset))
        if not _is_shifted(split):
            yield from blocks
            return
        block = next(blocks)
        moved = block[:1].copy()
        yield block[1:]
        yield from blocks
        yield moved


def _shards(split: SplitSource, folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path and the first token of each shard."""
    for number, first in enumerate(range(0, split.documents.num_tokens, SHARD_TOKENS)):
        yield folder / f"{split.name}_{number:06d}.bin", first


def _is_shifted(split: SplitSource) -> bool:
    """Whether documents end with EOS and do not begin with BOS."""
    if split.eos_id is None or split.bos_id is not None:
        return False
    num_tokens = split.documents.num_tokens
    return int(split.documents.read(num_tokens - 1, num_tokens)[0]) == split.eos_id
