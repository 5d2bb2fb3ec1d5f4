"""Statistics of a store: exact ones from its manifest and index, others from a sample of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.engines.decoder import Decoder
from tokenmill.formatting import show_safely
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenStore

__all__ = [
    "LengthCount",
    "Lengths",
    "cover_lengths",
    "measure_lengths",
    "measure_text_bytes",
    "measure_trained",
    "name_token",
]

EXACT_LENGTHS = 1 << 16
"""Shorter documents are counted by their exact length, so that the median is exact."""
LENGTHS_AT_ONCE = 1 << 20
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 512, 2048
POWERS = 1 << np.arange(34, dtype=np.int64)
EDGES = np.unique(np.concatenate([[0], POWERS, POWERS + POWERS // 2]))
"""Bins are half as wide as powers of two: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""


class LengthCount(msgspec.Struct, frozen=True, kw_only=True):
    """Documents whose number of tokens is from `start` up to `stop`."""

    start: int
    stop: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Tokens per document of one split."""

    num_documents: int
    num_tokens: int
    shortest: int
    median: float
    longest: int
    counts: list[LengthCount]
    """Documents by length, from the first bin that is not empty to the last."""

    @property
    def mean(self) -> float:
        """Tokens per document."""
        return self.num_tokens / self.num_documents if self.num_documents else 0.0

    @property
    def powers(self) -> list[tuple[int, int, int]]:
        """The same by powers of two: the shortest and the longest length of each bin, and its number of documents."""
        documents = Counter[int]()
        for some in self.counts:
            documents[some.start.bit_length()] += some.num_documents
        used = [power for power, count in documents.items() if count]
        powers = range(min(used), max(used) + 1) if used else range(0)
        return [((1 << power) >> 1, (1 << power) - 1, documents[power]) for power in powers]


def measure_lengths(split: Documents) -> Lengths:
    """Compute exact statistics in one pass over the index, in bounded memory."""
    exact = np.zeros(EXACT_LENGTHS + 1, np.int64)
    documents, tokens = np.zeros(len(EDGES), np.int64), np.zeros(len(EDGES), np.float64)
    shortest, longest = 1 << 31, 0
    for lengths in _pieces(split):
        exact += np.bincount(np.minimum(lengths, EXACT_LENGTHS), minlength=EXACT_LENGTHS + 1)
        bins = np.searchsorted(EDGES, lengths, "right") - 1
        documents += np.bincount(bins, minlength=len(EDGES))
        tokens += np.bincount(bins, lengths, len(EDGES))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    used = np.flatnonzero(documents)
    counts = [
        LengthCount(
            start=int(EDGES[place]),
            stop=int(EDGES[place + 1]),
            num_documents=int(documents[place]),
            num_tokens=int(tokens[place]),
        )
        for place in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
    ]
    middle = _median(split, exact) if split.num_documents else 0.0
    return Lengths(split.num_documents, split.num_tokens, min(shortest, longest), middle, longest, counts)


def cover_lengths(counts: Sequence[LengthCount], start: int, stop: int) -> list[LengthCount]:
    """The same bins with empty ones around them, from the bin that begins at `start` to the one that ends at `stop`."""
    known = {some.start: some for some in counts}
    edges = EDGES[(start <= EDGES) & (stop >= EDGES)].tolist()
    return [
        known.get(low) or LengthCount(start=low, stop=high, num_documents=0, num_tokens=0)
        for low, high in pairwise(edges)
    ]


def _pieces(split: Documents) -> Iterator[npt.NDArray[np.int64]]:
    for lengths in split.lengths():
        for start in range(0, len(lengths), LENGTHS_AT_ONCE):
            yield lengths[start : start + LENGTHS_AT_ONCE]


def _median(split: Documents, exact: npt.NDArray[np.int64]) -> float:
    ends = np.cumsum(exact)
    ranks = [(split.num_documents - 1) // 2, split.num_documents // 2]
    middle = np.searchsorted(ends, ranks, "right")
    if middle.max() < EXACT_LENGTHS:
        return float(middle.mean())
    # This happens only if half of all documents are that long, and then there are few of them.
    return float(np.median(np.concatenate([*split.lengths()])))


def measure_text_bytes(store: TokenStore) -> tuple[float, int] | None:
    """Measure bytes of text per token (BOS and EOS are tokens), and count the documents of the sample.

    The manifest has only the size of the input files, which may be compressed and hold more than text. So this adds
    up the bytes of the tokens of documents that are spread over the train split.
    """
    split = store.splits["train"]
    if not split.num_tokens:
        return None
    chosen = np.unique(np.linspace(0, split.num_documents - 1, SAMPLE_DOCUMENTS).astype(np.int64)).tolist()
    ids = np.concatenate([split.document(number)[:SAMPLE_TOKENS] for number in chosen])
    decoder, specials = Decoder(store.tokenizer), set(store.tokenizer.special_tokens.values())
    distinct, counts = np.unique(ids, return_counts=True)
    sizes = [0 if token in specials else len(decoder.token_bytes(token)) for token in distinct.tolist()]
    return float(np.dot(sizes, counts) / len(ids)), len(chosen)


def measure_trained(split: Documents) -> float | None:
    """Compute the share of tokens that are trained on; None if the store is not supervised."""
    if split.mask is None:
        return None
    count = 0
    for start in range(0, split.num_tokens, LENGTHS_AT_ONCE):
        count += int(split.mask.read(start, min(start + LENGTHS_AT_ONCE, split.num_tokens)).sum())
    return count / split.num_tokens if split.num_tokens else 0.0


def name_token(store: TokenStore, token: int | None) -> str:
    """`<|endoftext|> (0)`, or `none`."""
    if token is None:
        return "none"
    names = {number: name for name, number in store.tokenizer.special_tokens.items()}
    return f"{show_safely(names.get(token, ''))} ({token})".strip()
