"""Rows out of mapped memory into batches: the inner loop of loading.

Thousands of rows, of any datasets, are resolved and located together, and then copied a few batches at a time. The
loops of `kernels.py` do the copying.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Integers, ResolvedRows, Rows, join_segments
from tokenmill.errors import StoreError
from tokenmill.filling import kernels
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.cover import Cover
from tokenmill.filling.pieces_of_streams import Following, cut_stream
from tokenmill.filling.row_sources import segment_sources, source_of_rows
from tokenmill.filling.token_masks import TokenMask
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import will_need

__all__ = ["IGNORED", "Chunk", "FilledChunk"]

IGNORED = -100
"""The target of a token that has none, if no other is chosen: torch's cross entropy ignores it by default."""

ROWS_PER_RUN = 8
"""With fewer rows in a run of documents on average, rows are cut at the ends of runs all at once, not one by one."""

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
        token_masks: Sequence[TokenMask] = (),
        ignored: int = IGNORED,
    ) -> None:
        self.seq_len, self.batch_size, self.is_masked = rows.seq_len, batch_size, document_mask
        self.rows, self.start, self.stop = rows, 0, len(index)
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
        self._spans = _locate(self._resolved, None, len(index))
        self._masks = _locate(self._resolved, ".mask", len(index))
        self._weights = _locate(self._resolved, ".weight", len(index))

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
        both = pool.take((2, self.stop - self.start, self.seq_len))
        self.copy(both[0], both[1])
        self.inputs, self.targets = both.reshape(2, -1, self.batch_size, self.seq_len)
        return self

    def copy(self, inputs: Array, targets: Array) -> None:
        """Fill arrays of shape (number of rows, seq_len)."""
        for spans in self._spans:
            _copy(spans, self.start, self.stop, inputs, targets, self.ignored)
        if self._masks:
            targets[self._copy_values(self._masks, np.int16)[1] == 0] = self.ignored
        if self.is_masked:
            targets.reshape(-1)[self.cover.document_ends(self.start, self.stop)] = self.ignored
        if len(self._blank):
            blank = self._blank[(self._blank >= self.start) & (self._blank < self.stop)] - self.start
            inputs[blank] = 0
            targets[blank] = self.ignored
        for mask in self._token_masks:
            lengths = self._num_tokens[self.start : self.stop]
            self._num_masked[mask.name] = mask.apply(inputs, targets, lengths, self.ignored)

    def _copy_values(self, several: list[_LocatedSpans], dtype: npt.DTypeLike) -> Array:
        """Copy the values that a store has beside its tokens, for inputs and for targets; 1 for rows that have none."""
        values = np.ones((2, self.stop - self.start, self.seq_len), dtype)
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
        return Cover(join_segments(parts, self.stop), self.seq_len, self.batch_size)

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


class _LocatedSpans(NamedTuple):
    """The spans of rows that are copied in the same way and have one type, with their places in memory.

    `at` are the places of their rows in the chunk, ascending; None for all of its rows. Row i has the spans from
    `edges[i]` up to `edges[i + 1]`. Span i begins with token `indices[i]` of memory, see `everywhere`. Spans that are
    not in one piece of mapped memory have the index -1, or that of another row if rows are contiguous. They are in
    `apart`: (row, column in it, length, documents, first token).
    """

    is_contiguous: bool
    stored: np.dtype[Any]
    at: Integers | None
    edges: Integers
    lengths: Integers
    indices: Integers
    apart: list[tuple[int, int, int, Documents, int]]
    name: str
    following: Following | None = None


def _locate(found: list[ResolvedRows], suffix: str | None, num_rows: int) -> list[_LocatedSpans]:
    """Locate rows, or the values that stores have beside their tokens, in files that end in `suffix`.

    All rows of one kind and type are located together, so that a mixture costs no more than its sources.
    """
    groups: dict[tuple[bool, np.dtype[Any]], list[tuple[Documents, ResolvedRows]]] = {}
    for resolved in found:
        documents: Documents | None = resolved.rows.documents
        if suffix is not None:
            documents = resolved.rows.documents.view(suffix) if suffix in resolved.rows.documents.beside else None
        if documents is not None:
            groups.setdefault((resolved.rows.has_lookahead, documents.dtype), []).append((documents, resolved))
    return [_locate_group(group, num_rows) for group in groups.values()]


