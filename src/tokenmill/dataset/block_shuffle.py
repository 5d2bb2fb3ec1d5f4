"""Rows shuffled in blocks of shards, for stores that do not fit on the machine.

Under a global shuffle the next row may be in any shard, so all shards are needed all the time. Here an epoch goes
through the shards in a random order, as many at a time as a block has room for, and the rows of a block come in a
random order. The price is that a row is shuffled only among the tokens of its block; the tree of the dataset says
how many these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.dataset.pack import ConcatRows, PaddedRows
from tokenmill.dataset.rows import Integers, PackedRows, ResolvedRows, Rows
from tokenmill.dataset.shuffle import distinct, make_key, permute
from tokenmill.errors import UsageError

__all__ = ["DEFAULT_BLOCK_TOKENS", "BlockShuffledRows"]

DEFAULT_BLOCK_TOKENS = 1 << 28
"""It does not depend on the machine's cache: all ranks, and a run that resumes, must have the same order."""
_PIECES, _ROWS = 1, 2
"""What a key is for: the order of pieces, or the order of the rows of a block."""
KEPT_EPOCHS = 4


class _EpochOrder(NamedTuple):
    """One epoch: pieces in order, the number of rows before each, and the first piece of each block."""

    pieces: Integers
    before: Integers
    first_pieces: Integers

    def rows_before(self, block: int) -> int:
        return int(self.before[self.first_pieces[block]])


class BlockShuffledRows(Rows):
    """Rows of a packing, in pieces: the rows that begin in one shard."""

    def __init__(self, rows: Rows, seed: int, block_tokens: int) -> None:
        if not isinstance(rows, PackedRows):
            raise UsageError("a shuffle in blocks needs rows as pack makes them; slice or mix them after the shuffle")
        self._rows = rows
        self._seed = seed
        self._block_tokens = block_tokens = whole_number(block_tokens, "block_tokens", 1)
        self.seq_len, self.num_rows, self.num_tokens = rows.seq_len, rows.num_rows, rows.num_tokens
        self.is_remote = rows.is_remote
        self.limit = rows.limit
        shards, firsts = _first_rows(rows)
        edges = np.minimum(np.concatenate([firsts, [self.num_rows]]), self.num_rows)
        filled = np.flatnonzero(np.diff(edges))
        self._shards = shards[filled]
        self._firsts = edges[filled]
        self._sizes = np.diff(np.concatenate([self._firsts, [self.num_rows]]))
        self.num_blocks = max(1, min(len(filled), self.num_tokens // block_tokens))
        self._orders: dict[int, _EpochOrder] = {}
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

    def _order(self, epoch: int) -> _EpochOrder:
        found = self._orders.get(epoch)
        if found is None:
            pieces = permute(np.arange(len(self._sizes)), len(self._sizes), make_key(self._seed, epoch, _PIECES))
            before = np.concatenate([[0], np.cumsum(self._sizes[pieces])])
            blocks = before[:-1] * self.num_blocks // self.num_rows
            first_pieces = np.searchsorted(blocks, np.arange(self.num_blocks + 1))
            found = self._orders[epoch] = _EpochOrder(pieces, before, first_pieces)
            while len(self._orders) > KEPT_EPOCHS:
                self._orders.pop(next(iter(self._orders)))
        return found

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Find the block of each row, the place in it, and the piece at that place."""
        epochs, places = np.divmod(index, self.num_rows)
        inner = np.empty(len(index), np.int64)
        for epoch in distinct(epochs):
            order = self._order(epoch)
            mine = np.flatnonzero(epochs == epoch)
            # An empty block begins where the next one does, and has no rows.
            blocks = np.searchsorted(order.before[order.first_pieces[:-1]], places[mine], "right") - 1
            for block in distinct(blocks):
                some = mine[blocks == block]
                inner[some] = self._rows_at(order, epoch, block, places[some]) + epoch * self.num_rows
                self._announce(epoch, block)
        return self._rows.resolve(inner)

    def _rows_at(self, order: _EpochOrder, epoch: int, block: int, places: Integers) -> Integers:
        start, stop = order.rows_before(block), order.rows_before(block + 1)
        shuffled = permute(places - start, stop - start, make_key(self._seed, epoch, _ROWS, block)) + start
        position = np.searchsorted(order.before, shuffled, "right") - 1
        rows: Integers = self._firsts[order.pieces[position]] + shuffled - order.before[position]
        return rows

    def _announce(self, epoch: int, block: int) -> None:
        """Ask for the shards of this block and then the next one, which are fetched while these are used."""
        if self._announced == (epoch, block) or not self.fits:
            return
        self._announced = (epoch, block)
        for number in (block, block + 1):
            order = self._order(epoch + number // self.num_blocks)
            first, last = order.first_pieces[[number % self.num_blocks, number % self.num_blocks + 1]].tolist()
            self._rows.documents.table.prefetch(self._shards[order.pieces[first:last]].tolist())

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Undo both orders of each epoch."""
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
            inner = int(permute(np.array([place - start]), end - start, key, inverse=True)[0])
            found.append(epoch * self.num_rows + start + inner)
        return [number for number in found if number < stop]

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
            f"shuffle in {blocks}, seed {self._seed}: each row among {self.shuffled_among:,} tokens, "
            f"{share:.1%} of an epoch"
        )

    def parts(self) -> list[tuple[str, Rows]]:
        """Return the rows that are shuffled."""
        return [("", self._rows)]


def _first_rows(rows: PackedRows) -> tuple[Integers, Integers]:
    """Return the shard of each run of documents, and the first row that begins in it."""
    shards, documents, tokens = rows.documents.runs()
    if isinstance(rows, ConcatRows):
        return shards, -(-tokens // rows.seq_len)
    if isinstance(rows, PaddedRows):
        return shards, np.array([rows.first_row(document) for document in documents.tolist()], np.int64)
    raise UsageError(
        "packing='best-fit' takes the documents of a row from all shards, so a row belongs to none; "
        "use 'concat' or 'pad', or shuffle=True"
    )
