"""Statistics of tokens: how often each occurs, long runs, and documents that look wrong.

A store is divided into pieces of about 65,536 tokens. They begin and end with documents, unless a document is longer
than a piece. Of a large store, evenly spread pieces are read. Everything here works on arrays, one piece at a time: a
billion tokens must not become a billion Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.store.documents import Documents
from tokenmill.tools.report.figures import LongRun, TokenCount, TokenFigures
from tokenmill.tools.report.vocabulary import Vocabulary

__all__ = ["PIECE_TOKENS", "Piece", "TokenTally", "Worst", "choose_pieces", "cut_pieces"]

Integers = npt.NDArray[np.int64]

PIECE_TOKENS = 1 << 16
SHORTEST_RUN = 4
NUM_FREQUENT, NUM_RUNS, NUM_EXAMPLES = 20, 15, 10
REPEATING_SHARE, REPEATING_TOKENS = 0.5, 32
"""A document is repetitive if one token makes up half of it, and it has at least this many tokens."""


class Piece(NamedTuple):
    """Consecutive tokens, and the parts of documents that they form, none of them empty."""

    ids: npt.NDArray[Any]
    starts: Integers
    """The first token of each part, counted from the start of the piece."""
    documents: Integers
    """The number of each part's document in the split."""
    first_token: int
    """Where in the split the piece starts."""
    trained: npt.NDArray[Any] | None

    @property
    def lengths(self) -> Integers:
        """Tokens of each part."""
        return np.diff(self.starts, append=len(self.ids))


