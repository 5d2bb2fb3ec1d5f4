"""The checksum of a file: the XXH3-64 of its bytes."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

__all__ = ["hash_rest"]

PIECE_BYTES = 1 << 20


def hash_rest(file: BinaryIO) -> tuple[int, xxhash.xxh3_64]:
    """Read an open file from its position to its end; return how many bytes these are, and their hash."""
    digest = xxhash.xxh3_64()
    size = 0
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
        size += len(piece)
    return size, digest
