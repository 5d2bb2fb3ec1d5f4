"""Rows out of mapped memory into batches: the inner loop of loading.

Thousands of rows, of any datasets, are resolved and located together, and then copied a few batches at a time. The
loops of `kernels.py` do the copying.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Integers, ResolvedRows, Rows, Spans, join_segments
from tokenmill.errors import StoreError
from tokenmill.filling import kernels
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.context import ContextShare, RowCutter, make_cutter
from tokenmill.filling.cover import Cover
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import everywhere, will_need

__all__ = ["IGNORED", "Chunk"]

IGNORED = -100
"""The target of a token that has none: torch's cross entropy ignores it by default."""

Array = npt.NDArray[Any]
_SPREADS = BufferPool(np.int32)


class Chunk:
    """Rows of one or several batches, which are resolved together, and filled together or part by part (`cut`).

    With `document_mask`, a target in another document is `IGNORED`. So is a target outside the row, and one that a
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
    ) -> None:
        self.seq_len, self.batch_size, self.is_masked = rows.seq_len, batch_size, document_mask
        self.cutter = make_cutter(rows, share) if share is not None or rows.align > 1 else None
        # Aligned pieces are of one document each, and then the loops leave out the targets at their ends.
        self._has_whole_pieces = rows.align > 1
        self._width = rows.seq_len if self.cutter is None else self.cutter.width
        self.start, self.stop, self._max_documents = 0, len(index), rows.max_documents
        self._whole: Chunk | None = None
        self._spreads: dict[str, Array] = {}
        self._blank = np.flatnonzero(index >= limit) if limit is not None else index[:0]
        if len(self._blank):
            filled = np.delete(np.arange(len(index)), self._blank)
            found = rows.resolve(index[filled]) if len(filled) else []
            self._resolved = [resolved.among(filled) for resolved in found]
        else:
            self._resolved = rows.resolve(index)
        self._spans = _locate(self._resolved, None, len(index), self.cutter)
        self._masks = _locate(self._resolved, ".mask", len(index), self.cutter)
        self._weights = _locate(self._resolved, ".weight", len(index), self.cutter)

    def cut(self, start: int, stop: int) -> Chunk:
        """Return the rows from `start` up to `stop` as a chunk to be filled by itself."""
        part = Chunk.__new__(Chunk)
        part.__dict__ = {**vars(self), "start": start, "stop": stop, "_whole": self, "_spreads": {}}
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
            _copy(spans, self.start, self.stop, inputs, targets)
        if self._masks:
            targets[self._copy_values(self._masks, np.int16)[1] == 0] = IGNORED
        if self.is_masked and not self._has_whole_pieces:
            targets.reshape(-1)[self.cover.document_ends(self.start, self.stop)] = IGNORED
        if len(self._blank):
            blank = self._blank[(self._blank >= self.start) & (self._blank < self.stop)] - self.start
            inputs[blank] = 0
            targets[blank] = IGNORED

    def _copy_values(self, several: list[_LocatedSpans], dtype: npt.DTypeLike) -> Array:
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
    def loss_weights(self) -> Array:
        """The weight of each target's loss: 0 where it has none, 1 where a store has no weights."""
        weights: Array = (self.targets != IGNORED).astype(np.float32)
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


class _LocatedSpans(NamedTuple):
    """The spans of rows that are copied in the same way and have one type, with their places in memory.

    `at` are the places of their rows in the chunk, ascending; None for all of its rows. Row i has the spans from
    `edges[i]` up to `edges[i + 1]`. Span i begins with token `indices[i]` of memory, see `everywhere`. Spans that are
    not in one piece of mapped memory have the index -1, or that of another row if rows are contiguous. They are in
    `apart`: (row, column in it, length, documents, first token, number of targets). Padding has the index `BLANK`.
    `followed` are the spans whose last token has a target, the token after them: (row, column, span) of each.

    If a cutter makes several strips of a row, all this is about strips.
    """

    is_contiguous: bool
    num_strips: int
    stored: np.dtype[Any]
    at: Integers | None
    edges: Integers
    lengths: Integers
    indices: Integers
    apart: list[tuple[int, int, int, Documents, int, int]]
    followed: tuple[Integers, Integers, Integers] | None
    name: str


