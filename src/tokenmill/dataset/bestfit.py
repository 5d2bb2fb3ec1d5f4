"""Best-fit packing: documents stay whole where they fit a row, and rows are nearly full.

Documents are permuted, once for all epochs, and packed in windows of 65,536 by best-fit decreasing; a
window is a function of the documents, the row length and the seed. So rows are random access:
how many rows each window has is counted when the dataset is made, and a window is packed again when
one of its rows is wanted. Up to ten million documents all windows are kept, four bytes a document.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.base import Integers, PackedRows, Spans
from tokenmill.dataset.fitting import count_bins, fit
from tokenmill.dataset.permutation import make_key, permute, unpermute
from tokenmill.dataset.report import LongDocuments, PackingReport
from tokenmill.dataset.segments import Segments
from tokenmill.errors import UsageError
from tokenmill.store.documents import Documents

__all__ = ["BestFitRows"]

WINDOW = 1 << 16
MOST_KEPT_DOCUMENTS = 10_000_000
"""Above this many, a few windows are kept, and a shuffle is hierarchical: see `BestFitRows.permute`."""
NUM_KEPT_WINDOWS = 64
WINDOWS_PER_GROUP = 32


class _Window(NamedTuple):
    """The rows of one window: first those that one part of a long document fills, then those of several documents.

    Row i of the second kind has the documents from `ends[i - 1]` up to `ends[i]` of `documents`.
    """

    full_documents: npt.NDArray[np.unsignedinteger[Any]]
    full_parts: npt.NDArray[np.uint32]
    documents: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.uint32]


class BestFitRows(PackedRows):
    """Rows of whole documents; a row holds `seq_len` tokens and no target behind a document's last token."""

    has_lookahead = False

    def __init__(self, documents: Documents, seq_len: int, *, long_documents: LongDocuments, seed: int) -> None:
        self.documents = documents
        self.seq_len = seq_len
        self._long_documents = long_documents
        self._seed = seed
        self._key = make_key(seed, 1)
        self._keeps_all = documents.num_documents <= MOST_KEPT_DOCUMENTS
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._lock = threading.Lock()
        self.report = PackingReport()
        known = np.concatenate([*documents.lengths()]) if self._keeps_all and documents.num_documents else None
        counts = [self._count_rows(window, known) for window in range(-(-documents.num_documents // WINDOW))]
        self._row_ends = np.cumsum(np.array(counts, np.int64))
        self.num_rows = int(self._row_ends[-1]) if counts else 0
        if self.num_rows < 1:
            raise UsageError(f"{documents.name} has no document that fits a row of {seq_len:,} tokens")
        self.num_tokens = self.report.num_tokens
        self.report.num_rows = self.num_rows
        self.report.num_padding_tokens = self.num_rows * seq_len - self.num_tokens

    def _members(self, window: int) -> Integers:
        """The documents of a window."""
        first = window * WINDOW
        places = np.arange(first, min(first + WINDOW, self.documents.num_documents))
        return permute(places, self.documents.num_documents, self._key)

    def _count_rows(self, window: int, known: Integers | None) -> int:
        """Pack or only count a window; `known` are the lengths of all documents, which saves looking them up."""
        members = self._members(window)
        lengths = self._lengths(members) if known is None else known[members]
        self.report.count(lengths, self.seq_len, self._long_documents)
        if self._keeps_all:
            packed = self._windows[window] = self._pack(members, lengths)
            return len(packed.full_documents) + len(packed.ends)
        whole, rest = self._divide(lengths)
        return int(whole.sum()) + count_bins(rest[rest > 0], self.seq_len)

    def _lengths(self, documents: Integers) -> Integers:
        starts, stops = self.documents.bounds(documents)
        return stops - starts

    def _divide(self, lengths: Integers) -> tuple[Integers, Integers]:
        """How many rows a document fills alone, and the tokens it shares a row with."""
        if self._long_documents == "split":
            return np.divmod(lengths, self.seq_len)
        if self._long_documents == "truncate":
            return np.zeros_like(lengths), np.minimum(lengths, self.seq_len)
        return np.zeros_like(lengths), np.where(lengths > self.seq_len, 0, lengths)

    def _pack(self, members: Integers, lengths: Integers) -> _Window:
        kind = np.uint32 if self.documents.num_documents < 1 << 32 else np.uint64
        whole, rest = self._divide(lengths)
        full = np.repeat(np.arange(len(lengths)), whole)
        parts = np.arange(len(full)) - np.repeat(np.cumsum(whole) - whole, whole)
        shared = np.flatnonzero(rest)
        fitted = fit(rest[shared], self.seq_len)
        return _Window(
            members[full].astype(kind),
            parts.astype(np.uint32),
            members[shared[fitted.order]].astype(kind),
            fitted.ends.astype(np.uint32),
        )

    def _window(self, number: int) -> _Window:
        if self._keeps_all:
            return self._windows[number]
        with self._lock:
            window = self._windows.pop(number, None)
            if window is None:
                members = self._members(number)
                window = self._pack(members, self._lengths(members))
            self._windows[number] = window
            if len(self._windows) > NUM_KEPT_WINDOWS:
                self._windows.popitem(last=False)
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def permute(self, index: Integers, key: int) -> Integers:
        """The order of a shuffle: global while all windows are kept.

        Above ten million documents, rows are permuted in groups of windows that are in memory
        together, and windows are permuted among groups. Documents had been permuted globally before
        they came to windows, so that a group is a random sample of the corpus, of two million
        documents.
        """
        if self._keeps_all:
            return super().permute(index, key)
        return _GroupedOrder(self._row_ends, key).row_at(index)

    def unpermute(self, index: Integers, key: int) -> Integers:
        """What `permute` sends to each number."""
        if self._keeps_all:
            return super().unpermute(index, key)
        return _GroupedOrder(self._row_ends, key).place_of(index)

    def rows_of(self, document: int) -> list[int]:
        """The rows of its window that hold a part of it."""
        place = int(unpermute(np.array([document]), self.documents.num_documents, self._key)[0])
        number = place // WINDOW
        window = self._window(number)
        first = int(self._row_ends[number - 1]) if number else 0
        full = np.flatnonzero(window.full_documents == document)
        shared = np.searchsorted(window.ends, np.flatnonzero(window.documents == document), "right")
        return [first + row for row in [*full.tolist(), *(shared + len(window.full_documents)).tolist()]]

    def spans(self, index: Integers) -> Spans:
        """The pieces of documents in each row."""
        segments, starts = self._locate(index)
        return Spans(segments.ends, starts, segments.lengths)

    def segments(self, index: Integers) -> Segments:
        """The documents of rows."""
        return self._locate(index)[0]

    def _locate(self, index: Integers) -> tuple[Segments, Integers]:
        """The documents of rows, and the first token of each piece; window by window."""
        rows = index % self.num_rows
        windows = np.searchsorted(self._row_ends, rows, "right")
        counts = np.zeros(len(rows), np.int64)
        found = []
        for window in np.flatnonzero(np.bincount(windows)).tolist():
            mine = np.flatnonzero(windows == window)
            first = int(self._row_ends[window - 1]) if window else 0
            members, parts, sizes = _find_pieces(self._window(window), rows[mine] - first)
            counts[mine] = sizes
            found.append((np.repeat(mine, sizes), members, parts))
        row_of_piece, documents, parts = (np.concatenate(some) for some in zip(*found, strict=True))
        order = np.argsort(row_of_piece, kind="stable")
        return self._measure(np.cumsum(counts), documents[order], parts[order])

    def _measure(self, ends: Integers, documents: Integers, parts: Integers) -> tuple[Segments, Integers]:
        """Where pieces start in the store and in their rows. A part of -1 is what is left of a split document."""
        starts, stops = self._bounds(documents)
        lengths = stops - starts
        rest = lengths // self.seq_len if self._long_documents == "split" else 0
        starts = starts + np.where(parts >= 0, parts, rest) * self.seq_len
        pieces = np.minimum(stops - starts, self.seq_len)
        before = np.cumsum(pieces) - pieces
        firsts = np.concatenate([[0], ends[:-1]])
        in_row = before - np.repeat(before[firsts], np.diff(ends, prepend=0))
        return Segments(ends, in_row, pieces, documents, starts + pieces == stops), starts

    def describe(self) -> dict[str, Any]:
        """The row length, the seed, what happens to long documents, and the documents."""
        return self._describe("best-fit", seed=self._seed, long_documents=self._long_documents, window=WINDOW)

    def title(self) -> str:
        """One line for the tree."""
        return f"pack best-fit, seq_len {self.seq_len:,}, seed {self._seed}: {self.report}"


class _GroupedOrder:
    """An order of rows in which those of some windows come together, and these windows are random ones."""

    def __init__(self, row_ends: Integers, key: int) -> None:
        self._key = key
        counts = np.diff(row_ends, prepend=0)
        self._first_rows = row_ends - counts
        self._windows = permute(np.arange(len(counts)), len(counts), make_key(key, 1))
        self._ends = np.cumsum(counts[self._windows])
        self._starts = self._ends - counts[self._windows]
        lasts = np.arange(WINDOWS_PER_GROUP - 1, len(counts) + WINDOWS_PER_GROUP - 1, WINDOWS_PER_GROUP)
        self._group_ends = self._ends[np.minimum(lasts, len(counts) - 1)]

    def row_at(self, places: Integers) -> Integers:
        """The row at each place of the order."""
        inner = self._in_groups(places, permute)
        which = np.searchsorted(self._ends, inner, "right")
        rows: Integers = inner - self._starts[which] + self._first_rows[self._windows[which]]
        return rows

    def place_of(self, rows: Integers) -> Integers:
        """The place of each row in the order."""
        turns = np.empty(len(self._windows), np.int64)
        turns[self._windows] = np.arange(len(self._windows))
        windows = np.searchsorted(self._first_rows, rows, "right") - 1
        inner = rows - self._first_rows[windows] + self._starts[turns[windows]]
        return self._in_groups(inner, unpermute)

    def _in_groups(self, places: Integers, change: Callable[[Integers, int, int], Integers]) -> Integers:
        """Permute places within their groups, there or back."""
        groups = np.searchsorted(self._group_ends, places, "right")
        result = np.empty(len(places), np.int64)
        for group in np.flatnonzero(np.bincount(groups)).tolist():
            mine = groups == group
            first = int(self._group_ends[group - 1]) if group else 0
            size = int(self._group_ends[group]) - first
            result[mine] = change(places[mine] - first, size, make_key(self._key, 2, group)) + first
        return result


def _find_pieces(window: _Window, rows: Integers) -> tuple[Integers, Integers, Integers]:
    """For rows of a window: their documents, which parts of them (-1: what is left), and how many each row has."""
    num_full = len(window.full_documents)
    is_full = rows < num_full
    shared = np.where(is_full, 0, rows - num_full)
    stops = window.ends[shared].astype(np.int64) if len(window.ends) else np.zeros(len(rows), np.int64)
    starts = np.where(shared > 0, window.ends[shared - 1] if len(window.ends) else 0, 0).astype(np.int64)
    sizes = np.where(is_full, 1, stops - starts)
    firsts = np.cumsum(sizes) - sizes
    inner = np.arange(int(sizes.sum())) - np.repeat(firsts - starts, sizes)
    documents = np.empty(len(inner), np.int64)
    parts = np.full(len(inner), -1, np.int64)
    alone = np.repeat(is_full, sizes)
    documents[~alone] = window.documents[inner[~alone]]
    documents[alone] = window.full_documents[rows[is_full]]
    parts[alone] = window.full_parts[rows[is_full]]
    return documents, parts, sizes
