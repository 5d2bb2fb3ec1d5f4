"""Megatron-LM: bare tokens in `.bin`, and an `.idx` of sequences and of the documents that these make up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.store.foreign.base import TokenFile, bare_file
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC
from tokenmill.store.table import Integers

__all__ = ["Megatron"]

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Megatron:
    """Pairs of `.bin` and `.idx`; either of them names the pair, and so does what Megatron calls its prefix."""

    name = "Megatron"
    pattern = "*.bin"

    def recognise(self, path: Path) -> Path | None:
        """The `.bin` of a pair that is complete."""
        if path.suffix in {".bin", ".idx"}:
            tokens = path.with_suffix(".bin")
        elif path.exists():
            return None
        else:
            tokens = path.with_name(f"{path.name}.bin")
        return tokens if tokens.is_file() and tokens.with_suffix(".idx").is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """The index says what the ids are, so `dtype` is not needed."""
        for path in paths:
            # Megatron has no such file, so this is a shard of a store; without it, prompts would be trained on.
            if path.with_suffix(".mask").is_file():
                raise UsageError(f"{path} is a shard of supervised data, with a loss mask beside it; open its store")
        return [bare_file(path, *_read_index(path.with_suffix(".idx"), path.stat().st_size)) for path in paths]


def _read_index(path: Path, size: int) -> tuple[np.dtype[Any], Integers]:
    """The type of the ids and the first byte of each document, checked against the size of the `.bin`."""
    data = path.read_bytes()
    wrong = StoreError(f"{path} is not a Megatron index for a .bin of {size} bytes; it has {len(data)} bytes")
    if len(data) < INDEX_HEADER_BYTES or not data.startswith(MAGIC):
        raise wrong
    _, version, code, num_sequences, num_edges = HEADER.unpack_from(data)
    if version != 1 or code not in TYPES or len(data) < INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_edges:
        raise wrong
    kind = np.dtype(TYPES[code])
    lengths = np.frombuffer(data, "<i4", num_sequences, INDEX_HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", num_sequences, INDEX_HEADER_BYTES + 4 * num_sequences)
    edges = np.frombuffer(data, "<i8", num_edges, INDEX_HEADER_BYTES + 12 * num_sequences)
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    ordered = np.array_equal(pointers, ends - lengths.astype(np.int64) * kind.itemsize)
    if not ordered or (lengths < 0).any() or (ends[-1] if num_sequences else 0) != size:
        raise StoreError(f"{path} does not describe its .bin front to back, which tokenmill needs; write it anew")
    if (np.diff(edges) < 0).any() or (num_edges and (edges[0] != 0 or edges[-1] != num_sequences)):
        raise wrong
    # A document of several sequences starts with the first of them.
    firsts = edges[:-1] if num_edges else np.arange(num_sequences)
    return kind, np.append(pointers, size)[firsts].astype(np.int64)