def _locate(
    found: list[ResolvedRows], suffix: str | None, num_rows: int, cutter: RowCutter | None
) -> list[_LocatedSpans]:
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
    return [_locate_group(group, num_rows, cutter) for group in groups.values()]


def _locate_group(
    group: list[tuple[Documents, ResolvedRows]], num_rows: int, cutter: RowCutter | None
) -> _LocatedSpans:
    spans = [resolved.rows.spans(resolved.numbers) for _, resolved in group]
    places: list[Any] = [resolved.at for _, resolved in group]
    followed: list[Any] = [None] * len(group)
    if cutter is not None:
        cut = [cutter.cut_spans(resolved.rows, some) for (_, resolved), some in zip(group, spans, strict=True)]
        spans, followed = [some for some, _ in cut], [some for _, some in cut]
        places = [None if at is None else cutter.strips_of(at) for at in places]
        num_rows *= cutter.num_strips
    join: Any = np.concatenate if len(group) > 1 else itemgetter(0)
    order: Any = slice(None)
    at, ends = places[0], spans[0].ends
    if at is not None:
        at = join(places)
        sizes = join([np.diff(some.ends, prepend=0) for some in spans])
        by_row = np.argsort(at, kind="stable")
        firsts, sizes = (np.cumsum(sizes) - sizes)[by_row], sizes[by_row]
        ends = np.cumsum(sizes)
        order = np.arange(int(sizes.sum())) + np.repeat(firsts - (ends - sizes), sizes)
        at = at[by_row] if len(at) < num_rows else None
    has_next = None
    if any(some is not None for some in followed):
        pairs = zip(followed, spans, strict=True)
        followed = [np.zeros(len(own.starts), bool) if some is None else some for some, own in pairs]
        has_next = join(followed)[order]
    found = [(documents, some, more) for (documents, _), some, more in zip(group, spans, followed, strict=True)]
    if cutter is None:
        addresses = join([documents.addresses(some.starts, some.lengths) for documents, some, _ in found])[order]
    else:
        addresses = join([_find_addresses(*some) for some in found])[order]
    edges, lengths = np.append(0, ends), join([some.lengths for some in spans])[order]
    stored, is_contiguous = group[0][0].dtype, group[0][1].rows.has_lookahead
    apart: list[tuple[int, int, int, Documents, int, int]] = []
    numbers = np.flatnonzero(addresses == 0)
    if len(numbers):
        owners = np.repeat(np.arange(len(group)), [len(some.starts) for some in spans])[order][numbers]
        rows, columns = _places(edges, lengths, numbers)
        documents = [group[owner][0] for owner in owners.tolist()]
        starts, sizes = join([some.starts for some in spans])[order][numbers], lengths[numbers]
        targets = sizes - 1 if has_next is None else sizes - 1 + has_next[numbers]
        columns_of = rows.tolist(), columns.tolist(), sizes.tolist(), documents, starts.tolist(), targets.tolist()
        apart = list(zip(*columns_of, strict=True))
        if is_contiguous:
            # The loops copy every row, so use a row that is in memory in place of each that is not.
            addresses[numbers] = addresses.max()
    return _LocatedSpans(
        is_contiguous=is_contiguous,
        num_strips=1 if cutter is None else cutter.num_strips,
        stored=stored,
        at=at,
        edges=edges,
        lengths=lengths,
        indices=addresses // stored.itemsize - 1,
        apart=apart,
        followed=None if has_next is None else _find_followed(edges, lengths, addresses, has_next),
        name=" or ".join(dict.fromkeys(documents.name for documents, _ in group)),
    )


