"""Megatron-LM, NeMo, GPT-NeoX: bare tokens in `train.bin`, and an index of sequences and documents in `train.idx`.

The shards of a store are such pairs. An export joins their bytes and writes one index, or links the pairs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.formats._token_blocks import BareTokens, link_or_copy
from tokenmill.formats.base import Opener, SplitSource, TokenFile, bare_file
from tokenmill.regular_files import open_regular
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC, OutputFile, index_pieces
from tokenmill.store.table import Integers

__all__ = ["Megatron"]

VERSION = 1
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of types; exports use those of a store's shards."""


class Megatron(Opener, BareTokens):
    """Pairs of `.bin` and `.idx`; either file names a pair, and so does their common prefix."""

    label = "Megatron"
    pattern = "*.bin"
    can_link = True
    tokens_suffix = ".bin"
    narrow, wide = "<u2", "<i4"

    def recognise(self, path: Path) -> Path | None:
        """Return the `.bin` of a complete pair."""
        if path.suffix in {".bin", ".idx"}:
            tokens = path.with_suffix(".bin")
        elif path.exists():
            return None
        else:
            tokens = path.with_name(f"{path.name}.bin")
        return tokens if tokens.is_file() and tokens.with_suffix(".idx").is_file() else None

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Read the index, which says what the ids are; `dtype` is not needed."""
        # Megatron has no masks, so this is a shard of a store. Without its mask, prompts would be trained on.
        if path.with_suffix(".mask").is_file():
            raise UsageError(f"{path} is a shard of supervised data, with a loss mask beside it; open its store")
        return bare_file(path, *_read_index(path.with_suffix(".idx"), path.stat().st_size))

    def write_index(self, split: SplitSource, stem: Path, shards: range) -> None:
        """Index the documents again, each as one sequence, or link the index of the shard."""
        path = Path(f"{stem}.idx")
        if split.links:
            link_or_copy(f"{split.stems[shards[0]]}.idx", path)
            return
        with OutputFile(path) as file:
            for piece in index_pieces(split.documents.lengths, split.documents.num_documents, self.id_type(split)):
                file.write(piece)


def _read_index(path: Path, size: int) -> tuple[np.dtype[Any], Integers]:
    """Read the type of the ids and the first byte of each document, and check them against the size of the `.bin`."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        header = file.read(INDEX_HEADER_BYTES)
        wrong = StoreError(f"{path} is not a Megatron index for a .bin of {size} bytes; it has {found} bytes")
        if len(header) < INDEX_HEADER_BYTES or not header.startswith(MAGIC):
            raise wrong
        _, version, code, num_sequences, num_edges = HEADER.unpack(header)
        num_bytes = INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_edges
        if version != VERSION or code not in TYPES or found < num_bytes:
            raise wrong
        # Mapped, because what a header says may be more than memory.
        data = np.memmap(file, "u1", mode="r", shape=(num_bytes,))
    kind = np.dtype(TYPES[code])
    lengths = np.frombuffer(data, "<i4", num_sequences, INDEX_HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", num_sequences, INDEX_HEADER_BYTES + 4 * num_sequences)
    edges = np.frombuffer(data, "<i8", num_edges, INDEX_HEADER_BYTES + 12 * num_sequences)
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    ordered = np.array_equal(pointers, ends - lengths.astype(np.int64) * kind.itemsize)
    if not ordered or (lengths < 0).any() or (ends[-1] if num_sequences else 0) != size:
        raise StoreError(
            f"{path} does not describe its .bin from front to back, as tokenmill needs; write the pair again"
        )
    if (np.diff(edges) < 0).any() or (num_edges and (edges[0] != 0 or edges[-1] != num_sequences)):
        raise wrong
    # A document of several sequences starts with the first of them.
    firsts = edges[:-1] if num_edges else np.arange(num_sequences)
    return kind, np.append(pointers, size)[firsts].astype(np.int64)
