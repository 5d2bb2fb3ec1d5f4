"""Rows of preference pairs, and rows of prompts.

A row of a pair is the tokens of the chosen answer with its prompt, then those of the rejected one. So rows of pairs are
shuffled, sliced, mixed, resumed and traced like all others; only their layout of a batch is their own.

A pair that a maximum length makes equal teaches nothing and has no row. Whether it does follows from lengths that the
store has beside each pair: with the start kept, two texts are equal if at least as many tokens are shared at their
start; with the end kept, at their end.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import numpy as np

from tokenmill.arguments import one_of, whole_number
from tokenmill.dataset.pack import LONGEST_ROW, PaddedRows
from tokenmill.dataset.rows import Integers, PackedRows, Segments, Spans, as_documents
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.sources import read_shared
from tokenmill.store.store import TokenSource

__all__ = ["LongPairs", "LongPrompts", "PairRows", "PromptRows", "pairs", "prompts"]

LongPairs = Literal["keep_start", "keep_end", "drop"]
"""What to do with an answer that is too long, with its prompt: the first two have the names and the effect of TRL's."""
LongPrompts = Literal["drop", "error"]


def pairs(
    source: TokenSource | Documents, *, max_length: int | None = None, long_documents: LongPairs = "keep_start"
) -> PairRows:
    """Make a row of each pair of a store (its first split), with at most `max_length` tokens of either text.

    By default nothing is cut off. Pairs that would be equal, or without an answer, after the cut have no row; the
    `report` of the rows counts them.
    """
    documents = _as_held(source, "pairs", "--chosen-key and --rejected-key")
    long_documents = cast("LongPairs", one_of(long_documents, get_args(LongPairs), "long_documents of pairs"))
    if max_length is None:
        max_length = _longest(documents)
    max_length = whole_number(max_length, "max_length", 1, LONGEST_ROW // 2)
    return PairRows(documents, max_length, long_documents=long_documents)


def prompts(
    source: TokenSource | Documents, *, max_length: int | None = None, long_documents: LongPrompts = "drop"
) -> PromptRows:
    """Make a row of each prompt of a store (its first split); those above `max_length` have none, or are an error."""
    documents = _as_held(source, "prompts", "--prompts-only")
    one_of(long_documents, get_args(LongPrompts), "long_documents of prompts")
    max_length = whole_number(max_length or _longest(documents), "max_length", 1, LONGEST_ROW)
    rows = PromptRows(documents, max_length)
    if long_documents == "error" and rows.report.num_dropped_documents:
        raise UsageError(
            f"{rows.report.num_dropped_documents:,} prompts of {documents.name} have more than {max_length:,} tokens, "
            f"the longest {_longest(documents):,}; raise the length, or pass long_documents='drop'"
        )
    return rows


def _as_held(source: TokenSource | Documents, what: str, flags: str) -> Documents:
    documents = as_documents(source, what)
    if documents.holds != what:
        held = documents.holds or "ordinary documents"
        raise UsageError(f"{documents.name} holds {held}, not {what}; tokenize {what} with {flags}")
    return documents


def _longest(documents: Documents) -> int:
    return max((int(lengths.max()) for lengths in documents.lengths()), default=1)


class PairRows(PackedRows):
    """One pair per row: the chosen text, then the rejected one; `seq_len` is twice the maximum length."""

    method = "pairs"
    layout = "pairs"
    has_lookahead = False

    def __init__(self, documents: Documents, max_length: int, *, long_documents: LongPairs) -> None:
        super().__init__(documents, 2 * max_length, long_documents=long_documents)
        self._max_length, self._long_documents = max_length, long_documents
        self._left_out = self._find_left_out()
        # A row is the pair that has as many pairs with a row before it: found by what comes before each left-out one.
        self._rows_before = self._left_out - np.arange(len(self._left_out))
        num_pairs = documents.num_documents // 2
        if len(self._left_out) == num_pairs:
            why = "; ".join(f"{count:,}: {reason}" for reason, count in self.report.left_out.items()) or "it is empty"
            raise UsageError(f"no pair of {documents.name} has a row of at most {plural(max_length, 'token')} ({why})")
        self._set_counts(num_pairs - len(self._left_out))

    def _find_left_out(self) -> Integers:
        """Count tokens and find the pairs without a row, in order."""
        report, most, found = self.report, self._max_length, [np.zeros(0, np.int64)]
        first = 0
        for lengths in self.documents.lengths():
            both = lengths.reshape(-1, 2)
            cut = np.minimum(both, most)
            gone = np.flatnonzero((both > most).any(axis=1))
            if self._long_documents != "drop":
                gone = self._judge(gone + first, both[gone])
            elif len(gone):
                self._count_left_out(f"an answer is longer than {plural(most, 'token')}", len(gone))
                gone = gone + first
            kept = np.ones(len(both), bool)
            kept[gone - first] = False
            report.num_tokens += int(cut[kept].sum())
            report.num_truncated_documents += int((both > most)[kept].sum())
            report.num_truncated_tokens += int((both - cut)[kept].sum())
            found.append(gone)
            first += len(both)
        return np.concatenate(found)

    def _judge(self, pairs: Integers, lengths: Integers) -> Integers:
        """Return which pairs with a long text have no row once it is cut."""
        # Only if both are cut, or just fit, can they become equal.
        pairs = pairs[(lengths >= self._max_length).all(axis=1)]
        if not len(pairs):
            return pairs
        num_prompt, prefix, suffix = read_shared(self.documents, 2 * pairs)
        if self._long_documents == "keep_end":
            equal = suffix >= self._max_length
            self._count_left_out("equal once cut", int(equal.sum()))
            return pairs[equal]
        equal = prefix >= self._max_length
        unanswered = num_prompt >= self._max_length
        self._count_left_out("the prompt fills the length", int(unanswered.sum()))
        self._count_left_out("equal once cut", int((equal & ~unanswered).sum()))
        return pairs[equal]

    def _count_left_out(self, reason: str, count: int) -> None:
        if count:
            self.report.left_out[reason] = self.report.left_out.get(reason, 0) + count

    def _pairs_of(self, index: Integers) -> Integers:
        rows = index % self.num_rows
        return rows + np.searchsorted(self._rows_before, rows, "right")

    def _pieces(self, index: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Return the two documents of each row, the first token of each that is kept, how many, and how many it has."""
        first = 2 * self._pairs_of(index)
        documents = np.stack([first, first + 1], axis=1).reshape(-1)
        starts, stops = self._bounds(documents)
        whole = stops - starts
        lengths = np.minimum(whole, self._max_length)
        starts = stops - lengths if self._long_documents == "keep_end" else starts
        return documents, starts, lengths, whole

    def spans(self, index: Integers) -> Spans:
        """Find two spans per row."""
        _, starts, lengths, _ = self._pieces(index)
        return Spans(2 * np.arange(1, len(index) + 1), starts, lengths)

    def segments(self, index: Integers) -> Segments:
        """Find the two documents of each row."""
        documents, _, lengths, whole = self._pieces(index)
        starts = np.zeros(len(lengths), np.int64)
        starts[1::2] = lengths[::2]
        is_end = (whole <= self._max_length) | (self._long_documents == "keep_end")
        return Segments(2 * np.arange(1, len(index) + 1), starts, lengths, documents, is_end)

    def title(self) -> str:
        """Return one line for the tree."""
        return f"pairs of at most {plural(self._max_length, 'token')} each, {self._long_documents}: {self.report}"

    def rows_of(self, document: int) -> list[int]:
        """Return the row of its pair, if it has one."""
        place = int(np.searchsorted(self._left_out, document // 2))
        is_left_out = place < len(self._left_out) and self._left_out[place] == document // 2
        return [] if is_left_out else [document // 2 - place]


class PromptRows(PaddedRows):
    """One prompt per row; longer ones have no row."""

    method = "prompts"
    layout = "prompts"

    def __init__(self, documents: Documents, max_length: int) -> None:
        super().__init__(documents, max_length, long_documents="drop")
