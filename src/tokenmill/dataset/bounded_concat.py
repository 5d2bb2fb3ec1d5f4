"""The stream of all tokens in rows with at most some number of documents each.

The stream is cut every `seq_len` as by `ConcatRows`. Such a cut with more documents than a row may have becomes
several rows, each with the next documents and then padding. So every row begins at a place that is known without the
rows before it, and only cuts with too many documents are kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenmill.dataset.pack import ConcatRows
from tokenmill.dataset.packing_report import PackingReport
from tokenmill.dataset.rows import Integers, PackedRows, ResolvedRows, Segments, Spans
from tokenmill.dataset.uneven import UnevenRows
from tokenmill.store.documents import Documents

__all__ = ["BoundedConcatRows"]


class BoundedConcatRows(PackedRows):
    """Concat rows with a bound on documents; the last token of a row that ends early has no target."""

    method = "concat"
    has_lookahead = False

    def __init__(self, documents: Documents, seq_len: int, max_documents: int) -> None:
        super().__init__(documents, seq_len, max_documents=max_documents)
        self._most = max_documents
        self._cuts = ConcatRows(documents, seq_len)
        self._cuts.part_of = self
        full = [(cuts, -(-counts // max_documents)) for cuts, counts in self._count_documents()]
        odd, counts = (np.concatenate(some) for some in zip(*full, strict=True))
        self._rows = UnevenRows(self._cuts.num_rows, odd, counts)
        self.num_rows, self.num_tokens = self._rows.num_rows, self._cuts.num_tokens
        self.report = PackingReport(
            self.num_rows,
            self.num_tokens,
            num_padding_tokens=self.num_rows * seq_len - self.num_tokens,
            num_left_over_tokens=self._cuts.report.num_left_over_tokens,
            num_bounded_rows=self.num_rows - self._cuts.num_rows,
        )

    def _count_documents(self) -> Iterator[tuple[Integers, Integers]]:
        """Yield the cuts with too many documents, and how many each has."""
        none = np.zeros(0, np.int64)
        yield none, none
        start, cut, count = 0, 0, 0
        for lengths in self.documents.lengths():
            lengths = lengths[lengths > 0].astype(np.int64)
            if not len(lengths):
                continue
            starts = start + np.cumsum(lengths) - lengths
            start = int(starts[-1] + lengths[-1])
            cuts = starts // self.seq_len
            last = int(cuts[-1])
            counts = np.bincount(cuts - cut, minlength=1)
            # A document that does not start with a cut reaches into it from the one before.
            begins = np.zeros(last - cut + 1, np.int64)
            begins[1:] = 1
            at_start = cuts[starts == cuts * self.seq_len] - cut
            begins[at_start[at_start > 0]] = 0
            counts = counts + begins
            counts[0] += count
            # The next block of lengths may have more documents of the last cut.
            yield from self._select(cut, counts[:-1])
            cut, count = last, int(counts[-1])
        yield from self._select(cut, np.array([count]))

    def _select(self, first: int, counts: Integers) -> Iterator[tuple[Integers, Integers]]:
        counts = counts[: max(0, self._cuts.num_rows - first)]
        many = np.flatnonzero(counts > self._most)
        yield many + first, counts[many]

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Return whole cuts as rows of `ConcatRows`, which are in one piece, and the others as rows of this packing."""
        cuts, _ = self._rows.find(index % self.num_rows)
        is_short = self._rows.are_odd(cuts)
        if not is_short.any():
            return [ResolvedRows(self._cuts, None, cuts)]
        if is_short.all():
            return [ResolvedRows(self, None, index)]
        whole, short = np.flatnonzero(~is_short), np.flatnonzero(is_short)
        return [ResolvedRows(self._cuts, whole, cuts[whole]), ResolvedRows(self, short, index[short])]

    def spans(self, index: Integers) -> Spans:
        """Find one span per row."""
        segments, firsts = self._select_documents(index)
        ends = segments.ends
        lasts = ends - 1
        return Spans(np.arange(1, len(index) + 1), firsts, segments.starts[lasts] + segments.lengths[lasts])

    def segments(self, index: Integers) -> Segments:
        """Find the documents of rows."""
        return self._select_documents(index)[0]

    def _select_documents(self, index: Integers) -> tuple[Segments, Integers]:
        """Find the documents of rows, and the first token of each row."""
        cuts, parts = self._rows.find(index % self.num_rows)
        found = self._cuts.segments(cuts)
        counts = np.diff(found.ends, prepend=0)
        begins = found.ends - counts + parts * self._most
        sizes = np.minimum(counts - parts * self._most, self._most)
        ends = np.cumsum(sizes)
        chosen = np.arange(int(sizes.sum())) + np.repeat(begins - (ends - sizes), sizes)
        offsets = found.starts[begins]
        starts, lengths, documents, is_end = (field[chosen] for field in found[1:])
        segments = Segments(ends, starts - np.repeat(offsets, sizes), lengths, documents, is_end)
        return segments, cuts * self.seq_len + offsets

    def rows_of(self, document: int) -> list[int]:
        """Return the rows of its cuts that hold some of its tokens."""
        cuts = self._cuts.rows_of(document)
        if not cuts:
            return []
        rows = np.arange(self._rows.first_row(cuts[0]), self._rows.first_row(cuts[-1] + 1))
        segments = self.segments(rows)
        mine = np.flatnonzero(segments.documents == document)
        found: list[int] = rows[np.searchsorted(segments.ends, mine, "right")].tolist()
        return found

    def first_row(self, token: int) -> int:
        """Return the first row that begins at or after a token of the stream, if that is the start of a document."""
        cut, offset = divmod(token, self.seq_len)
        first = self._rows.first_row(min(cut, self._cuts.num_rows))
        if not offset or cut >= self._cuts.num_rows:
            return first
        starts = self.spans(np.arange(first, self._rows.first_row(cut + 1))).starts
        return first + int(np.searchsorted(starts, token))