def _find_addresses(documents: Documents, spans: Spans, followed: npt.NDArray[np.bool_] | None) -> Integers:
    """Return where spans are in memory, each with the token after it if that is a target; 0 if they are not."""
    lengths = spans.lengths if followed is None else spans.lengths + followed
    is_blank = spans.starts < 0
    if not is_blank.any():
        return documents.addresses(spans.starts, lengths)
    found = np.full(len(lengths), (kernels.BLANK + 1) * documents.dtype.itemsize)
    found[~is_blank] = documents.addresses(spans.starts[~is_blank], lengths[~is_blank])
    return found


def _places(edges: Integers, lengths: Integers, numbers: Integers) -> tuple[Integers, Integers]:
    """Return the row of some spans, and the column in it at which each begins."""
    rows = np.searchsorted(edges, numbers, "right") - 1
    before = np.append(0, np.cumsum(lengths))
    return rows, before[numbers] - before[edges[rows]]


def _find_followed(
    edges: Integers, lengths: Integers, addresses: Integers, has_next: npt.NDArray[np.bool_]
) -> tuple[Integers, Integers, Integers]:
    """Return row, column and number of the spans in memory whose last token has the token after it as a target."""
    numbers = np.flatnonzero(has_next & (addresses > 0))
    rows, columns = _places(edges, lengths, numbers)
    return rows, columns + lengths[numbers] - 1, numbers


def _range(spans: _LocatedSpans, start: int, stop: int) -> tuple[int, int, Integers | None]:
    """Return which of these rows are in a range of the chunk, and their places in it (None: the whole range)."""
    start, stop = start * spans.num_strips, stop * spans.num_strips
    if spans.at is None:
        return start, stop, None
    low, high = np.searchsorted(spans.at, (start, stop)).tolist()
    return low, high, spans.at[low:high] - start


def _copy(spans: _LocatedSpans, start: int, stop: int, inputs: Array, targets: Array) -> None:
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
            copy_pieces(edges, indices, spans.lengths, IGNORED, kind, places, inputs, targets)
        elif indices[low] >= 0:
            copy_rows(indices[low:high], kind, places, inputs, targets)
        if spans.followed is not None:
            _copy_followed(spans, low, high, places, targets)
        if spans.apart:
            _copy_apart(spans, low, high, places, inputs, targets)
    except OverflowError as error:
        raise StoreError(f"{spans.name} has {error}; pass dtype='int64'") from None


def _copy_apart(
    spans: _LocatedSpans, low: int, high: int, places: Integers | None, inputs: Array, targets: Array
) -> None:
    """Fill in the spans of some rows that cross the end of a shard or are not mapped."""
    apart: list[tuple[Any, ...]] = spans.apart[bisect_left(spans.apart, (low,)) : bisect_left(spans.apart, (high,))]
    for number, column, length, documents, start, num_targets in apart:
        tokens = documents.read(start, start + num_targets + 1)
        kernels.check_range(tokens, inputs.dtype)
        row = number - low if places is None else int(places[number - low])
        inputs[row, column : column + length] = tokens[: min(length, inputs.shape[1])]
        targets[row, column : column + num_targets] = tokens[1:]


def _copy_followed(spans: _LocatedSpans, low: int, high: int, places: Integers | None, targets: Array) -> None:
    """Fill in the target of the last token of pieces that end where a chunk of their document does."""
    assert spans.followed is not None
    first, last = np.searchsorted(spans.followed[0], (low, high)).tolist()
    rows, columns, numbers = (some[first:last] for some in spans.followed)
    tokens = everywhere(spans.stored.str, spans.stored.itemsize)[spans.indices[numbers] + spans.lengths[numbers]]
    kernels.check_range(tokens, targets.dtype)
    targets[rows - low if places is None else places[rows - low], columns] = tokens
