"""Which row belongs to which item if nearly every item has one row, some have several, and some have none.

Only the odd items are kept. Between two of them, rows and items are counted in step.
"""

from __future__ import annotations

import numpy as np

from tokenmill.store.table import Integers

__all__ = ["UnevenRows"]


class UnevenRows:
    """Rows of `num_items` items: item `odd[i]` has `counts[i]` rows, and every other item has one."""

    def __init__(self, num_items: int, odd: Integers, counts: Integers) -> None:
        # With a sentinel of one row before the first item and after the last, every row lies between two odd items.
        self._odd = np.concatenate([[-1], odd, [num_items]]).astype(np.int64)
        counts = np.concatenate([[1], counts, [1]]).astype(np.int64)
        # The first row of each odd item, and the first row after it.
        self._first_rows = self._odd + np.cumsum(counts - 1) - (counts - 1)
        self._next_rows = self._first_rows + counts
        self.num_rows = int(self._first_rows[-1])

    def find(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the item of each row, and which part of it the row is."""
        last = np.searchsorted(self._next_rows, rows, "right") - 1
        items = rows - self._next_rows[last] + self._odd[last] + 1
        parts = np.zeros(len(rows), np.int64)
        inside = rows >= self._first_rows[last + 1]
        upcoming = last[inside] + 1
        items[inside] = self._odd[upcoming]
        parts[inside] = rows[inside] - self._first_rows[upcoming]
        return items, parts

    def first_row(self, item: int) -> int:
        """Count the rows of all items before one, which is its first row if it has any."""
        last = int(np.searchsorted(self._odd, item)) - 1
        return int(self._next_rows[last]) + item - int(self._odd[last]) - 1

    def are_odd(self, items: Integers) -> np.ndarray:
        """Return which of the items have no row or several."""
        found: np.ndarray = self._odd[np.searchsorted(self._odd, items)] == items
        return found
