"""Rows out of mapped memory into batches: the inner loop of loading.

Thousands of rows, of any datasets, are resolved and located together, and then copied a few batches at a time. The
loops of `kernels.py` do the copying.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Integers, Rows, join_segments
from tokenmill.errors import StoreError
from tokenmill.filling import kernels
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.context import ContextShare, make_cutter
from tokenmill.filling.cover import Cover
from tokenmill.filling.located_spans import LocatedSpans, locate
from tokenmill.filling.row_sources import segment_sources, source_of_rows
from tokenmill.filling.token_masks import TokenMask
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import everywhere, will_need

__all__ = ["IGNORED", "Chunk", "FilledChunk"]

IGNORED = -100
"""The target of a token that has none, if no other is chosen: torch's cross entropy ignores it by default."""

Array = npt.NDArray[Any]
_SPREADS = BufferPool(np.int32)


class Chunk:
    """Rows of one or several batches, which are resolved together, and filled together or part by part (`cut`).

    With `document_mask`, a target in another document is `ignored`. So is a target outside the row, and one that a
    supervised store excludes from training. Rows from number `limit` on are blank: they have no tokens, targets or
    documents.

    When it is filled, `inputs` and `targets` have the shape (number of batches, batch_size, seq_len). Positions,
    segment ids and the like are computed when a batch first asks for them, for all batches of the chunk.
    """

    inputs: Array
    targets: Array

    def __init__(
        self,
        rows: Rows,
        index: Integers,
        *,
        batch_size: int = 1,
        document_mask: bool = False,
        limit: int | None = None,
        share: ContextShare | None = None,
        token_masks: Sequence[TokenMask] = (),
        ignored: int = IGNORED,
    ) -> None:
        self.seq_len, self.batch_size, self.is_masked = rows.seq_len, batch_size, document_mask
        self.cutter = make_cutter(rows, share) if share is not None or rows.align > 1 else None
        # Aligned pieces are of one document each, and then the loops leave out the targets at their ends.
        self._has_whole_pieces = rows.align > 1
        self._width = rows.seq_len if self.cutter is None else self.cutter.width
        self.rows, self.start, self.stop, self._max_documents = rows, 0, len(index), rows.max_documents
        self._whole: Chunk | None = None
        self._token_masks, self.ignored = token_masks, ignored
        self._num_masked: dict[str, Integers] = {}
        self._spreads: dict[str, Array] = {}
        self._blank = np.flatnonzero(index >= limit) if limit is not None else index[:0]
        if len(self._blank):
            filled = np.delete(np.arange(len(index)), self._blank)
            found = rows.resolve(index[filled]) if len(filled) else []
            self._resolved = [resolved.among(filled) for resolved in found]
        else:
            self._resolved = rows.resolve(index)
        self._spans = locate(self._resolved, None, len(index), self.cutter)
        self._masks = locate(self._resolved, ".mask", len(index), self.cutter)
        self._weights = locate(self._resolved, ".weight", len(index), self.cutter)

    def cut(self, start: int, stop: int) -> Chunk:
        """Return the rows from `start` up to `stop` as a chunk to be filled by itself."""
        part = Chunk.__new__(Chunk)
        part.__dict__ = {**vars(self), "start": start, "stop": stop, "_whole": self, "_spreads": {}, "_num_masked": {}}
        return part

    def will_need(self) -> None:
        """Ask the kernel to read these rows from disk while the caller uses others."""
        for spans in self._spans:
            low, high, _ = _range(spans, self.start, self.stop)
            pieces, itemsize = slice(spans.edges[low], spans.edges[high]), spans.stored.itemsize
            for index, length in zip(spans.indices[pieces].tolist(), spans.lengths[pieces].tolist(), strict=True):
                if index >= 0:
                    will_need((index + 1) * itemsize, length * itemsize)

    def fill(self, pool: BufferPool) -> Chunk:
        """Fill inputs and targets in memory of a pool."""
        both = pool.take((2, self.stop - self.start, self._width))
        self.copy(both[0], both[1])
        self.inputs, self.targets = both.reshape(2, -1, self.batch_size, self._width)
        return self

    def copy(self, inputs: Array, targets: Array) -> None:
        """Fill arrays of shape (number of rows, tokens of a row)."""
        for spans in self._spans:
            _copy(spans, self.start, self.stop, inputs, targets, self.ignored)
        if self._masks:
            targets[self._copy_values(self._masks, np.int16)[1] == 0] = self.ignored
        if self.is_masked and not self._has_whole_pieces:
            targets.reshape(-1)[self.cover.document_ends(self.start, self.stop)] = self.ignored
        if len(self._blank):
            blank = self._blank[(self._blank >= self.start) & (self._blank < self.stop)] - self.start
            inputs[blank] = 0
            targets[blank] = self.ignored
        for mask in self._token_masks:
            lengths = self._num_tokens[self.start : self.stop]
            self._num_masked[mask.name] = mask.apply(inputs, targets, lengths, self.ignored)

    def _copy_values(self, several: list[LocatedSpans], dtype: npt.DTypeLike) -> Array:
        """Copy the values that a store has beside its tokens, for inputs and for targets; 1 for rows that have none."""
        values = np.ones((2, self.stop - self.start, self._width), dtype)
        for spans in several:
            _copy(spans, self.start, self.stop, values[0], values[1])
        # Targets are one token further than inputs, and so are the values that belong to them.
        return values

    def own_values(self, suffix: str) -> Array | None:
        """Return the values of the inputs themselves, of shape (number of rows, seq_len); None if there are none."""
        several, kind = (self._masks, np.int16) if suffix == ".mask" else (self._weights, np.float32)
        return self._copy_values(several, kind)[0] if several else None

    @cached_property
    def is_trained(self) -> Array:
        """Whether each input itself is trained on, wherever it is in the row; a target is one token further."""
        values = self.own_values(".mask")
        if values is None:
            # All rows are blank.
            return np.zeros(self.inputs.shape, bool)
        trained: Array = values.reshape(self.inputs.shape) > 0
        return trained

    def owner_of(self, row: int) -> Documents | None:
        """Return the documents from which a row was resolved; None for a blank row."""
        for resolved in self._resolved:
            if resolved.at is None or row in resolved.at:
                return None if row in self._blank else resolved.rows.documents
        return None

    @cached_property
    def cover(self) -> Cover:
        """The documents of all rows that were resolved together."""
        if self._whole is not None:
            return self._whole.cover
        parts = [
            (np.arange(self.stop) if resolved.at is None else resolved.at, resolved.rows.segments(resolved.numbers))
            for resolved in self._resolved
        ]
        shape = self.seq_len, self.batch_size, self._max_documents, self.cutter
        return Cover(join_segments(parts, self.stop), *shape)

    @cached_property
    def _num_tokens(self) -> Integers:
        """The number of tokens in each row that was resolved together."""
        if self._whole is not None:
            return self._whole._num_tokens
        found = np.zeros(self.stop, np.int64)
        for spans in self._spans:
            ends = np.append(0, np.cumsum(spans.lengths))[spans.edges]
            found[slice(None) if spans.at is None else spans.at] = np.minimum(np.diff(ends), self.seq_len)
        return found

    def num_masked(self, number: int) -> dict[str, int]:
        """Return what the masks of tokens counted in a batch."""
        rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
        if self._token_masks and not self._num_masked:
            # Another process has filled these rows, and has kept its counts.
            shape = -1, self.seq_len
            self.copy(np.empty_like(self.inputs).reshape(shape), np.empty_like(self.targets).reshape(shape))
        return {name: int(counts[rows].sum()) for name, counts in self._num_masked.items()}

    @cached_property
    def sources(self) -> Integers:
        """The source of each row that was resolved together."""
        if self._whole is not None:
            return self._whole.sources
        return source_of_rows(self.rows, self._resolved, self.stop)

    @cached_property
    def token_sources(self) -> Array:
        """The source of each token."""
        found = _SPREADS.take(self.inputs.shape)
        self.cover.spread_values(self.start, self.stop, self._segment_sources, found.reshape(-1))
        return found

    @cached_property
    def _segment_sources(self) -> npt.NDArray[np.int32]:
        if self._whole is not None:
            return self._whole._segment_sources
        return segment_sources(self.rows, self._resolved, self.cover.segments, self.stop)

    @cached_property
    def loss_weights(self) -> Array:
        """The weight of each target's loss: 0 where it has none, 1 where a store has no weights."""
        weights: Array = (self.targets != self.ignored).astype(np.float32)
        if self._weights:
            weights *= self._copy_values(self._weights, np.float32)[1].reshape(weights.shape)
        return weights

    def spread(self, name: str) -> Array:
        """Return `positions` or `segment_ids` of every token.

        They are filled in together with the other field if an earlier batch asked for it.
        """
        if name not in self._spreads:
            cover = self.cover
            cover.asked.add(name)
            names = [name for name in cover.asked if name not in self._spreads]
            arrays = dict(zip(names, _SPREADS.take((len(names), *self.inputs.shape)), strict=True))
            cover.spread(self.start, self.stop, **{name: array.reshape(-1) for name, array in arrays.items()})
            self._spreads.update(arrays)
        return self._spreads[name]


