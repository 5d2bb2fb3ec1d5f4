"""The inner loops: copy rows, or rows of several pieces, out of mapped memory into batches.

The loops in C do it if the package was installed with a compiler. If not, or for other types, those of numpy in this
file do the same. `TOKENMILL_COMPILED=0` in the environment disables the loops in C, so that the two can be compared.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.filling.buffers import BufferPool
from tokenmill.store.mapping import everywhere, windows_everywhere
from tokenmill.store.table import Integers

try:
    from tokenmill.filling import compiled
except ImportError:
    compiled = None  # type: ignore[assignment]
if os.environ.get("TOKENMILL_COMPILED") == "0" or sys.byteorder != "little":
    compiled = None  # type: ignore[assignment]

__all__ = ["BLANK", "COPIED", "TOKENS_AT_ONCE", "check_range", "compiled", "contiguous", "pieced"]

COPIED = {(np.dtype(stored), np.dtype(given)) for stored in (np.uint16, np.int32) for given in (np.int64, np.int32)}
"""The types of stored tokens and of batches that the loops in C copy between."""
BLANK = -2
"""The index of a piece that is padding; it has no address."""
LONG_ROW = 8192
"""From this many tokens on, a slice per row is faster than a gather."""
STRIP = 128
"""Tokens of a long piece that are copied at once."""
TOKENS_AT_ONCE = 1 << 16
"""128 KB of two-byte tokens and 1 MB of batches fit the second-level cache, and 16 bits can count this many."""

Array = npt.NDArray[Any]


def contiguous(
    indices: Integers, stored: np.dtype[Any], places: Integers | None, inputs: Array, targets: Array
) -> None:
    """Do what `compiled.copy_rows` does, for tokens of any type: row i begins with token `indices[i]` of memory.

    Row i goes to row `places[i]` of both arrays, or to row i. Its last target is the token after the row.

    Short rows are gathered as opaque values by one indexing operation (3-4 times the speed of an index per token), a
    few at a time, so that they are still in the CPU cache when they are widened. Long rows are copied one by one.
    """
    _touch(stored, indices)
    width = inputs.shape[1] + 1
    if width < LONG_ROW:
        windows = windows_everywhere(width, stored.itemsize)
        step = max(1, TOKENS_AT_ONCE // width)
        for first in range(0, len(indices), step):
            some = slice(first, first + step)
            tokens = windows[indices[some]].view(stored).reshape(-1, width)
            check_range(tokens, inputs.dtype)
            rows: Any = some if places is None else places[some]
            inputs[rows] = tokens[:, :-1]
            targets[rows] = tokens[:, 1:]
        return
    memory = everywhere(stored.str, stored.itemsize)
    for number, start in enumerate(indices.tolist()):
        row = number if places is None else places[number]
        tokens = memory[start : start + width]
        check_range(tokens, inputs.dtype)
        inputs[row] = tokens[:-1]
        targets[row] = tokens[1:]


def check_range(tokens: Array, dtype: np.dtype[Any]) -> None:
    """Raise an OverflowError for tokens that a narrower type cannot hold."""
    if np.can_cast(tokens.dtype, dtype):
        return
    bounds = np.iinfo(dtype)
    wrong = tokens[(tokens < bounds.min) | (tokens > bounds.max)]
    if wrong.size:
        raise OverflowError(f"the id {wrong[0]}, which {dtype} cannot hold")


def _touch(stored: np.dtype[Any], indices: Integers) -> None:
    """Read one token of each piece that is about to be copied.

    The CPU overlaps the cache misses of single reads, but not those of copies: at 1,024 tokens a row, copying takes
    0.35 ns a token after this and 0.51 without.
    """
    everywhere(stored.str, stored.itemsize)[indices]


@cache
def _scratch(stored: np.dtype[Any]) -> BufferPool:
    return BufferPool(stored)


@cache
def _memory(kind: str, itemsize: int) -> memoryview:
    """Return all memory as one buffer; a slice of it costs half as much as a slice of an array."""
    return everywhere(kind, itemsize).data


def pieced(
    edges: Integers,
    indices: Integers,
    lengths: Integers,
    ignored: int,
    stored: np.dtype[Any],
    places: Integers | None,
    inputs: Array,
    targets: Array,
) -> None:
    """Do what `compiled.copy_pieces` does, for tokens of any type: row i is the pieces `edges[i]` to `edges[i + 1]`.

    The last token of a piece has no target, nor has padding, which is a piece with the index `BLANK`. The caller copies
    a piece with another negative index. Rows are joined in a scratch array of the stored type, and widened a few at a
    time.
    """
    num_rows, seq_len = len(edges) - 1, inputs.shape[1]
    edges, indices, lengths = edges - edges[0], indices[edges[0] : edges[-1]], lengths[edges[0] : edges[-1]]
    before = np.concatenate([[0], np.cumsum(lengths)])
    used = np.diff(before[edges])
    # The place of each piece's first token when rows are laid end to end, padding included.
    firsts = before[:-1] - np.repeat(before[edges[:-1]] - np.arange(num_rows) * seq_len, np.diff(edges))
    short = [(row, int(used[row])) for row in np.flatnonzero(used < seq_len).tolist()]
    tokens = _scratch(stored).take((num_rows, seq_len))
    _join(tokens.reshape(-1), firsts, lengths, indices)
    for row, end in short:
        tokens[row, end:] = 0
    check_range(tokens, inputs.dtype)
    shifted = targets[:num_rows] if places is None else np.empty(tokens.shape, targets.dtype)
    step = max(1, TOKENS_AT_ONCE // seq_len)
    for first in range(0, num_rows, step):
        some = slice(first, first + step)
        inputs[some if places is None else places[some]] = tokens[some]
        shifted[some, :-1] = tokens[some, 1:]
    shifted[:, -1] = ignored
    shifted.reshape(-1)[firsts + lengths - 1] = ignored
    for piece in np.flatnonzero(indices == BLANK).tolist():
        shifted.reshape(-1)[firsts[piece] : firsts[piece] + lengths[piece]] = ignored
    for row, end in short:
        shifted[row, end:] = ignored
    if places is not None:
        targets[places] = shifted


def _join(flat: Array, places: Integers, lengths: Integers, indices: Integers) -> None:
    """Copy each piece to its place, short ones one by one; zero the places of those that are not in memory."""
    is_mapped = indices >= 0
    if not is_mapped.all():
        for place, length in zip(places[~is_mapped].tolist(), lengths[~is_mapped].tolist(), strict=True):
            flat[place : place + length] = 0
        places, lengths, indices = places[is_mapped], lengths[is_mapped], indices[is_mapped]
    _touch(flat.dtype, indices)
    is_long = lengths >= STRIP
    _copy_strips(flat, places[is_long], lengths[is_long], indices[is_long])
    places, lengths, indices = places[~is_long], lengths[~is_long], indices[~is_long]
    target, memory = flat.data, _memory(flat.dtype.str, flat.itemsize)
    for to, end_to, index, end_index in zip(
        places.tolist(), (places + lengths).tolist(), indices.tolist(), (indices + lengths).tolist(), strict=True
    ):
        target[to:end_to] = memory[index:end_index]


def _copy_strips(flat: Array, places: Integers, lengths: Integers, indices: Integers) -> None:
    """Copy pieces of at least `STRIP` tokens, each in strips of that size, all strips by one indexing operation.

    The last strip of a piece ends with it and may overlap the one before. One slice per piece would wait for memory
    at each of them, one after the other; strips of many pieces are fetched at the same time.
    """
    counts = (lengths + (STRIP - 1)) // STRIP
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(0, int(counts.sum()) * STRIP, STRIP) - (firsts * STRIP).repeat(counts)
    np.minimum(offsets, (lengths - STRIP).repeat(counts), out=offsets)
    windows = np.ndarray(max(0, len(flat) - STRIP + 1), f"V{STRIP * flat.itemsize}", flat, strides=(flat.itemsize,))
    found = windows_everywhere(STRIP, flat.itemsize)[indices.repeat(counts) + offsets]
    windows[places.repeat(counts) + offsets] = found
