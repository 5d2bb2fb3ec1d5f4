"""Best-fit packing: documents stay whole where they fit a row, and rows are nearly full.

Documents are permuted, once for all epochs, and packed in windows of 65,536 by best-fit decreasing. A window is a
function of the documents, the row length and the seed, so rows are random access: the dataset counts the rows of
each window when it is made, and packs a window again when one of its rows is needed. Up to ten million documents,
it keeps all windows in memory, four bytes a document.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset._bin_packing import count_bins, fit
from tokenmill.dataset.packing_report import LongDocuments
from tokenmill.dataset.rows import Integers, PackedRows, Segments, Spans, aligned
from tokenmill.dataset.shuffle import distinct, make_key, permute
from tokenmill.store.documents import Documents

__all__ = ["BestFitRows"]

WINDOW = 1 << 16
MOST_KEPT_DOCUMENTS = 10_000_000
"""Above this many, only a few windows are kept, and a shuffle orders groups of them: see `GroupedOrder`."""
NUM_KEPT_WINDOWS = 64


class _PackedWindow(NamedTuple):
    """The rows of one window: row i has the documents from `ends[i - 1]` up to `ends[i]` of `documents`.

    The first rows are each filled by one part of a long document, and `parts` says by which one; all other pieces are
    whole documents, or what is left of a long one after its parts. If parts are shorter than a row, `parts` is about
    all pieces, and -1 for what is left.
    """

    documents: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.uint32]
    parts: npt.NDArray[np.int32]


class BestFitRows(PackedRows):
    """Rows of whole documents; the last token of a document has no target."""

    method = "best-fit"
    has_lookahead = False

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        *,
        long_documents: LongDocuments,
        seed: int,
        max_length: int | None = None,
        **bounds: Any,
    ) -> None:
        super().__init__(documents, seq_len, seed=seed, long_documents=long_documents, window=WINDOW, **bounds)
        self._longest = seq_len if max_length is None else max_length
        if max_length is not None:
            self._settings["max_length"] = max_length
        self._most = min(self.max_documents or 0, WINDOW)
        self._long_documents = long_documents
        self._key = make_key(seed, 1)
        self._keeps_all = documents.num_documents <= MOST_KEPT_DOCUMENTS
        self._windows: OrderedDict[int, _PackedWindow] = OrderedDict()
        self._lock = threading.Lock()
        known = np.concatenate([*documents.lengths()]) if self._keeps_all and documents.num_documents else None
        counts = [self._count_rows(window, known) for window in range(-(-documents.num_documents // WINDOW))]
        self._first_rows = np.cumsum(np.array([0, *counts], np.int64))
        """The first row of each window, and the one after the last."""
        self.window_ends = None if self._keeps_all else self._first_rows[1:]
        self._set_counts(int(self._first_rows[-1]))

    def _members(self, window: int) -> Integers:
        """Return the documents of a window."""
        first = window * WINDOW
        places = np.arange(first, min(first + WINDOW, self.documents.num_documents))
        return permute(places, self.documents.num_documents, self._key)

    def _count_rows(self, window: int, known: Integers | None) -> int:
        """Pack a window, or only count its rows; `known` are the lengths of all documents, if they are in memory."""
        members = self._members(window)
        lengths = self._lengths(members) if known is None else known[members]
        self.report.count(lengths, self._longest, self._long_documents)
        if self._keeps_all:
            packed, num_bounded = self._pack(members, lengths)
            self._windows[window] = packed
            self.report.num_bounded_rows += num_bounded
            return len(packed.ends)
        whole, rest = self._divide(lengths)
        pieces, num_full = rest[rest > 0], int(whole.sum())
        if self._longest < self.seq_len:
            pieces, num_full = np.append(pieces, np.full(num_full, self._longest)), 0
        num_bins, num_bounded = count_bins(aligned(pieces, self.align), self.seq_len, self._most)
        self.report.num_bounded_rows += num_bounded
        return num_full + num_bins

    def _lengths(self, documents: Integers) -> Integers:
        starts, stops = self.documents.bounds(documents)
        return stops - starts

    def _divide(self, lengths: Integers) -> tuple[Integers, Integers]:
        """Return how many pieces of the greatest length each document has, and how many tokens are left."""
        if self._long_documents == "split":
            return np.divmod(lengths, self._longest)
        if self._long_documents == "truncate":
            return np.zeros_like(lengths), np.minimum(lengths, self._longest)
        return np.zeros_like(lengths), np.where(lengths > self._longest, 0, lengths)

    def _pack(self, members: Integers, lengths: Integers) -> tuple[_PackedWindow, int]:
        """Pack a window, and count its rows that end early."""
        kind = np.uint32 if self.documents.num_documents < 1 << 32 else np.uint64
        whole, rest = self._divide(lengths)
        full = np.repeat(np.arange(len(lengths)), whole)
        parts = np.arange(len(full)) - np.repeat(np.cumsum(whole) - whole, whole)
        shared = np.flatnonzero(rest)
        if self._longest < self.seq_len:
            # Parts share rows, too.
            pieces = np.append(np.full(len(full), self._longest), rest[shared])
            fitted = fit(aligned(pieces, self.align), self.seq_len, self._most)
            documents, parts = np.append(full, shared), np.append(parts, np.full(len(shared), -1))
            documents, parts = members[documents[fitted.order]], parts[fitted.order]
            packed = _PackedWindow(documents.astype(kind), fitted.ends.astype(np.uint32), parts.astype(np.int32))
            return packed, fitted.num_bounded
        fitted = fit(aligned(rest[shared], self.align), self.seq_len, self._most)
        documents = members[np.concatenate([full, shared[fitted.order]])]
        ends = np.concatenate([np.arange(1, len(full) + 1), len(full) + fitted.ends])
        packed = _PackedWindow(documents.astype(kind), ends.astype(np.uint32), parts.astype(np.int32))
        return packed, fitted.num_bounded

    def _window(self, number: int) -> _PackedWindow:
        if self._keeps_all:
            return self._windows[number]
        with self._lock:
            window = self._windows.pop(number, None)
            if window is None:
                members = self._members(number)
                window, _ = self._pack(members, self._lengths(members))
            self._windows[number] = window
            if len(self._windows) > NUM_KEPT_WINDOWS:
                self._windows.popitem(last=False)
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def rows_of(self, document: int) -> list[int]:
        """Return the rows of its window that hold a part of it."""
        place = int(permute(np.array([document]), self.documents.num_documents, self._key, inverse=True)[0])
        window, first = self._window(place // WINDOW), int(self._first_rows[place // WINDOW])
        rows = np.searchsorted(window.ends, np.flatnonzero(window.documents == document), "right")
        return [first + row for row in distinct(rows)]

    def spans(self, index: Integers) -> Spans:
        """Find the pieces of documents in each row."""
        segments, starts = self._locate(index)
        return Spans(segments.ends, starts, segments.lengths)

    def segments(self, index: Integers) -> Segments:
        """Find the documents of rows."""
        return self._locate(index)[0]

    def _locate(self, index: Integers) -> tuple[Segments, Integers]:
        """Find the documents of rows and the first token of each piece, window by window."""
        rows = index % self.num_rows
        windows = np.searchsorted(self._first_rows, rows, "right") - 1
        counts = np.zeros(len(rows), np.int64)
        found = []
        for window in np.flatnonzero(np.bincount(windows)).tolist():
            mine = np.flatnonzero(windows == window)
            members, parts, sizes = _find_pieces(self._window(window), rows[mine] - self._first_rows[window])
            counts[mine] = sizes
            found.append((np.repeat(mine, sizes), members, parts))
        row_of_piece, documents, parts = (np.concatenate(some) for some in zip(*found, strict=True))
        order = np.argsort(row_of_piece, kind="stable")
        return self._measure(np.cumsum(counts), documents[order], parts[order])

    def _measure(self, ends: Integers, documents: Integers, parts: Integers) -> tuple[Segments, Integers]:
        """Find where pieces start in the store and in their rows; part -1 is the remainder of a split document."""
        starts, stops = self._bounds(documents)
        lengths = stops - starts
        rest = lengths // self._longest if self._long_documents == "split" else 0
        starts = starts + np.where(parts >= 0, parts, rest) * self._longest
        pieces = np.minimum(stops - starts, self._longest)
        room = aligned(pieces, self.align)
        before = np.cumsum(room) - room
        firsts = np.concatenate([[0], ends[:-1]])
        in_row = before - np.repeat(before[firsts], np.diff(ends, prepend=0))
        return Segments(ends, in_row, pieces, documents, starts + pieces == stops), starts


def _find_pieces(window: _PackedWindow, rows: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the documents of a window's rows, which part of each (-1: the remainder), and how many each row has."""
    stops = window.ends[rows].astype(np.int64)
    starts = np.where(rows > 0, window.ends[rows - 1], 0).astype(np.int64)
    sizes = stops - starts
    pieces = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes - starts, sizes)
    parts = np.full(len(pieces), -1, np.int64)
    is_part = pieces < len(window.parts)
    parts[is_part] = window.parts[pieces[is_part]]
    return window.documents[pieces].astype(np.int64), parts, sizes
