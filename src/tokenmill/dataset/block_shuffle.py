"""Rows shuffled in blocks of shards, for stores that do not fit on the machine.

Under a global shuffle the next row may be in any shard, so all shards are needed all the time. Here an epoch goes
through the shards in a random order, as many at a time as fit a block, and the rows of a block come in a random order.
In return, a row is shuffled only among the tokens of its block; the printed dataset says how many these are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.dataset.bounded_concat import BoundedConcatRows
from tokenmill.dataset.pack import ConcatRows, PaddedRows
from tokenmill.dataset.rows import Integers, PackedRows, Rows
from tokenmill.dataset.shuffle import GroupedOrder, ShuffledRows, distinct
from tokenmill.errors import UsageError
from tokenmill.formatting import plural

__all__ = ["DEFAULT_BLOCK_TOKENS", "BlockShuffledRows"]

DEFAULT_BLOCK_TOKENS = 1 << 28
"""Independent of the machine's cache: all ranks, and a run that resumes, must have the same order."""
KEPT_EPOCHS = 4


class BlockShuffledRows(ShuffledRows):
    """Rows of a packing, in pieces: the rows that begin in one shard. Pieces are grouped into blocks."""

    _rows: PackedRows

    def __init__(self, rows: Rows, seed: int, block_tokens: int) -> None:
        if not isinstance(rows, PackedRows):
            raise UsageError("a shuffle in blocks needs rows as pack makes them; slice or mix them after the shuffle")
        super().__init__(rows, seed)
        self._block_tokens = block_tokens = whole_number(block_tokens, "block_tokens", 1)
        shards, firsts = _first_rows(rows)
        edges = np.minimum(np.concatenate([firsts, [self.num_rows]]), self.num_rows)
        filled = np.flatnonzero(np.diff(edges))
        self._shards = shards[filled]
        self._firsts = edges[filled]
        self._sizes = np.diff(np.concatenate([self._firsts, [self.num_rows]]))
        self.num_blocks = max(1, min(len(filled), self.num_tokens // block_tokens))
        self._orders: dict[int, GroupedOrder] = {}
        self._announced: tuple[int, int] | None = None

    @property
    def shuffled_among(self) -> int:
        """The number of tokens among which a row is shuffled, on average."""
        return self.num_tokens // self.num_blocks

    @property
    def room_bytes(self) -> int:
        """The bytes that a cache must hold: a block and the next one, each with one more shard; or all shards."""
        documents = self._rows.documents
        table = documents.table
        per_token = sum(one.dtype.itemsize for one in (table, *documents.beside.values()))
        block = self.shuffled_among + int(table.num_tokens[self._shards].max(initial=0))
        return per_token * min(2 * block, int(table.num_tokens.sum()))

    @property
    def fits(self) -> bool:
        """Whether the cache can hold a block in advance; otherwise rows are read by range."""
        room = self._rows.documents.table.room_bytes
        return room is None or self.room_bytes <= room

    def _order(self, epoch: int) -> GroupedOrder:
        found = self._orders.get(epoch)
        if found is None:
            found = GroupedOrder(self._sizes, self.num_blocks, self._divide, self._seed, epoch)
            self._orders[epoch] = found
            while len(self._orders) > KEPT_EPOCHS:
                self._orders.pop(next(iter(self._orders)))
        return found

    def _divide(self, rows_before: Integers) -> Integers:
        """Return the block of each piece, by the number of rows before it."""
        return rows_before * self.num_blocks // self.num_rows

    def _permute(self, index: Integers, epoch: int, *, inverse: bool = False) -> Integers:
        order = self._order(epoch)
        for block in [] if inverse else distinct(order.find_groups(index)):
            self._announce(epoch, block)
        return order.permute(index, inverse=inverse)

    def _announce(self, epoch: int, block: int) -> None:
        """Ask for the shards of this block and then the next one, which are fetched while these are used."""
        if self._announced == (epoch, block) or not self.fits:
            return
        self._announced = (epoch, block)
        for number in (block, block + 1):
            order = self._order(epoch + number // self.num_blocks)
            first, last = order.first_pieces[[number % self.num_blocks, number % self.num_blocks + 1]].tolist()
            self._rows.documents.table.prefetch(self._shards[order.pieces[first:last]].tolist())

    def describe(self) -> dict[str, Any]:
        """Describe the seed, the size of blocks, where shards begin, and the rows."""
        return {
            "kind": "shuffle-blocks",
            "seed": self._seed,
            "block_tokens": self._block_tokens,
            "firsts": self._firsts.tolist(),
            "rows": self._rows.describe(),
        }

    def title(self) -> str:
        """Return one line for the tree, which says how well rows are shuffled."""
        share = self.shuffled_among / self.num_tokens
        blocks = "1 block" if self.num_blocks == 1 else f"{self.num_blocks:,} blocks"
        return (
            f"shuffle in {blocks}, seed {self._seed}: each row among {plural(self.shuffled_among, 'token')}, "
            f"{share:.1%} of an epoch"
        )


def _first_rows(rows: PackedRows) -> tuple[Integers, Integers]:
    """Return the shard of each run of documents, and the first row that begins in it."""
    shards, documents, tokens = rows.documents.runs()
    if isinstance(rows, ConcatRows):
        return shards, -(-tokens // rows.seq_len)
    if isinstance(rows, BoundedConcatRows):
        return shards, np.array([rows.first_row(token) for token in tokens.tolist()], np.int64)
    if isinstance(rows, PaddedRows):
        return shards, np.array([rows.first_row(document) for document in documents.tolist()], np.int64)
    raise UsageError(
        "packing='best-fit' takes the documents of a row from all shards, so a row belongs to none; "
        "use 'concat' or 'pad', or shuffle=True"
    )