def _locate_group(group: list[tuple[Documents, ResolvedRows]], num_rows: int) -> _LocatedSpans:
    spans = [resolved.rows.spans(resolved.numbers) for _, resolved in group]
    is_stream, following = group[0][1].rows.has_lookahead, None
    width = group[0][1].rows.seq_len
    if is_stream and any(some.is_scattered and some.run_tokens < ROWS_PER_RUN * width for some, _ in group):
        spans, following = cut_stream([documents for documents, _ in group], spans)
    join: Any = np.concatenate if len(group) > 1 else itemgetter(0)
    order: Any = slice(None)
    at, ends = group[0][1].at, spans[0].ends
    if at is not None:
        at = join([resolved.at for _, resolved in group])
        sizes = join([np.diff(some.ends, prepend=0) for some in spans])
        by_row = np.argsort(at, kind="stable")
        firsts, sizes = (np.cumsum(sizes) - sizes)[by_row], sizes[by_row]
        ends = np.cumsum(sizes)
        order = np.arange(int(sizes.sum())) + np.repeat(firsts - (ends - sizes), sizes)
        following = following and following.in_order(by_row)
        at = at[by_row] if len(at) < num_rows else None
    pairs = zip(group, spans, strict=True)
    addresses = join([documents.addresses(some.starts, some.lengths) for (documents, _), some in pairs])[order]
    edges, lengths = np.append(0, ends), join([some.lengths for some in spans])[order]
    apart: list[tuple[int, int, int, Documents, int]] = []
    numbers = np.flatnonzero(addresses == 0)
    stored, is_contiguous = group[0][0].dtype, is_stream and following is None
    if len(numbers):
        owners = np.repeat(np.arange(len(group)), [len(some.starts) for some in spans])[order][numbers]
        rows = np.searchsorted(edges, numbers, "right") - 1
        before = np.append(0, np.cumsum(lengths))
        columns, starts = before[numbers] - before[edges[rows]], join([some.starts for some in spans])[order][numbers]
        documents = [group[owner][0] for owner in owners.tolist()]
        places = rows.tolist(), columns.tolist(), lengths[numbers].tolist()
        apart = list(zip(*places, documents, starts.tolist(), strict=True))
        if is_contiguous:
            # The loops copy every row, so use a row that is in memory in place of each that is not.
            addresses[numbers] = addresses.max()
    return _LocatedSpans(
        is_contiguous=is_contiguous,
        stored=stored,
        at=at,
        edges=edges,
        lengths=lengths,
        indices=addresses // stored.itemsize - 1,
        apart=apart,
        name=" or ".join(dict.fromkeys(documents.name for documents, _ in group)),
        following=following,
    )


def _range(spans: _LocatedSpans, start: int, stop: int) -> tuple[int, int, Integers | None]:
    """Return which of these rows are in a range of the chunk, and their places in it (None: the whole range)."""
    if spans.at is None:
        return start, stop, None
    low, high = np.searchsorted(spans.at, (start, stop)).tolist()
    return low, high, spans.at[low:high] - start


def _copy(spans: _LocatedSpans, start: int, stop: int, inputs: Array, targets: Array, ignored: int = IGNORED) -> None:
    """Fill the rows of these spans in arrays that stand for the rows `start` to `stop` of the chunk."""
    low, high, places = _range(spans, start, stop)
    if low == high:
        return
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
        if spans.apart:
            _copy_apart(spans, low, high, places, inputs, targets)
        if spans.following is not None:
            edges = spans.edges[low : high + 1]
            spans.following.join(spans.lengths[edges[0] : edges[-1]], slice(low, high), places, inputs, targets)
    except OverflowError as error:
        raise StoreError(f"{spans.name} has {error}; pass dtype='int64'") from None


def _copy_apart(
    spans: _LocatedSpans, low: int, high: int, places: Integers | None, inputs: Array, targets: Array
) -> None:
    """Fill in the spans of some rows that cross the end of a shard or are not mapped."""
    apart: list[tuple[Any, ...]] = spans.apart[bisect_left(spans.apart, (low,)) : bisect_left(spans.apart, (high,))]
    for number, column, length, documents, start in apart:
        tokens = documents.read(start, start + length)
        kernels.check_range(tokens, inputs.dtype)
        row = number - low if places is None else int(places[number - low])
        inputs[row, column : column + length] = tokens[: inputs.shape[1]]
        targets[row, column : column + length - 1] = tokens[1:]
