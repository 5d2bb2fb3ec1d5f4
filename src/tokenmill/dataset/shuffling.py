"""Rows in a global random order, another one in every epoch, without an index in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.dataset.base import Choice, Integers, PackedRows, Rows, as_rows, as_seed
from tokenmill.dataset.permutation import distinct, make_key
from tokenmill.errors import UsageError

__all__ = ["ShuffledRows", "shuffle"]


def shuffle(rows: Rows, *, seed: int = 0, block_tokens: int | None = None) -> Rows:
    """The same rows in a random order, another one in every epoch.

    With `block_tokens`, rows are shuffled among about so many tokens at a time, shards in a random order: for
    stores that do not fit the machine.
    """
    if block_tokens is not None:
        from tokenmill.dataset.blocks import shuffle_blocks

        return shuffle_blocks(as_rows(rows, "shuffle"), seed=as_seed(seed), block_tokens=block_tokens)
    return ShuffledRows(as_rows(rows, "shuffle"), as_seed(seed))


class ShuffledRows(Rows):
    """Rows of another dataset, permuted epoch by epoch."""

    def __init__(self, rows: Rows, seed: int) -> None:
        if rows.limit is not None and rows.limit < rows.num_rows:
            raise UsageError(f"a shuffle needs a whole epoch of {rows.num_rows} rows, and there are only {rows.limit}")
        if _has_stages(rows):
            raise UsageError("stages of a mixture have an order, which a shuffle would undo; shuffle inside the mix")
        self._rows = rows
        self._seed = seed
        self.seq_len, self.num_rows, self.num_tokens = rows.seq_len, rows.num_rows, rows.num_tokens
        self.limit = None if rows.limit is None else rows.limit // rows.num_rows * rows.num_rows

    def resolve(self, index: Integers) -> list[Choice]:
        """Permute within each epoch that the index touches, then ask the rows."""
        epochs, places = np.divmod(index, self.num_rows)
        inner = np.empty(len(index), np.int64)
        present = distinct(epochs)
        for epoch in present:
            mine: Any = epochs == epoch if len(present) > 1 else slice(None)
            order = self._rows.permute(places[mine], make_key(self._seed, epoch))
            inner[mine] = order + epoch * self.num_rows
        return self._rows.resolve(inner)

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Undo the permutation of each epoch."""
        num_epochs = -(-stop // self.num_rows)
        found = []
        for number in self._rows.where(leaf, row, num_epochs * self.num_rows):
            epoch, place = divmod(number, self.num_rows)
            inner = int(self._rows.unpermute(np.array([place]), make_key(self._seed, epoch))[0])
            found.append(epoch * self.num_rows + inner)
        return sorted(number for number in found if number < stop)

    def describe(self) -> dict[str, Any]:
        """The seed and the rows."""
        return {"kind": "shuffle", "seed": self._seed, "rows": self._rows.describe()}

    def title(self) -> str:
        """One line for the tree."""
        return f"shuffle, seed {self._seed}"

    def parts(self) -> list[tuple[str, Rows]]:
        """What is shuffled."""
        return [("", self._rows)]


def _has_stages(rows: Rows) -> bool:
    return getattr(rows, "has_stages", False) or any(_has_stages(part) for _, part in rows.parts())
