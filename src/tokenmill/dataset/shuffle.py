"""Rows in a global random order, another one in every epoch, without an index in memory.

The order is a Feistel network over a rectangle of `a x b >= n` numbers, as square as possible, so that few numbers
fall outside and have to walk again. It takes O(1) memory, and any place of the order can be computed alone. It has
eight rounds, because four leave neighbours correlated (0.4-0.7).
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import DerivedRows, Integers, PackedRows, ResolvedRows, Rows, as_rows, as_seed
from tokenmill.errors import UsageError

__all__ = ["GroupedOrder", "ShuffledRows", "distinct", "make_key", "permute", "shuffle"]

ROUNDS = 8
WINDOWS_PER_GROUP = 32
"""A packing that cannot keep all its windows in memory is shuffled in groups of them.

It had permuted its documents globally before it cut them into windows, so a group is a random sample of the corpus.
"""
PIECES, ROWS = 1, 2
"""Purposes of keys: the order of pieces, or the order of the rows of a group."""
_MASK = (1 << 64) - 1


def shuffle(rows: Rows, *, seed: int = 0, block_tokens: int | None = None) -> Rows:
    """Return the same rows in a random order, another one in every epoch.

    With `block_tokens`, shards come in a random order, and rows are shuffled among about that many tokens at a
    time. This is for stores that do not fit on the machine.
    """
    rows, seed = as_rows(rows, "shuffle"), as_seed(seed)
    if block_tokens is not None:
        from tokenmill.dataset.block_shuffle import BlockShuffledRows

        return BlockShuffledRows(rows, seed, block_tokens)
    return ShuffledRows(rows, seed)


class ShuffledRows(DerivedRows):
    """Rows of another dataset, permuted epoch by epoch."""

    def __init__(self, rows: Rows, seed: int) -> None:
        if rows.limit is not None and rows.limit < rows.num_rows:
            raise UsageError(f"a shuffle needs a whole epoch of {rows.num_rows} rows, and there are only {rows.limit}")
        if rows.has_stages:
            raise UsageError("a shuffle would undo the order of a mixture's stages; shuffle the sources instead")
        super().__init__(rows)
        self._seed = seed
        self.limit = None if rows.limit is None else rows.limit // rows.num_rows * rows.num_rows

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Permute within each epoch of the index, then resolve in the shuffled dataset."""
        epochs, places = np.divmod(index, self.num_rows)
        inner = np.empty(len(index), np.int64)
        present = distinct(epochs)
        for epoch in present:
            mine: Any = epochs == epoch if len(present) > 1 else slice(None)
            inner[mine] = self._permute(places[mine], epoch) + epoch * self.num_rows
        return self._rows.resolve(inner)

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Undo the permutation of each epoch."""
        num_epochs = -(-stop // self.num_rows)
        found = []
        for number in self._rows.where(leaf, row, num_epochs * self.num_rows):
            epoch, place = divmod(number, self.num_rows)
            (inner,) = self._permute(np.array([place]), epoch, inverse=True).tolist()
            found.append(epoch * self.num_rows + inner)
        return sorted(number for number in found if number < stop)

    def _permute(self, index: Integers, epoch: int, *, inverse: bool = False) -> Integers:
        """Return the row at each place of an epoch, or the place of each row."""
        key, ends = make_key(self._seed, epoch), self._rows.window_ends
        if ends is None:
            return permute(index, self.num_rows, key, inverse=inverse)
        num_groups = -(-len(ends) // WINDOWS_PER_GROUP)
        groups = np.arange(len(ends)) // WINDOWS_PER_GROUP
        return GroupedOrder(np.diff(ends, prepend=0), num_groups, lambda _: groups, key).permute(index, inverse=inverse)

    def describe(self) -> dict[str, Any]:
        """Describe the seed and the rows."""
        return {"kind": "shuffle", "seed": self._seed, "rows": self._rows.describe()}

    def title(self) -> str:
        """Return one line for the tree."""
        return f"shuffle, seed {self._seed}"


def distinct(values: Integers) -> list[int]:
    """Return the distinct values in order; `np.unique` would import a part of numpy that takes 50 ms to load."""
    if len(values) and values.min() == values.max():
        return [int(values[0])]
    return sorted(set(values[np.flatnonzero(np.diff(values, prepend=-1))].tolist()))


def make_key(*numbers: int) -> int:
    """Hash a seed, an epoch and the like to 64 bits; any change flips about half of them."""
    key = 0
    for number in numbers:
        key = _mix64(key ^ _mix64(number + 0x9E3779B97F4A7C15))
    return key


def _mix64(value: int) -> int:
    """Apply the finalizer of splitmix64."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permute(index: Integers, size: int, key: int, *, inverse: bool = False) -> Integers:
    """Map numbers below `size` through the permutation of a key, or through its inverse.

    It takes about 30 ns for each of many numbers.
    """
    side = isqrt(size - 1) + 1 if size > 1 else 1
    sides = (side, -(-size // side))
    keys = [*enumerate(_mix64(key + number) & 0xFFFFFFFF for number in range(ROUNDS))]
    if inverse:
        keys.reverse()
    result = _run_rounds(index, sides, keys, inverse)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        # Fewer than `side` numbers are outside, and walking on from one of them reaches one that is inside.
        result[outside] = _run_rounds(result[outside], sides, keys, inverse)
        outside = outside[result[outside] >= size]
    return result


def _run_rounds(index: Integers, sides: tuple[int, int], keys: list[tuple[int, int]], inverse: bool) -> Integers:
    """Run the rounds of the network; the round function is the finalizer of murmur3."""
    high, low = np.divmod(index, sides[1])
    halves: list[npt.NDArray[np.uint32]] = [high.astype(np.uint32), low.astype(np.uint32)]
    for number, key in keys:
        this, that = number % 2, 1 - number % 2
        bits = halves[that] ^ np.uint32(key)
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x85EBCA6B)
        bits ^= bits >> np.uint32(13)
        bits *= np.uint32(0xC2B2AE35)
        bits ^= bits >> np.uint32(16)
        size = np.uint32(sides[this])
        shift = (bits.astype(np.uint64) * np.uint64(size) >> np.uint64(32)).astype(np.uint32)
        # Both terms are below the size, which is at most 2^31, so one addition or subtraction is the modulus: of the
        # two candidates, the one that is out of range has wrapped around, or not yet, and is the larger one.
        moved = halves[this] - shift if inverse else halves[this] + shift
        halves[this] = np.minimum(moved, moved + size if inverse else moved - size)
    return halves[0].astype(np.int64) * sides[1] + halves[1]


class GroupedOrder:
    """A random order of rows in which the rows of a few randomly chosen pieces come together.

    Piece i has `sizes[i]` rows, after those of the pieces before it. All pieces come in a random order, which is cut
    into groups; rows are shuffled within their group. `divide` takes the number of rows before each piece of that order
    and returns the group of each. A group may be empty.
    """

    def __init__(self, sizes: Integers, num_groups: int, divide: Callable[[Integers], Integers], *key: int) -> None:
        self._key = key
        self._first_rows = np.cumsum(sizes) - sizes
        self.pieces = permute(np.arange(len(sizes)), len(sizes), make_key(*key, PIECES))
        self._before = np.concatenate([[0], np.cumsum(sizes[self.pieces])])
        self.first_pieces = np.searchsorted(divide(self._before[:-1]), np.arange(num_groups + 1))
        """The place of each group's first piece in the order of pieces."""
        self.starts = self._before[self.first_pieces]
        """The first place of each group, and the end of the last one."""

    def find_groups(self, places: Integers) -> Integers:
        """Return the group of each place; an empty group begins where the next one does, and has no places."""
        return np.searchsorted(self.starts[:-1], places, "right") - 1

    def permute(self, index: Integers, *, inverse: bool = False) -> Integers:
        """Return the row at each place of the order, or the place of each row."""
        if inverse:
            pieces = np.searchsorted(self._first_rows, index, "right") - 1
            index = index - self._first_rows[pieces] + self._before[np.argsort(self.pieces)[pieces]]
        groups = self.find_groups(index)
        places = np.empty(len(index), np.int64)
        for group in distinct(groups):
            mine = groups == group
            start, stop = self.starts[group : group + 2].tolist()
            key = make_key(*self._key, ROWS, group)
            places[mine] = permute(index[mine] - start, stop - start, key, inverse=inverse) + start
        if inverse:
            return places
        turns = np.searchsorted(self._before, places, "right") - 1
        rows: Integers = places - self._before[turns] + self._first_rows[self.pieces[turns]]
        return rows
