"""Figures of a store, in one pass over its index or from a sample of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.engines.decoding import Decoder
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenStore

__all__ = ["Lengths", "measure_lengths", "measure_text_bytes", "measure_trained"]

EXACT_LENGTHS = 1 << 16
"""Documents shorter than this are counted by their exact length, so that the median is exact."""
LENGTHS_AT_ONCE = 1 << 20
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 512, 2048


@dataclass(frozen=True)
class Lengths:
    """Tokens per document of one split."""

    num_documents: int
    num_tokens: int
    shortest: int
    median: float
    longest: int
    bins: list[tuple[int, int, int]]
    """Shortest and longest length of a bin, and how many documents are in it."""

    @property
    def mean(self) -> float:
        """Tokens per document."""
        return self.num_tokens / self.num_documents if self.num_documents else 0.0


def measure_lengths(split: Documents) -> Lengths:
    """Exact statistics in one pass over the index, whatever the number of documents."""
    exact = np.zeros(EXACT_LENGTHS + 1, np.int64)
    powers = np.zeros(33, np.int64)
    shortest, longest = 1 << 31, 0
    for lengths in _pieces(split):
        exact += np.bincount(np.minimum(lengths, EXACT_LENGTHS), minlength=EXACT_LENGTHS + 1)
        # frexp gives 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7: the number of the bin.
        powers += np.bincount(np.frexp(lengths)[1], minlength=33)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    used = np.flatnonzero(powers)
    bins = []
    for power in range(int(used[0]), int(used[-1]) + 1) if len(used) else ():
        bins.append(((1 << power) >> 1, (1 << power) - 1, int(powers[power])))
    middle = _median(split, exact) if split.num_documents else 0.0
    return Lengths(split.num_documents, split.num_tokens, min(shortest, longest), middle, longest, bins)


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
    # Only where half of all documents are that long, and then there are few of them.
    return float(np.median(np.concatenate([*split.lengths()])))


def measure_text_bytes(store: TokenStore) -> tuple[float, int] | None:
    """Bytes of text per token, BOS and EOS counted as tokens, and how many documents were looked at.

    The manifest knows the size of the input files only, which may be compressed and hold more
    than text; so the tokens of documents spread over the train split are asked for their bytes.
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
    """The share of tokens that are trained on; None for a store that is not supervised."""
    if split.mask is None:
        return None
    count = 0
    for start in range(0, split.num_tokens, LENGTHS_AT_ONCE):
        count += int(split.mask.read(start, min(start + LENGTHS_AT_ONCE, split.num_tokens)).sum())
    return count / split.num_tokens if split.num_tokens else 0.0
