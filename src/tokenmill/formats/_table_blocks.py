"""Rows of a table, some at a time: their ids, and the columns that follow from masks, weights and document bounds.

Rows are whole documents, or rows of a packing. Documents and concat rows follow the order of the store and are read
front to back; rows of other packings are copied out of mapped shards as the loader copies them. The padding of rows is
left out: a list may have any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tokenmill.dataset.pack import pack
from tokenmill.dataset.rows import PackedRows
from tokenmill.filling.fill import IGNORED, Chunk
from tokenmill.formats._token_blocks import BLOCK_TOKENS, token_blocks
from tokenmill.formats.base import Array, SplitSource
from tokenmill.store.table import Integers

__all__ = ["COLUMNS", "IDS", "MASKS", "SEGMENT_LENGTHS", "TableBlock", "bytes_per_token", "table_blocks"]

IDS, SEGMENT_LENGTHS = "input_ids", "seq_lengths"


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """Some rows: their ids laid end to end, and the mask and weight of each token if the store has them."""

    ids: Array
    row_lengths: Integers
    """How many tokens each row has."""
    segment_lengths: Integers
    """How many tokens each document has in its row, for all rows in order."""
    segment_counts: Integers
    """How many documents each row has."""
    mask: Array | None
    weight: Array | None

    def column(self, name: str) -> tuple[Array, Integers]:
        """Return the values of a column, laid end to end, and how many of them each row has."""
        if name == IDS:
            return self.ids, self.row_lengths
        if name == SEGMENT_LENGTHS:
            return self.segment_lengths.astype(np.int32), self.segment_counts
        kind, make = COLUMNS[name]
        return make(self).astype(kind, copy=False), self.row_lengths

    @property
    def firsts(self) -> Integers:
        """The first token of each document in its row."""
        firsts: Integers = np.cumsum(self.segment_lengths) - self.segment_lengths
        return firsts

    def has_loss(self) -> Array:
        """Return whether each token is trained on: never the first of a document in a row, as nothing predicts it."""
        has_loss = np.ones(len(self.ids), bool) if self.mask is None else self.mask != 0
        has_loss[self.firsts] = False
        return has_loss

    def labels(self) -> Array:
        """Return the ids that are trained on, and -100 for others; not shifted, because the models shift them."""
        return np.where(self.has_loss(), self.ids, np.int32(IGNORED))

    def loss_weights(self) -> Array:
        """Return the weight of the loss of each token, 0 where it has none."""
        weights = self.has_loss().astype(np.float32)
        return weights if self.weight is None else weights * self.weight

    def positions(self) -> Array:
        """Return the position of each token in its document's part of the row."""
        return np.arange(len(self.ids)) - self.firsts.repeat(self.segment_lengths)


COLUMNS: dict[str, tuple[str, Callable[[TableBlock], Array]]] = {
    "labels": ("<i4", TableBlock.labels),
    "completion_mask": ("i1", TableBlock.has_loss),
    "assistant_masks": ("i1", TableBlock.has_loss),
    "loss_mask": ("i1", TableBlock.has_loss),
    "loss_weights": ("<f4", TableBlock.loss_weights),
    "attention_mask": ("i1", lambda block: np.ones(len(block.ids), np.int8)),
    "position_ids": ("<i4", TableBlock.positions),
    SEGMENT_LENGTHS: ("<i4", lambda block: block.segment_lengths),
}
"""The columns that a table may have beside its ids: the type of their values, and how these are made."""
MASKS = ("labels", "completion_mask", "assistant_masks", "loss_mask", "loss_weights")
"""Columns that say which tokens are trained on."""


def bytes_per_token(split: SplitSource) -> int:
    """Return how many bytes the columns of a split have for each token, at most."""
    return 4 + sum(np.dtype(COLUMNS[name][0]).itemsize for name in split.rows.columns)


