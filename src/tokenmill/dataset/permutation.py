"""Global order without an index: where a number goes is found by a few rounds of arithmetic.

A Feistel network over a rectangle of `a x b >= n` numbers, as square as can be, so that hardly any
number falls outside and has to walk again. O(1) memory, any number at random. Four rounds, as one
popular loader has, leave neighbours correlated (0.4-0.7).
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

__all__ = ["Integers", "distinct", "make_key", "permute", "unpermute"]

Integers = npt.NDArray[np.int64]

ROUNDS = 8
_MASK = (1 << 64) - 1


def distinct(values: Integers) -> list[int]:
    """The different values, in order; `np.unique` would load a part of numpy that takes 50 ms at the first batch."""
    if len(values) and values.min() == values.max():
        return [int(values[0])]
    return sorted(set(values[np.flatnonzero(np.diff(values, prepend=-1))].tolist()))


def make_key(*numbers: int) -> int:
    """64 bits out of a seed, an epoch and the like; any difference changes about half of them."""
    key = 0
    for number in numbers:
        key = _mix64(key ^ _mix64(number + 0x9E3779B97F4A7C15))
    return key


def _mix64(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permute(index: Integers, size: int, key: int) -> Integers:
    """Where each number below `size` goes in a permutation that `key` chooses; about 30 ns each for many."""
    return _walk(index, size, key, backwards=False)


def unpermute(index: Integers, size: int, key: int) -> Integers:
    """The number that `permute` sends to each place."""
    return _walk(index, size, key, backwards=True)


def _walk(index: Integers, size: int, key: int, *, backwards: bool) -> Integers:
    side = isqrt(size - 1) + 1 if size > 1 else 1
    sides = (side, -(-size // side))
    keys = [*enumerate(_mix64(key + number) & 0xFFFFFFFF for number in range(ROUNDS))]
    if backwards:
        keys.reverse()
    result = _rounds(index, sides, keys, backwards)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        # Fewer than `side` numbers are outside; going on from one reaches one that is inside.
        result[outside] = _rounds(result[outside], sides, keys, backwards)
        outside = outside[result[outside] >= size]
    return result


def _rounds(index: Integers, sides: tuple[int, int], keys: list[tuple[int, int]], backwards: bool) -> Integers:
    high, low = np.divmod(index, sides[1])
    halves = [high.astype(np.uint32), low.astype(np.uint32)]
    for number, key in keys:
        this, that = number % 2, 1 - number % 2
        size = np.uint32(sides[this])
        shift = (_scramble(halves[that], key) * np.uint64(size) >> np.uint64(32)).astype(np.uint32)
        # Both terms are below the size, which is at most 2^31, so one addition or subtraction is the modulus: of
        # the two results, the one that is out of range has wrapped, or not yet, and is the larger.
        moved = halves[this] - shift if backwards else halves[this] + shift
        halves[this] = np.minimum(moved, moved + size if backwards else moved - size)
    return halves[0].astype(np.int64) * sides[1] + halves[1]


def _scramble(values: npt.NDArray[np.uint32], key: int) -> npt.NDArray[np.uint64]:
    """32 bits that depend on every bit of the value; murmur3's finalizer."""
    bits = values ^ np.uint32(key)
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x85EBCA6B)
    bits ^= bits >> np.uint32(13)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> np.uint32(16)
    return bits.astype(np.uint64)