class FilledChunk(Chunk):
    """Rows that another process has filled; they are resolved here only if a batch asks for more than its tokens."""

    def __init__(self, resolve: Callable[[], Chunk], inputs: Array, targets: Array) -> None:
        self._resolve = resolve
        self.inputs, self.targets = inputs, targets

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what is not there: everything that resolving finds.
        resolve = self.__dict__.get("_resolve")
        if resolve is None or name.startswith("__"):
            raise AttributeError(name)
        vars(self).update({**vars(resolve()), **vars(self), "_resolve": None})
        return getattr(self, name)


def _range(spans: LocatedSpans, start: int, stop: int) -> tuple[int, int, Integers | None]:
    """Return which of these rows are in a range of the chunk, and their places in it (None: the whole range)."""
    start, stop = start * spans.num_strips, stop * spans.num_strips
    if spans.at is None:
        return start, stop, None
    low, high = np.searchsorted(spans.at, (start, stop)).tolist()
    return low, high, spans.at[low:high] - start


def _copy(spans: LocatedSpans, start: int, stop: int, inputs: Array, targets: Array, ignored: int = IGNORED) -> None:
    """Fill the rows of these spans in arrays that stand for the rows `start` to `stop` of the chunk."""
    low, high, places = _range(spans, start, stop)
    if low == high:
        return
    if spans.num_strips > 1:
        inputs, targets = (array.reshape(len(array) * spans.num_strips, -1) for array in (inputs, targets))
    indices = spans.indices
    copy_rows: Any = kernels.contiguous
    copy_pieces: Any = kernels.pieced
    kind: Any = spans.stored
    if kernels.compiled is not None and (spans.stored, inputs.dtype) in kernels.COPIED:
        copy_rows, copy_pieces, kind = kernels.compiled.copy_rows, kernels.compiled.copy_pieces, spans.stored.itemsize
    try:
        if not spans.is_contiguous:
            edges = spans.edges[low : high + 1]
            copy_pieces(edges, indices, spans.lengths, ignored, kind, places, inputs, targets)
        elif indices[low] >= 0:
            copy_rows(indices[low:high], kind, places, inputs, targets)
        if spans.followed is not None:
            _copy_followed(spans, low, high, places, targets)
        if spans.apart:
            _copy_apart(spans, low, high, places, inputs, targets)
        if spans.following is not None:
            edges = spans.edges[low : high + 1]
            spans.following.join(spans.lengths[edges[0] : edges[-1]], slice(low, high), places, inputs, targets)
    except OverflowError as error:
        raise StoreError(f"{spans.name} has {error}; pass dtype='int64'") from None


