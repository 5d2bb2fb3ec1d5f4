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

from tokenmill.engines.decoder import Decoder
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import StoreError
from tokenmill.formatting import shorten, show_safely
from tokenmill.store.documents import Documents
from tokenmill.tools.report.figures import LongRun, TokenCount, TokenFigures

__all__ = ["PIECE_TOKENS", "Piece", "TokenTally", "Vocabulary", "Worst", "choose_pieces", "cut_pieces"]

Integers = npt.NDArray[np.int64]

PIECE_TOKENS = 1 << 16
SHORTEST_RUN = 4
NUM_FREQUENT, NUM_RUNS, NUM_EXAMPLES = 20, 15, 10
REPEATING_SHARE, REPEATING_TOKENS = 0.5, 32
"""A document is repetitive if one token makes up half of it, and it has at least this many tokens."""


REPLACEMENT = "\ufffd".encode()
LONGEST_PIECE = 20
ENDS_1, ENDS_2, IS_MIDDLE, STARTS_2, STARTS_1 = 1, 2, 4, 8, 16
"""Flags of tokens that hold a part of U+FFFD, which is EF BF BD: EF or EF BF at their end, only BF, BF BD or BD at
their start."""


class Vocabulary:
    """For every id the size in bytes (0 for special tokens), and which parts of U+FFFD it holds, as arrays."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._decoder = Decoder(tokenizer)
        self.specials = frozenset(tokenizer.special_tokens.values())
        spellings = [b"" if token in self.specials else self.spell(token) for token in range(size)]
        self.sizes = np.array([len(spelling) for spelling in spellings], np.int64)
        self._replacements = np.array([spelling.count(REPLACEMENT) for spelling in spellings], np.int64)
        self._parts = np.array([_parts_of_replacement(spelling) for spelling in spellings], np.uint8)

    def spell(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the vocabulary does not use."""
        try:
            return self._decoder.token_bytes(token)
        except (KeyError, IndexError, ValueError):
            return b""

    def show(self, token: int) -> str:
        """Show a token in a table, with visible spaces and bytes."""
        return _show_piece(self.spell(token))

    def count_replacements(self, ids: np.ndarray) -> np.ndarray:
        """Count for each token the characters U+FFFD that end in it, even if they begin in an earlier token."""
        found: np.ndarray = self._replacements[ids]
        parts = self._parts[ids]
        if not parts.any():
            return found
        before, here = parts[:-1], parts[1:]
        found[1:] += ((before & ENDS_1 > 0) & (here & STARTS_2 > 0)) | ((before & ENDS_2 > 0) & (here & STARTS_1 > 0))
        found[2:] += (parts[:-2] & ENDS_1 > 0) & (parts[1:-1] & IS_MIDDLE > 0) & (parts[2:] & STARTS_1 > 0)
        return found


def _parts_of_replacement(spelling: bytes) -> int:
    parts = ENDS_1 * spelling.endswith(b"\xef") + ENDS_2 * spelling.endswith(b"\xef\xbf")
    parts += IS_MIDDLE * (spelling == b"\xbf")
    return parts + STARTS_2 * spelling.startswith(b"\xbf\xbd") + STARTS_1 * spelling.startswith(b"\xbd")


def _show_piece(spelling: bytes) -> str:
    """Show bytes as the text of a table cell."""
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        return " ".join(f"0x{byte:02X}" for byte in spelling)
    return shorten(show_safely(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")), LONGEST_PIECE)


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
