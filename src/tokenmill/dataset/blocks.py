"""Rows shuffled in blocks of shards, for stores that do not fit the machine.

Under a global shuffle the next row may be in any shard, so that all shards are wanted all the time. Here an epoch goes
through the shards in a random order, as many at a time as a block has room for, and the rows of a block come up
in a random order. A row is shuffled among the tokens of its block and no others: that is the price, and the tree
of the dataset tells it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.dataset.base import Choice, Integers, PackedRows, Rows, as_rows
from tokenmill.dataset.packing import ConcatRows, PaddedRows
from tokenmill.dataset.permutation import distinct, make_key, permute, unpermute
from tokenmill.errors import UsageError

__all__ = ["DEFAULT_BLOCK_TOKENS", "BlockShuffledRows", "shuffle_blocks"]

DEFAULT_BLOCK_TOKENS = 1 << 28
"""The same on every machine, whatever its cache: ranks must agree on the order, and a state must find it again."""
_PIECES, _ROWS = 1, 2
"""What a key is for: the order of pieces, or that of the rows of a block."""
KEPT_EPOCHS = 4


def shuffle_blocks(rows: Rows, *, seed: int, block_tokens: int) -> Rows:
    """The same rows, shuffled among about `block_tokens` tokens at a time, in another order in every epoch."""
    return BlockShuffledRows(as_rows(rows, "shuffle"), seed, whole_number(block_tokens, "block_tokens", 1))


class _Order(NamedTuple):
    """One epoch: pieces in their order, how many rows come before each, and the first of them in each block."""

    pieces: Integers
    before: Integers
    first_pieces: Integers

    def rows_before(self, block: int) -> int:
        return int(self.before[self.first_pieces[block]])


class BlockShuffledRows(Rows):
    """Rows of a packing; a piece of them is those that begin in one shard."""

    def __init__(self, rows: Rows, seed: int, block_tokens: int) -> None:
        if not isinstance(rows, PackedRows):
            raise UsageError("a shuffle in blocks needs rows as pack makes them; slice or mix them after the shuffle")
        self._rows = rows
        self._seed = seed
        self._block_tokens = block_tokens
        self.seq_len, self.num_rows, self.num_tokens = rows.seq_len, rows.num_rows, rows.num_tokens
        self.limit = rows.limit
        shards, firsts = _first_rows(rows)
        edges = np.minimum(np.concatenate([firsts, [self.num_rows]]), self.num_rows)
        filled = np.flatnonzero(np.diff(edges))
        self._shards = shards[filled]
        self._firsts = edges[filled]
        self._sizes = np.diff(np.concatenate([self._firsts, [self.num_rows]]))
        most = max(1, min(len(filled), self.num_tokens // block_tokens))
        self.num_blocks = most
        self._orders: dict[int, _Order] = {}
        self._announced: tuple[int, int] | None = None

    @property
    def shuffled_among(self) -> int:
        """Among how many tokens a row is shuffled, on average."""
        return self.num_tokens // self.num_blocks

    @property
    def room_bytes(self) -> int:
        """What a cache must hold: a block and the next one, each with a shard more than its share; or all shards."""
        documents = self._rows.documents
        table = documents.table
        per_token = sum(one.dtype.itemsize for one in (table, *documents.beside.values()))
        block = self.shuffled_among + int(table.num_tokens[self._shards].max(initial=0))
        return per_token * min(2 * block, int(table.num_tokens.sum()))

    @property
    def fits(self) -> bool:
        """Whether shards can be fetched a block ahead; else their rows are read where they are."""
        room = self._rows.documents.table.room_bytes
        return room is None or self.room_bytes <= room

    def _order(self, epoch: int) -> _Order:
        found = self._orders.get(epoch)
        if found is None:
            pieces = permute(np.arange(len(self._sizes)), len(self._sizes), make_key(self._seed, epoch, _PIECES))
            before = np.concatenate([[0], np.cumsum(self._sizes[pieces])])
            blocks = before[:-1] * self.num_blocks // self.num_rows
            first_pieces = np.searchsorted(blocks, np.arange(self.num_blocks + 1))
            found = self._orders[epoch] = _Order(pieces, before, first_pieces)
            while len(self._orders) > KEPT_EPOCHS:
                self._orders.pop(next(iter(self._orders)))
        return found

    def resolve(self, index: Integers) -> list[Choice]:
        """Find the block of each row, the place in it, and the piece that is there."""
        epochs, places = np.divmod(index, self.num_rows)
        inner = np.empty(len(index), np.int64)
        for epoch in distinct(epochs):
            order = self._order(epoch)
            mine = np.flatnonzero(epochs == epoch)
            blocks = self._blocks_of(order, places[mine])
            for block in distinct(blocks):
                some = mine[blocks == block]
                inner[some] = self._rows_at(order, epoch, block, places[some]) + epoch * self.num_rows
                self._announce(epoch, block)
        return self._rows.resolve(inner)

    def _blocks_of(self, order: _Order, places: Integers) -> Integers:
        starts = order.before[order.first_pieces[:-1]]
        # Blocks without a piece begin where the next one does, and have no row.
        found: Integers = np.searchsorted(starts, places, "right") - 1
        return found

    def _rows_at(self, order: _Order, epoch: int, block: int, places: Integers) -> Integers:
        start, stop = order.rows_before(block), order.rows_before(block + 1)
        shuffled = permute(places - start, stop - start, make_key(self._seed, epoch, _ROWS, block)) + start
        position = np.searchsorted(order.before, shuffled, "right") - 1
        rows: Integers = self._firsts[order.pieces[position]] + shuffled - order.before[position]
        return rows

    def _announce(self, epoch: int, block: int) -> None:
        """Say that this block's shards are wanted, and then the next one's: they are fetched while these are used."""
        if self._announced == (epoch, block) or not self.fits:
            return
        self._announced = (epoch, block)
        for number in (block, block + 1):
            order = self._order(epoch + number // self.num_blocks)
            first, last = order.first_pieces[[number % self.num_blocks, number % self.num_blocks + 1]].tolist()
            self._rows.documents.table.want(self._shards[order.pieces[first:last]].tolist())

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Undo both orders in each epoch."""
        if leaf is not self._rows:
            return []
        piece = int(np.searchsorted(self._firsts, row, "right")) - 1
        found = []
        for epoch in range(-(-stop // self.num_rows)):
            order = self._order(epoch)
            position = int(np.flatnonzero(order.pieces == piece)[0])
            place = int(order.before[position]) + row - int(self._firsts[piece])
            block = int(np.searchsorted(order.first_pieces, position, "right")) - 1
            start, end = order.rows_before(block), order.rows_before(block + 1)
            key = make_key(self._seed, epoch, _ROWS, block)
            found.append(epoch * self.num_rows + start + int(unpermute(np.array([place - start]), end - start, key)[0]))
        return [number for number in found if number < stop]

    def describe(self) -> dict[str, Any]:
        """The seed, the size of blocks, where shards begin, and the rows."""
        return {
            "kind": "shuffle-blocks",
            "seed": self._seed,
            "block_tokens": self._block_tokens,
            "firsts": self._firsts.tolist(),
            "rows": self._rows.describe(),
        }

    def title(self) -> str:
        """One line for the tree, with how well it is shuffled."""
        share = self.shuffled_among / self.num_tokens
        blocks = "1 block" if self.num_blocks == 1 else f"{self.num_blocks:,} blocks"
        return (
            f"shuffle in {blocks}, seed {self._seed}: each row among {self.shuffled_among:,} tokens, "
            f"{share:.1%} of an epoch"
        )

    def parts(self) -> list[tuple[str, Rows]]:
        """What is shuffled."""
        return [("", self._rows)]


def _first_rows(rows: PackedRows) -> tuple[Integers, Integers]:
    """The shard of each run of documents, and the first row that begins in it."""
    shards, documents, tokens = rows.documents.runs()
    if isinstance(rows, ConcatRows):
        return shards, -(-tokens // rows.seq_len)
    if isinstance(rows, PaddedRows):
        return shards, np.array([rows.first_row(document) for document in documents.tolist()], np.int64)
    raise UsageError(
        "packing='best-fit' takes the documents of a row from all over the store, so that rows have no shard to be "
        "shuffled in; use 'concat' or 'pad', or shuffle=True"
    )
