"""Exact duplicates: documents whose tokens equal those of an earlier document, by a hash of 64 bits.

The hash of a document is the sum of its tokens, each scrambled together with its position. So it is computed with
arrays, and piece by piece for a long document. Two different ones among a hundred million documents have the same hash
with a probability of less than one in a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.tools.report.token_counts import Integers, Piece

__all__ = ["Copies", "DuplicateTally", "ShardHashes"]

NUM_EXAMPLES = 10
Hashes = npt.NDArray[np.uint64]
POSITION, FIRST, SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of splitmix64."""


class Copies(NamedTuple):
    """A document with copies."""

    split: int
    document: int
    num_equal: int
    """How many documents are equal, with this one."""


class ShardHashes:
    """The hashes of the documents of one shard, as far as its pieces are read."""

    def __init__(self, edges: Integers, first_document: int) -> None:
        self._edges, self._first = edges, first_document
        self._hashes = np.zeros(len(edges) - 1, np.uint64)
        self._num_seen = np.zeros(len(edges) - 1, np.int64)

    def add(self, piece: Piece) -> None:
        """Add a piece; a document may continue in the next one."""
        documents, lengths = piece.documents - self._first, piece.lengths
        positions = np.arange(len(piece.ids)) + np.repeat(piece.first_token - self._edges[documents], lengths)
        mixed = piece.ids.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * POSITION
        mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
        self._hashes[documents] += np.add.reduceat(mixed ^ (mixed >> np.uint64(31)), piece.starts)
        self._num_seen[documents] += lengths

    def find_whole(self) -> tuple[Hashes, Integers, Integers]:
        """The hashes, numbers and lengths of the documents that were read as a whole."""
        lengths = np.diff(self._edges)
        whole = np.flatnonzero(self._num_seen == lengths)
        return self._hashes[whole], whole + self._first, lengths[whole]


class DuplicateTally:
    """The hashes of the documents of all splits."""

    def __init__(self, fewest_tokens: int) -> None:
        self._fewest_tokens = fewest_tokens
        """Shorter documents have no text, and are no copies of each other."""
        self.num_looked_at = 0
        self._hashes: list[Hashes] = []
        self._documents: list[Integers] = []
        self._splits: list[int] = []

    def add(self, split: int, shard: ShardHashes) -> None:
        """Add the documents of one shard, in order."""
        hashes, documents, lengths = shard.find_whole()
        self.num_looked_at += len(documents)
        filled = lengths >= self._fewest_tokens
        self._hashes.append(hashes[filled])
        self._documents.append(documents[filled])
        self._splits.append(split)

    def count(self) -> tuple[int, list[Copies]]:
        """Count the documents that equal an earlier one; list the first of those with the most copies."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *self._hashes])
        order = np.argsort(hashes, kind="stable")
        firsts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0) if len(order) else order
        counts = np.diff(firsts, append=len(order))
        return len(hashes) - len(firsts), list(self._most_copied(order[firsts], counts))

    def _most_copied(self, places: Integers, counts: Integers) -> Iterator[Copies]:
        """Of equal counts, the document that comes first in the store is first."""
        copied = np.flatnonzero(counts > 1)
        best = copied[np.lexsort((places[copied], -counts[copied]))][:NUM_EXAMPLES]
        ends = np.cumsum([len(some) for some in self._documents])
        for place, count in zip(places[best].tolist(), counts[best].tolist(), strict=True):
            shard = int(np.searchsorted(ends, place, "right"))
            start = int(ends[shard]) - len(self._documents[shard])
            yield Copies(self._splits[shard], int(self._documents[shard][place - start]), count)