def _copy_apart(
    spans: LocatedSpans, low: int, high: int, places: Integers | None, inputs: Array, targets: Array
) -> None:
    """Fill in the spans of some rows that cross the end of a shard or are not mapped."""
    apart: list[tuple[Any, ...]] = spans.apart[bisect_left(spans.apart, (low,)) : bisect_left(spans.apart, (high,))]
    for number, column, length, documents, start, num_targets in apart:
        tokens = documents.read(start, start + num_targets + 1)
        kernels.check_range(tokens, inputs.dtype)
        row = number - low if places is None else int(places[number - low])
        inputs[row, column : column + length] = tokens[: min(length, inputs.shape[1])]
        targets[row, column : column + num_targets] = tokens[1:]


def _copy_followed(spans: LocatedSpans, low: int, high: int, places: Integers | None, targets: Array) -> None:
    """Fill in the target of the last token of pieces that end where a chunk of their document does."""
    assert spans.followed is not None
    first, last = np.searchsorted(spans.followed[0], (low, high)).tolist()
    rows, columns, numbers = (some[first:last] for some in spans.followed)
    tokens = everywhere(spans.stored.str, spans.stored.itemsize)[spans.indices[numbers] + spans.lengths[numbers]]
    kernels.check_range(tokens, targets.dtype)
    targets[rows - low if places is None else places[rows - low], columns] = tokens