def table_blocks(split: SplitSource, most_rows: int, most_tokens: int) -> Iterator[TableBlock]:
    """Yield all rows of a split in blocks of at most so many rows and tokens; a longer row is a block of its own."""
    packing = split.rows.packing
    if packing == "documents":
        start = 0
        for lengths in _cut_lengths(split.documents.lengths(), most_rows, most_tokens):
            ones = np.ones(len(lengths), np.int64)
            stop = start + int(lengths.sum())
            yield _read_block(split, start, stop, lengths, lengths, ones)
            start = stop
    elif packing == "concat":
        yield from _concat_blocks(split, max(1, min(most_rows, most_tokens // split.seq_len)))
    else:
        yield from _packed_blocks(split, max(1, min(most_rows, most_tokens // split.seq_len)))


def _cut_lengths(runs: Iterator[Integers], most_rows: int, most_tokens: int) -> Iterator[Integers]:
    """Divide the lengths of documents with tokens into blocks, which do not depend on where runs end."""
    waiting = np.zeros(0, np.int64)
    for run in runs:
        waiting = np.concatenate([waiting, run[run > 0]])
        ends, first, done = np.cumsum(waiting), 0, 0
        while True:
            last = min(first + most_rows, int(np.searchsorted(ends, done + most_tokens, "right")))
            last = max(first + 1, last)
            # The last block may grow with the next run.
            if last >= len(waiting):
                break
            yield waiting[first:last]
            first, done = last, int(ends[last - 1])
        waiting = waiting[first:]
    if len(waiting):
        yield waiting


def _concat_blocks(split: SplitSource, num_rows: int) -> Iterator[TableBlock]:
    seq_len, needs_documents = split.seq_len, bool(split.rows.columns)
    for first in range(0, split.num_rows, num_rows):
        count = min(num_rows, split.num_rows - first)
        start, row_lengths = first * seq_len, np.full(count, seq_len)
        lengths, counts = row_lengths, np.ones(count, np.int64)
        if needs_documents:
            lengths, counts = _find_segments(split, start + np.arange(count) * seq_len)
        yield _read_block(split, start, start + count * seq_len, row_lengths, lengths, counts)


def _find_segments(split: SplitSource, row_starts: Integers) -> tuple[Integers, Integers]:
    """Find how many tokens documents have in rows of the stream, and how many documents each row has."""
    counts, _, starts, stops = split.documents.find_all(row_starts, split.seq_len)
    begin = row_starts.repeat(counts)
    lengths = np.minimum(stops, begin + split.seq_len) - np.maximum(starts, begin)
    filled = lengths > 0
    rows = np.repeat(np.arange(len(counts)), counts)[filled]
    return lengths[filled], np.bincount(rows, minlength=len(counts))


def _read_block(
    split: SplitSource, start: int, stop: int, rows: Integers, segments: Integers, counts: Integers
) -> TableBlock:
    """Read the tokens from `start` up to `stop` and what lies beside them."""
    values: dict[str, Any] = {}
    for name, source, kind in (("ids", split, "<i4"), ("mask", split.mask, "u1"), ("weight", split.weight, "<f4")):
        needed = source is not None and (name == "ids" or split.rows.columns)
        values[name] = next(token_blocks(source, start, stop, kind, stop - start)) if source and needed else None
    return TableBlock(row_lengths=rows, segment_lengths=segments, segment_counts=counts, **values)


def _packed_blocks(split: SplitSource, num_rows: int) -> Iterator[TableBlock]:
    settings = split.rows
    rows = pack(
        split.documents,
        seq_len=split.seq_len,
        method=settings.packing,  # type: ignore[arg-type]
        long_documents=settings.long_documents,  # type: ignore[arg-type]
    )
    # Rows are copied with their padding and the targets, so only some of a block at a time.
    step = max(1, BLOCK_TOKENS // split.seq_len)
    for first in range(0, len(rows), num_rows):
        last = min(first + num_rows, len(rows))
        yield _join([_copy_rows(rows, np.arange(n, min(n + step, last))) for n in range(first, last, step)])


def _copy_rows(rows: PackedRows, index: Integers) -> TableBlock:
    """Copy some rows without their padding."""
    segments = rows.segments(index)
    counts = np.diff(segments.ends, prepend=0)
    row_lengths = np.add.reduceat(segments.lengths, segments.ends - counts)
    filled = np.arange(rows.seq_len) < row_lengths[:, None]
    chunk = Chunk(rows, index)
    ids = np.empty((2, len(index), rows.seq_len), np.int32)
    chunk.copy(ids[0], ids[1])
    mask, weight = (chunk.own_values(suffix) for suffix in (".mask", ".weight"))
    return TableBlock(
        ids=ids[0][filled],
        row_lengths=row_lengths,
        segment_lengths=segments.lengths,
        segment_counts=counts,
        mask=None if mask is None else mask[filled].astype("u1"),
        weight=None if weight is None else weight[filled],
    )


def _join(blocks: list[TableBlock]) -> TableBlock:
    """Lay the rows of several blocks end to end."""
    if len(blocks) == 1:
        return blocks[0]
    parts: dict[str, Any] = {}
    for field in fields(TableBlock):
        some = [getattr(block, field.name) for block in blocks]
        parts[field.name] = None if some[0] is None else np.concatenate(some)
    return TableBlock(**parts)
