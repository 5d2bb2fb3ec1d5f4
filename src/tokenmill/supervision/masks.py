"""Map trained characters to trained tokens, and add the tokens around a document.

A token that crosses a boundary is trained on if any of its characters is, with the largest weight among them. So no
part of a response is left out, and at most the rest of its first and last token is trained on in addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.engines.alignment import Aligner, Places, count_bytes
from tokenmill.text_batch import IntArray, TokenBatch, Trained

__all__ = ["Assembled", "Weights", "assemble", "weigh_tokens"]

Weights = npt.NDArray[np.float32]


class Assembled(NamedTuple):
    """The tokens of documents as they are stored, the length of each document, and the loss weight of each token."""

    tokens: IntArray
    lengths: npt.NDArray[np.int32]
    weights: Weights


def weigh_tokens(texts: list[str], trained: list[Trained], batch: TokenBatch, aligner: Aligner) -> Weights:
    """Return the loss weight of each token of a batch, 0 if it is not trained on."""
    starts, stops = aligner.align(texts, batch)
    # Treat the documents as one text: shift each place by the bytes of the documents before it.
    sizes = count_bytes(texts)
    bases = np.cumsum(sizes) - sizes
    shifts = np.repeat(bases, np.diff(batch.offsets))
    starts, stops = starts + shifts, stops + shifts
    begins, ends, weights = _spans_in_bytes(texts, trained, bases.tolist())
    first = np.searchsorted(stops, begins, "right")
    last = np.searchsorted(starts, ends, "left")
    weighed = np.zeros(len(batch.ids), np.float32)
    covered = np.maximum(last - first, 0)
    where = np.arange(int(covered.sum())) + np.repeat(first - (np.cumsum(covered) - covered), covered)
    np.maximum.at(weighed, where, np.repeat(weights, covered))
    return weighed


def _spans_in_bytes(texts: list[str], trained: list[Trained], bases: list[int]) -> tuple[Places, Places, Weights]:
    spans: list[tuple[int, int, float]] = []
    for text, example, base in zip(texts, trained, bases, strict=True):
        if text.isascii():
            spans += [(base + start, base + stop, weight) for start, stop, weight in example.spans]
            continue
        # Spans are mostly in order, so each place is counted from the one before.
        character, byte = 0, base
        for start, stop, weight in example.spans:
            if start < character:
                character, byte = 0, base
            begin = byte + len(text[character:start].encode())
            character, byte = stop, begin + len(text[start:stop].encode())
            spans.append((begin, byte, weight))
    begins, ends, weights = zip(*spans, strict=True) if spans else ((), (), ())
    return np.array(begins, np.int64), np.array(ends, np.int64), np.array(weights, np.float32)


def assemble(
    batch: TokenBatch,
    weights: Weights,
    trained: list[Trained],
    *,
    bos_id: int | None,
    eos_id: int | None,
    dtype: npt.DTypeLike,
) -> Assembled:
    """Add BOS and EOS to documents that should have them and do not have them yet."""
    ids, offsets = batch.ids, batch.offsets
    firsts, lasts = offsets[:-1], offsets[1:] - 1
    filled = lasts >= firsts
    before = np.full(len(batch), bos_id is not None)
    before[filled] &= ids[firsts[filled]] != bos_id
    after = np.array([example.ends for example in trained], bool) & (eos_id is not None)
    after[filled] &= ids[lasts[filled]] != eos_id
    lengths = np.diff(offsets) + before + after
    stops = np.cumsum(lengths)
    inside = np.ones(int(stops[-1]) if len(stops) else 0, bool)
    heads, tails = (stops - lengths)[before], (stops - 1)[after]
    inside[heads] = inside[tails] = False
    tokens = np.empty(len(inside), dtype)
    weighed = np.zeros(len(inside), np.float32)
    tokens[inside], weighed[inside] = ids, weights
    if bos_id is not None:
        tokens[heads] = bos_id
    if eos_id is not None:
        tokens[tails] = eos_id
        weighed[tails] = np.array([example.spans[-1][2] for example in trained], np.float32)[after]
    return Assembled(tokens, lengths.astype(np.int32), weighed)
