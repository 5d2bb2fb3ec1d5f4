"""Documents cut and joined into rows: `concat`, `best-fit` or `pad`.

`concat` cuts the stream of all tokens every `seq_len`, by arithmetic and without an index. `best-fit` (in
`bestfit.py`) keeps documents whole wherever they fit. `pad` gives every document a row of its own.
The `report` of a packing counts what it leaves out.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np

from tokenmill.arguments import one_of, whole_number
from tokenmill.dataset.bestfit import BestFitRows
from tokenmill.dataset.packing_report import LongDocuments, PackingReport
from tokenmill.dataset.rows import Integers, PackedRows, Segments, Spans, as_documents, as_seed, refuse_special
from tokenmill.dataset.uneven import UnevenRows
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource

__all__ = ["ConcatRows", "PaddedRows", "pack"]

Method = Literal["concat", "best-fit", "pad"]
LONGEST_ROW = (1 << 31) - 1
MANY_ROWS = 1024
"""From this many rows on, reading the index into memory saves time."""
MOST_KEPT_ROWS = 1 << 22
"""Up to this many rows, the first document of each is kept in memory, eight bytes each."""


def pack(
    source: TokenSource | Documents,
    *,
    seq_len: int,
    method: Method = "concat",
    long_documents: LongDocuments = "split",
    seed: int = 0,
    max_documents: int | None = None,
    align: int = 1,
    max_length: int | None = None,
) -> PackedRows:
    """Cut a store (its first split) or some of its documents into rows of `seq_len` tokens.

    `long_documents` says what `best-fit` and `pad` do with documents that are longer than a row. `seed` decides
    the order in which `best-fit` takes documents. No row has more than `max_documents`, so that batches have fixed
    shapes: `cu_seqlens` has the same length in each of them. Documents are padded to multiples of `align` tokens. With
    `max_length`, documents above it are long even if they fit a row of `best-fit`.
    """
    documents = as_documents(source, "pack")
    seq_len, seed = whole_number(seq_len, "seq_len", 1, LONGEST_ROW), as_seed(seed)
    one_of(method, get_args(Method), "packing")
    long_documents = cast("LongDocuments", one_of(long_documents, get_args(LongDocuments), "long_documents"))
    if documents.holds is not None:
        raise refuse_special(documents)
    align = whole_number(align, "align", 1, LONGEST_ROW)
    if max_documents is not None:
        max_documents = whole_number(max_documents, "max_documents", 1, LONGEST_ROW)
    if seq_len % align:
        raise UsageError(f"seq_len {seq_len:,} is not a multiple of align {align:,}; change one of them")
    if max_length is not None:
        max_length = whole_number(max_length, "max_length", 1)
        if method != "best-fit" or max_length > seq_len:
            raise UsageError(
                f"max_length {max_length:,} is for packing='best-fit' and rows of at least as many tokens, and this is "
                f"{method!r} with {seq_len:,}; leave it out"
            )
    shape: Any = {"max_documents": max_documents, "align": align}
    if method == "best-fit":
        return BestFitRows(documents, seq_len, long_documents=long_documents, seed=seed, max_length=max_length, **shape)
    if method == "pad":
        return PaddedRows(documents, seq_len, long_documents=long_documents, **shape)
    if align > 1:
        raise UsageError(f"align {align:,} pads documents, and packing='concat' joins them; use 'best-fit' or 'pad'")
    if max_documents is not None:
        from tokenmill.dataset.bounded_concat import BoundedConcatRows

        return BoundedConcatRows(documents, seq_len, max_documents)
    return ConcatRows(documents, seq_len)


class ConcatRows(PackedRows):
    """The stream of all tokens, cut every `seq_len`; the last target of a row is the first token of the next one."""

    method = "concat"
    has_lookahead = True

    def __init__(self, documents: Documents, seq_len: int) -> None:
        super().__init__(documents, seq_len)
        self.num_rows = (documents.num_tokens - 1) // seq_len if documents.num_tokens else 0
        if self.num_rows < 1:
            raise UsageError(
                f"{documents.name} has {plural(documents.num_tokens, 'token')} and a row of {seq_len:,} needs "
                f"{seq_len + 1:,}; use a smaller seq_len, or packing='pad'"
            )
        self.num_tokens = self.num_rows * seq_len
        left_over = documents.num_tokens - self.num_tokens
        self.report = PackingReport(self.num_rows, self.num_tokens, num_left_over_tokens=left_over)

    def spans(self, index: Integers) -> Spans:
        """Find one span per row, with one token more than the row."""
        starts = index % self.num_rows * self.seq_len
        return Spans(np.arange(1, len(index) + 1), starts, np.full(len(index), self.seq_len + 1))

    def segments(self, index: Integers) -> Segments:
        """Find the documents between the first and the last token of each row."""
        row_starts = index % self.num_rows * self.seq_len
        counts, numbers, starts, stops = self._find(row_starts)
        ends = np.cumsum(counts)
        # Documents are contiguous: only the first of a row may begin before it, and only the last end after it.
        starts -= row_starts.repeat(counts)
        starts[ends - counts] = 0
        lengths = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[ends - 1] = self.seq_len - starts[ends - 1]
        is_end = np.ones(len(starts), bool)
        is_end[ends - 1] = stops <= row_starts + self.seq_len
        if lengths.min(initial=1) == 0:
            # A store without BOS and EOS may have documents without a token.
            filled = lengths > 0
            rows = np.repeat(np.arange(len(index)), counts)
            ends = np.cumsum(np.bincount(rows[filled], minlength=len(index)))
            return Segments(ends, starts[filled], lengths[filled], numbers[filled], is_end[filled])
        return Segments(ends, starts, lengths, numbers, is_end)

    def _find(self, row_starts: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Find how many documents each row has, their numbers and first tokens, and where the last one ends.

        With the index in memory this takes a third of the time, but for a few rows reading the index takes longer.
        """
        if len(row_starts) < MANY_ROWS or not self._keeps_starts or self.num_rows > MOST_KEPT_ROWS:
            counts, numbers, starts, stops = self.documents.find_all(row_starts, self.seq_len)
            return counts, numbers, starts, stops[np.cumsum(counts) - 1]
        rows = row_starts // self.seq_len
        firsts = self._documents_before[rows]
        firsts -= self._starts[firsts] != row_starts
        after = self._documents_before[rows + 1]
        counts = after - firsts
        numbers = np.arange(int(counts.sum()))
        numbers += (firsts - (np.cumsum(counts) - counts)).repeat(counts)
        return counts, numbers, self._starts[numbers], self._starts[after]

    @cached_property
    def _documents_before(self) -> Integers:
        """The number of documents that start before each row."""
        return np.searchsorted(self._starts, np.arange(self.num_rows + 1) * self.seq_len)

    def rows_of(self, document: int) -> list[int]:
        """Return all rows between its first and its last token."""
        (start,), (stop,) = (some.tolist() for some in self.documents.bounds(np.array([document])))
        end = -(-stop // self.seq_len) if stop > start else 0
        return list(range(start // self.seq_len, min(end, self.num_rows)))


class PaddedRows(PackedRows):
    """One document per row, then padding; a long document takes several rows, or is truncated or dropped."""

    method = "pad"
    has_lookahead = False

    def __init__(self, documents: Documents, seq_len: int, *, long_documents: LongDocuments, **shape: Any) -> None:
        super().__init__(documents, seq_len, long_documents=long_documents, **shape)
        self._rows = UnevenRows(documents.num_documents, *self._find_odd(long_documents))
        self._set_counts(self._rows.num_rows)

    def _find_odd(self, long_documents: LongDocuments) -> tuple[Integers, Integers]:
        """Find the documents that have no row or several, and count their rows."""
        odd, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        first = 0
        for lengths in self.documents.lengths():
            rows = self.report.count(lengths, self.seq_len, long_documents)
            here = np.flatnonzero(rows != 1)
            odd.append(here + first)
            counts.append(rows[here])
            first += len(lengths)
        return np.concatenate(odd), np.concatenate(counts)

    def spans(self, index: Integers) -> Spans:
        """Find one span per row."""
        _, starts, left = self._locate(index)
        return Spans(np.arange(1, len(index) + 1), starts, np.minimum(left, self.seq_len))

    def segments(self, index: Integers) -> Segments:
        """Find one document per row."""
        documents, _, left = self._locate(index)
        ends, lengths = np.arange(1, len(index) + 1), np.minimum(left, self.seq_len)
        return Segments(ends, np.zeros(len(index), np.int64), lengths, documents, left <= self.seq_len)

    def _locate(self, index: Integers) -> tuple[Integers, Integers, Integers]:
        """Find the document of each row, the first of its tokens in the row, and how many it has from there on."""
        documents, parts = self._rows.find(index % self.num_rows)
        starts, stops = self.documents.bounds(documents)
        starts = starts + parts * self.seq_len
        return documents, starts, stops - starts

    def rows_of(self, document: int) -> list[int]:
        """Return its row, or those of its parts."""
        return list(range(self.first_row(document), self.first_row(document + 1)))

    def first_row(self, document: int) -> int:
        """Count the rows of all documents before one, which is its first row if it has any."""
        return self._rows.first_row(document)
