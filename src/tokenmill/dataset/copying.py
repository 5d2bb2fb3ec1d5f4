"""Rows out of mapped memory into batches: the inner loop of loading.

Order and places are worked out for a block of thousands of rows at once, whatever datasets they
come from. Rows that lie in one stretch are then copied by `gathering.py`, those of several pieces by
`joining.py`, a few at a time. A mask is written where documents end and nowhere else.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.base import Choice, Integers, Rows
from tokenmill.dataset.gathering import IGNORED, Array, Part, WholePart
from tokenmill.dataset.joining import PiecedPart
from tokenmill.dataset.segments import Cover, Segments, join_segments

__all__ = ["IGNORED", "RowBlock"]


class RowBlock:
    """Rows whose places have been worked out, to be copied in pieces of any size.

    With `document_mask` a target in another document is `IGNORED` too; what has no next token in
    its row always is, and so is a target that a supervised store says not to train on. Rows from number
    `limit` on are blank: no tokens, targets or documents.
    """

    def __init__(self, rows: Rows, index: Integers, *, document_mask: bool, limit: int | None = None) -> None:
        self.seq_len = rows.seq_len
        self.num_rows = len(index)
        self.document_mask = document_mask
        self._blank = np.flatnonzero(index >= limit) if limit is not None else np.zeros(0, np.int64)
        filled = np.delete(np.arange(len(index)), self._blank) if len(self._blank) else None
        self._choices = _choose(rows, index, filled)
        self._parts = _make_parts(self._choices, len(index))
        self._masks = _make_parts(_beside(self._choices, ".mask"), len(index))
        self._weights = _make_parts(_beside(self._choices, ".weight"), len(index))
        self._cu_seqlens: list[npt.NDArray[np.int32]] | None = None
        self._max_seqlens: list[int] | None = None

    def copy(self, start: int, stop: int, inputs: Array, targets: Array) -> None:
        """Fill arrays of shape (stop - start, seq_len) with the rows from `start` up to `stop`."""
        for part in self._parts:
            part.copy(start, stop, inputs, targets)
        if self._masks:
            # One target is one token further: as for tokens, what comes out as targets is of the next token.
            trained = self._copy_values(self._masks, start, stop, targets.shape, np.int16)
            targets[trained == 0] = IGNORED
        if self.document_mask:
            targets.reshape(-1)[self.cover.document_ends(start, stop)] = IGNORED
        if len(self._blank):
            blank = self._blank[(self._blank >= start) & (self._blank < stop)] - start
            inputs[blank] = 0
            targets[blank] = IGNORED

    @property
    def is_weighted(self) -> bool:
        """Whether some rows come from a store that has a weight for each token."""
        return bool(self._weights)

    def copy_weights(self, start: int, stop: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The weight of each target's loss; 1 where the store has none."""
        return self._copy_values(self._weights, start, stop, shape, np.float32)

    def _copy_values(
        self, parts: list[Part], start: int, stop: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """What lies beside the tokens, for each target; 1 for rows that have nothing there."""
        values = np.ones((2, *shape), dtype)
        for part in parts:
            part.copy(start, stop, values[0], values[1])
        of_targets: npt.NDArray[Any] = values[1]
        return of_targets

    @cached_property
    def cover(self) -> Cover:
        """The documents in all rows."""
        return Cover(self.segments(), self.seq_len)

    def cu_seqlens(self, batch_size: int) -> list[npt.NDArray[np.int32]]:
        """For each batch of the block, where its documents start; worked out once."""
        if self._cu_seqlens is None:
            self._cu_seqlens = self.cover.cu_seqlens(batch_size)
        return self._cu_seqlens

    def max_seqlens(self, batch_size: int) -> list[int]:
        """For each batch of the block, the length of its longest segment; worked out once."""
        if self._max_seqlens is None:
            self._max_seqlens = self.cover.max_seqlens(batch_size)
        return self._max_seqlens

    def segments(self) -> Segments:
        """The documents in all rows, without padding."""
        parts = [
            (np.arange(self.num_rows) if choice.at is None else choice.at, choice.rows.segments(choice.numbers))
            for choice in self._choices
        ]
        return join_segments(parts, self.num_rows)

    def will_need(self, start: int, stop: int) -> None:
        """Let the kernel read these rows from disk while others are being used."""
        for part in self._parts:
            part.will_need(start, stop)


def _choose(rows: Rows, index: Integers, filled: Integers | None) -> list[Choice]:
    """Where the rows are that are not blank."""
    if filled is None:
        return rows.resolve(index)
    choices = rows.resolve(index[filled]) if len(filled) else []
    return [Choice(c.rows, filled if c.at is None else filled[c.at], c.numbers) for c in choices]


def _beside(choices: list[Choice], suffix: str) -> list[Choice]:
    """Those rows of supervised stores, to be copied from a file beside their tokens."""
    views = [(choice, choice.rows.documents.view(suffix)) for choice in choices]
    return [choice._replace(beside=values) for choice, values in views if values is not None]


def _make_parts(choices: list[Choice], num_rows: int) -> list[Part]:
    """One part for all rows of one kind and type, so that a mixture costs no more than its sources."""
    groups: dict[tuple[bool, str], list[Choice]] = {}
    for choice in choices:
        groups.setdefault((choice.rows.has_lookahead, choice.source.dtype.str), []).append(choice)
    return [
        WholePart(some, num_rows) if is_whole else PiecedPart(some, num_rows) for (is_whole, _), some in groups.items()
    ]