def choose_pieces(num_tokens: Integers, most_tokens: int) -> list[Integers]:
    """Choose the pieces of each shard to read, spread evenly over all shards."""
    counts = -(-num_tokens // PIECE_TOKENS)
    total = int(counts.sum())
    wanted = total if int(num_tokens.sum()) <= most_tokens else max(1, min(total, most_tokens // PIECE_TOKENS))
    chosen = np.arange(wanted) * total // max(1, wanted) + (total // max(1, wanted)) // 2
    firsts = np.cumsum(counts) - counts
    edges = np.searchsorted(chosen, np.append(firsts, total))
    return [chosen[edges[n] : edges[n + 1]] - firsts[n] for n in range(len(counts))]


def cut_pieces(split: Documents, edges: Integers, chosen: Integers, *, first_document: int) -> Iterator[Piece]:
    """Read pieces of one shard; `edges` are the starts of its documents in the split, and its end."""
    first_token, end = int(edges[0]), int(edges[-1])
    for number in chosen.tolist():
        start, stop = (_edge(edges, first_token + place * PIECE_TOKENS, end) for place in (number, number + 1))
        first = int(np.searchsorted(edges, start, "right")) - 1
        last = int(np.searchsorted(edges, stop, "left"))
        starts = np.maximum(edges[first:last], start)
        filled = np.flatnonzero(np.minimum(edges[first + 1 : last + 1], stop) > starts)
        yield Piece(
            split.read(start, stop),
            starts[filled] - start,
            first_document + first + filled,
            start,
            split.mask.read(start, stop) if split.mask is not None else None,
        )


def _edge(edges: Integers, place: int, end: int) -> int:
    """Move the beginning of a piece from `place` to the start of its document, unless that is too far away."""
    if place >= end:
        return end
    start = int(edges[np.searchsorted(edges, place, "right") - 1])
    return start if place - start < PIECE_TOKENS else place


class Worst:
    """The documents with the highest scores; of equal scores, the earlier one."""

    def __init__(self) -> None:
        self.num_documents = 0
        self.scores = np.zeros(0)
        self.documents = np.zeros(0, np.int64)
        self._last = -1

    def offer(self, scores: npt.NDArray[Any], documents: Integers) -> None:
        """Add documents with a defect, in order; a long document may occur again in the next piece."""
        if not len(documents):
            return
        self.num_documents += len(documents) - int(documents[0] == self._last)
        self._last = int(documents[-1])
        scores, documents = np.concatenate([self.scores, scores]), np.concatenate([self.documents, documents])
        order = np.argsort(-scores, kind="stable")
        _, firsts = np.unique(documents[order], return_index=True)
        best = order[np.sort(firsts)][:NUM_EXAMPLES]
        self.scores, self.documents = scores[best], documents[best]


class TokenTally:
    """Counts over all pieces of all splits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        size = len(vocabulary.sizes)
        self.counts = np.zeros(size, np.int64)
        self._longest = np.zeros(size, np.int64)
        # The split and the document of each longest run.
        self._places = np.zeros((size, 2), np.int64)
        self.num_documents = 0
        self._last_document = -1
        self.repeating: list[Worst] = []
        self.replaced: list[Worst] = []

    def start_split(self) -> None:
        """Begin the next split."""
        self.repeating.append(Worst())
        self.replaced.append(Worst())
        self._last_document = -1

    def add(self, piece: Piece) -> Integers:
        """Count a piece, and return the bytes of each part."""
        if int(piece.ids.max()) >= len(self.counts) or int(piece.ids.min()) < 0:
            worst = int(piece.ids.max()) if int(piece.ids.min()) >= 0 else int(piece.ids.min())
            raise StoreError(
                f"the store holds the id {worst} and its tokenizer has {len(self.counts)}; run tokenmill verify"
            )
        self.num_documents += len(piece.starts) - int(piece.documents[0] == self._last_document)
        self._last_document = int(piece.documents[-1])
        self.counts += np.bincount(piece.ids, minlength=len(self.counts))
        self._add_runs(piece)
        self._add_repetition(piece)
        replaced = np.add.reduceat(self._vocabulary.count_replacements(piece.ids), piece.starts)
        some = np.flatnonzero(replaced)
        self.replaced[-1].offer(replaced[some].astype(float), piece.documents[some])
        sizes: Integers = np.add.reduceat(self._vocabulary.sizes[piece.ids], piece.starts)
        return sizes

    def _add_runs(self, piece: Piece) -> None:
        """Find runs of one token within a document."""
        begins = np.ones(len(piece.ids), bool)
        begins[1:] = piece.ids[1:] != piece.ids[:-1]
        begins[piece.starts] = True
        places = np.flatnonzero(begins)
        lengths = np.diff(places, append=len(piece.ids))
        tokens = piece.ids[places].astype(np.int64)
        better = np.flatnonzero((lengths >= SHORTEST_RUN) & (lengths > self._longest[tokens]))
        # The longest run of a token comes last and wins; of equal ones, the first in the store does.
        better = better[np.lexsort((-better, lengths[better]))]
        parts = np.searchsorted(piece.starts, places[better], "right") - 1
        self._longest[tokens[better]] = lengths[better]
        self._places[tokens[better], 0] = len(self.repeating) - 1
        self._places[tokens[better], 1] = piece.documents[parts]

    def _add_repetition(self, piece: Piece) -> None:
        """Find parts in which one token dominates, by sorting the tokens of each part."""
        lengths = piece.lengths
        size = len(self.counts)
        keys = np.repeat(np.arange(len(lengths)) * size, lengths) + piece.ids
        keys.sort()
        places = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(places, append=len(keys))
        firsts = np.searchsorted(keys[places], np.arange(len(lengths)) * size)
        shares = np.maximum.reduceat(counts, firsts) / lengths
        some = np.flatnonzero((shares >= REPEATING_SHARE) & (lengths >= REPEATING_TOKENS))
        self.repeating[-1].offer(shares[some], piece.documents[some])

    def figures(self, splits: list[str], num_tokens: int) -> TokenFigures:
        """Summarize the counts for a report."""
        order = np.argsort(-self.counts, kind="stable")
        num_used = int(np.count_nonzero(self.counts))
        num_seen = int(self.counts.sum())
        sums = np.cumsum(self.counts[order])
        steps = [step for step in (1, 10, 100, 1000, 10_000, 100_000) if step < num_used]
        return TokenFigures(
            num_seen=num_seen,
            is_everything=num_seen == num_tokens,
            vocab_size=len(self.counts),
            num_unused=len(self.counts) - num_used,
            frequent=[
                TokenCount(id=token, text=self._vocabulary.show(token), count=int(self.counts[token]))
                for token in order[: min(NUM_FREQUENT, num_used)].tolist()
            ],
            coverage=[(step, float(sums[step - 1] / num_seen)) for step in steps],
            runs=list(self._runs(splits)),
        )

    def _runs(self, splits: list[str]) -> Iterator[LongRun]:
        for token in np.argsort(-self._longest, kind="stable")[:NUM_RUNS].tolist():
            if not self._longest[token]:
                return
            split, document = self._places[token].tolist()
            yield LongRun(
                id=token,
                text=self._vocabulary.show(token),
                num_tokens=int(self._longest[token]),
                split=splits[split],
                document=document,
            )
