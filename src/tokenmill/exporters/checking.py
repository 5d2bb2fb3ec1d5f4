"""The proof that an export holds the tokens of the store: both streams, counted and hashed.

The hash is the XXH3-64 of the ids as int32, whatever type they are stored in, so the same tokens have the same
hash in every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import xxhash

from tokenmill.errors import StoreError
from tokenmill.exporters.base import Array, SplitSource
from tokenmill.exporters.writing import convert, token_blocks

__all__ = ["StreamHash", "compare", "hash_stream"]


class StreamHash(NamedTuple):
    """How many ids there are, and what they hash to."""

    num_tokens: int
    xxh3: str


def hash_stream(blocks: Iterable[Array], advance: Callable[[int], None]) -> StreamHash:
    """Of ids that come in blocks, which may be two-dimensional."""
    digest = xxhash.xxh3_64()
    count = 0
    for block in blocks:
        digest.update(convert(block, "<i4").reshape(-1).view("u1").data)
        count += block.size
        advance(block.size)
    return StreamHash(count, digest.hexdigest())


def compare(split: SplitSource, found: Iterable[Array], num_tokens: int, advance: Callable[[int], None]) -> StreamHash:
    """The hash of what was read back, which must be that of the store's first `num_tokens`."""
    ours = hash_stream(token_blocks(split, 0, num_tokens), advance)
    theirs = hash_stream(found, advance)
    if ours != theirs:
        raise StoreError(
            f"what was written of split {split.name} reads back as {theirs.num_tokens:,} tokens with hash "
            f"{theirs.xxh3} and {split.path} has {ours.num_tokens:,} with {ours.xxh3}, so it was removed; "
            f"check the store with tokenmill verify {split.path}, and the disk"
        )
    return ours
