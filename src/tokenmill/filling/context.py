"""Which tokens of every row are where in a batch if documents are padded, or ranks share rows (context parallelism).

With n context-parallel ranks, a row, or each document in it with its padding, is cut into 2n chunks of equal length.
Rank r holds chunks r and 2n - 1 - r, as in Megatron-LM and TransformerEngine: with causal attention later tokens cost
more, and so every rank has the same work. All of this is arithmetic over pieces of documents, before anything is
copied.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import PADDING, Integers, PackedRows, Rows, Segments, Spans, aligned

__all__ = ["ContextShare", "CutPieces", "RowCutter", "make_cutter"]


class ContextShare(NamedTuple):
    """The part of every row that a context-parallel rank holds; `by` is what is cut into chunks, row or document."""

    rank: int = 0
    size: int = 1
    by: str = "row"


class CutPieces(NamedTuple):
    """Pieces of runs of tokens, in the order of a batch: piece i is `lengths[i]` tokens of run `runs[i]`.

    `places` are positions in the batch when its rows are laid end to end. The piece begins `offsets[i]` tokens after
    the start of its run; `is_last` says whether it is the run's end.
    """

    places: Integers
    runs: Integers
    offsets: Integers
    lengths: Integers
    is_last: npt.NDArray[np.bool_]


def make_cutter(rows: Rows, share: ContextShare | None) -> RowCutter | None:
    """Return the cutter of rows, or None if they are copied whole and without padding between documents."""
    if share is None and rows.align == 1:
        return None
    return RowCutter(rows.seq_len, rows.align, share or ContextShare())


class RowCutter:
    """Cuts rows of `seq_len` tokens, in which documents begin at multiples of `align`, into what a rank holds.

    Loops that copy see strips: the two chunks of a row, or all chunks of its documents together.
    """

    def __init__(self, seq_len: int, align: int, share: ContextShare) -> None:
        self._seq_len, self._align, self._share = seq_len, align, share
        is_whole = share.size == 1
        self._chunks = [0] if is_whole else [share.rank, 2 * share.size - 1 - share.rank]
        self._num_chunks = 1 if is_whole else 2 * share.size
        self.num_strips = 1 if is_whole or share.by == "document" else 2
        self.width = seq_len // share.size
        """Tokens of a row that the rank holds."""
        self.strip_width = self.width // self.num_strips

    @cached_property
    def row_places(self) -> Integers:
        """The place in its row of each token of the rank's part, if rows are cut."""
        length = self._seq_len // self._num_chunks
        return np.concatenate([np.arange(chunk * length, (chunk + 1) * length) for chunk in self._chunks])

    def cut(self, rows: Integers, starts: Integers, lengths: Integers, blocks: tuple[Any, Any]) -> CutPieces:
        """Cut runs of tokens, each with its row, its place in it, its length, and the block that is cut."""
        firsts, sizes = blocks
        chunk = sizes // self._num_chunks
        found = []
        for turn, number in enumerate(self._chunks):
            begin = firsts + number * chunk
            low = np.maximum(starts, begin)
            length = np.minimum(starts + lengths, begin + chunk) - low
            place = rows * self.width + firsts // self._share.size + turn * chunk + low - begin
            runs = np.flatnonzero(length > 0)
            found.append((place[runs], runs, (low - starts)[runs], length[runs]))
        places, runs, offsets, pieces = (np.concatenate(some) for some in zip(*found, strict=True))
        if len(found) > 1:
            # Two sorted runs, which a stable sort merges.
            order = np.argsort(places, kind="stable")
            places, runs, offsets, pieces = places[order], runs[order], offsets[order], pieces[order]
        return CutPieces(places, runs, offsets, pieces, offsets + pieces == lengths[runs])

    def cut_spans(self, rows: PackedRows, spans: Spans) -> tuple[Spans, npt.NDArray[np.bool_] | None]:
        """Return the pieces of each strip, blank ones with the start -1, and which of them have a token after them."""
        num_rows = len(spans.ends)
        if rows.has_lookahead:
            steps = np.array(self._chunks) * self.strip_width
            starts = (spans.starts[:, None] + steps).reshape(-1)
            return Spans(np.arange(1, len(starts) + 1), starts, np.full(len(starts), self.strip_width + 1)), None
        sizes = np.diff(spans.ends, prepend=0)
        numbers = np.arange(num_rows).repeat(sizes)
        room = aligned(spans.lengths, self._align)
        before = np.cumsum(room) - room
        in_row = before - np.append(before, 0)[spans.ends - sizes].repeat(sizes)
        blocks = (0, self._seq_len) if self._share.by == "row" else (in_row, room)
        cut = self.cut(numbers, in_row, spans.lengths, blocks)
        strips = cut.places // self.strip_width
        # The end of the piece before it in the strip, or where the strip begins.
        ends = np.append(0, (cut.places + cut.lengths)[:-1])
        gaps = cut.places - np.maximum(ends, strips * self.strip_width)
        starts = spans.starts[cut.runs] + cut.offsets
        lengths, followed = cut.lengths, ~cut.is_last
        gapped = np.flatnonzero(gaps)
        if len(gapped):
            starts, lengths = np.insert(starts, gapped, -1), np.insert(lengths, gapped, gaps[gapped])
            followed, strips = np.insert(followed, gapped, False), np.insert(strips, gapped, strips[gapped])
        counts = np.bincount(strips, minlength=num_rows * self.num_strips)
        return Spans(np.cumsum(counts), starts, lengths), followed if followed.any() else None

    def strips_of(self, rows: Integers) -> Integers:
        """Return the strips of rows."""
        if self.num_strips == 1:
            return rows
        strips: Integers = (rows[:, None] * self.num_strips + np.arange(self.num_strips)).reshape(-1)
        return strips

    def fill_gaps(self, segments: Segments) -> Segments:
        """Put padding after each document that ends before a multiple of `align`."""
        gaps = aligned(segments.lengths, self._align) - segments.lengths
        gapped = np.flatnonzero(gaps)
        if not len(gapped):
            return segments
        after = gapped + 1
        ends = segments.ends + np.searchsorted(gapped, segments.ends)
        starts = np.insert(segments.starts, after, segments.starts[gapped] + segments.lengths[gapped])
        lengths = np.insert(segments.lengths, after, gaps[gapped])
        documents = np.insert(segments.documents, after, PADDING)
        return Segments(ends, starts, lengths, documents, np.insert(segments.is_end, after, False))

    def are_gaps(self, segments: Segments) -> npt.NDArray[np.bool_]:
        """Return which segments are padding after a document, and not at the end of a row."""
        found: npt.NDArray[np.bool_] = segments.documents == PADDING
        # A gap begins inside a block of `align` tokens; a document, or the padding of a row, begins with one.
        found &= segments.starts % self._align > 0
        return found

    def cut_segments(self, edges: Integers, segments: Segments) -> CutPieces:
        """Cut segments that cover rows; padding after a document belongs to the block of that document."""
        rows = np.arange(len(edges) - 1).repeat(np.diff(edges))
        starts, lengths = segments.starts, segments.lengths
        if self._share.by == "row":
            return self.cut(rows, starts, lengths, (0, self._seq_len))
        is_head = ~self.are_gaps(segments)
        heads = np.flatnonzero(is_head)
        stops = np.append(starts[heads][1:], 0)
        is_last = np.append(np.diff(rows[heads]) > 0, True)
        sizes = np.where(is_last, self._seq_len, stops) - starts[heads]
        owners = np.cumsum(is_head) - 1
        return self.cut(rows, starts, lengths, (starts[heads][owners], sizes[owners]))
