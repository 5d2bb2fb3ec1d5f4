"""Which of many stretches, laid end to end, holds a place."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Stretches"]

Integers = npt.NDArray[np.int64]

MANY = 512
"""For fewer places, to make a table is not worth while."""
CELLS_PER_STRETCH = 4
MOST_STEPS = 4


class Stretches:
    """Stretches by their ends, in order; places count from 0.

    Places are asked for in random order, so that every comparison of a binary search is a surprise to the CPU: 40 ns
    a place for 64 stretches. Where stretches are of similar size, a table says where to begin, and
    a comparison or two that no branch depends on find the rest in 4 ns.
    """

    def __init__(self, ends: Integers) -> None:
        self._ends = ends

    def find(self, places: Integers) -> npt.NDArray[np.intp]:
        """The number of the stretch that holds each place, all of which are before the last end."""
        if len(places) < MANY or self._num_steps > MOST_STEPS:
            return np.searchsorted(self._ends, places, "right")
        shift, firsts = self._table
        found: npt.NDArray[np.intp] = firsts[places >> shift]
        for _ in range(self._num_steps):
            found += places >= self._ends[found]
        return found

    @cached_property
    def _table(self) -> tuple[int, npt.NDArray[np.intp]]:
        """The stretch at the beginning of each cell of `1 << shift` places."""
        size = int(self._ends[-1])
        shift = max(0, (size // (CELLS_PER_STRETCH * len(self._ends))).bit_length() - 1)
        cells = np.arange(((size - 1) >> shift) + 2) << shift
        return shift, np.searchsorted(self._ends, cells, "right")

    @cached_property
    def _num_steps(self) -> int:
        """How many ends the fullest cell has."""
        return int(np.diff(self._table[1]).max(initial=0))
