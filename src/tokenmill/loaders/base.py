"""The loader: rows to batches, in an order that depends on nothing but the dataset and a row number.

Global batch b is rows `b * batch_size * world_size` and on, and rank r takes the r-th slice of it. So a place
in training is one integer, whatever the number of ranks, threads or workers. This loader makes
numpy arrays; those of the frameworks only differ in how they hand them over.
"""

from __future__ import annotations

import itertools
import resource
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import MOST_ROWS, flag, one_of, positive, show, whole_number
from tokenmill.dataset.base import Rows, as_rows
from tokenmill.dataset.copying import RowBlock
from tokenmill.errors import UsageError
from tokenmill.loaders.batches import Batch, Chunk
from tokenmill.loaders.buffers import BufferPool
from tokenmill.loaders.layouts import LAYOUTS
from tokenmill.loaders.prefetching import Prefetcher
from tokenmill.loaders.ranks import find_rank
from tokenmill.loaders.state import check_state, make_state

__all__ = ["Loader", "Stretch", "batch_dtype", "count_rows"]

MOST_ROWS_OF_BATCH = 1 << 30
CHUNK_BYTES = 1 << 22
"""Inputs and targets that are filled together: small batches are filled several at a time, as many as caches keep."""
BLOCK_ROWS = 8192
"""Rows whose places are worked out together: 30 ns each, against 9,000 for eight at a time."""
BLOCK_TOKENS = 1 << 25
"""Fewer rows if they are long, because these have many documents."""
FIRST_ROWS = 64
CHUNKS_AHEAD = 4
SLOW_ROWS = 16_384
"""For how many rows reading ahead goes on without a fault that would show that it is needed."""


class Loader:
    """Batches of a dataset, endless unless `epochs` is given.

    Iterating goes on behind the last batch that was handed over; after the last epoch it starts over, also from a
    state that was taken there. The last batch of all epochs is padded, or with `drop_last` left out.

    `batch_size` is rows per rank. With `document_mask`, targets do not cross documents. `layout` names the
    trainer whose batches these should be. `prefetch` fills so many chunks ahead in a thread, which
    hides latency and does not add speed. A batch owns its memory: keeping it is safe.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        rank: int | str | None = None,
        world_size: int | None = None,
        group: Any = None,
        layout: str = "xy",
        document_mask: bool = False,
        epochs: float | None = None,
        drop_last: bool = False,
        dtype: npt.DTypeLike = np.int64,
        prefetch: int = 0,
    ) -> None:
        self.rows = as_rows(rows, "Loader")
        self.batch_size = whole_number(batch_size, "batch_size", 1, MOST_ROWS_OF_BATCH)
        self.rank, self.world_size = find_rank(rank, world_size, group)
        self._layout = LAYOUTS[one_of(layout, LAYOUTS, "layout")]
        self._is_plain = layout == "xy"
        self._document_mask = flag(document_mask, "document_mask")
        self._prefetch = whole_number(prefetch, "prefetch", 0)
        self._epochs, self._drop_last = epochs, flag(drop_last, "drop_last")
        self._settle()
        self._pool = BufferPool(batch_dtype(dtype))
        self._disk = _Disk()
        self._next_row = 0
        self._has_ended = False
        self._generation = 0

    def _settle(self) -> None:
        """Find out where the last batch is, which rows that are still being made do not tell before they are."""
        self._is_settled = self.rows.is_known
        self._num_rows = count_rows(self.rows, self._epochs)
        self._end = self._find_end()

    def _find_end(self) -> int | None:
        """The first row with which no batch begins any more."""
        if self._num_rows is None or not self._drop_last:
            return self._num_rows
        if self._num_rows < self.global_batch_size:
            raise UsageError(
                f"drop_last leaves no batch: there are {self._num_rows} rows, and a batch of all ranks has "
                f"{self.global_batch_size}"
            )
        return self._num_rows - self.global_batch_size + 1

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all ranks."""
        return self.batch_size * self.world_size

    @property
    def step(self) -> int:
        """How many global batches have been handed over, at this batch size."""
        return -(-self._next_row // self.global_batch_size)

    @property
    def bottleneck(self) -> str:
        """What steps wait for when they wait for this loader, and what to do about it."""
        if self.rows.bottleneck is not None:
            return self.rows.bottleneck
        work = "reading the disk" if self._disk.was_waited_for else "filling batches"
        if not self._prefetch:
            return f"{work}; pass prefetch=2"
        return f"{work}; {'move the store to a faster one' if self._disk.was_waited_for else 'leave it a free core'}"

    def __len__(self) -> int:
        """Steps in all epochs."""
        if self._num_rows is None:
            if self._epochs is not None:
                raise TypeError("how many steps there are is known when all text is tokenized; count steps yourself")
            raise TypeError("an endless loader has no length; pass epochs, or count steps yourself")
        return self._num_left(0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: after the last batch that was handed over, whatever was prefetched."""
        return make_state(self.rows, self._next_row, self.batch_size, self.world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this dataset, also one of another number of ranks or another batch size.

        With a state from the end of the last epoch, iterating starts over; one from behind it is refused.
        """
        self.seek(check_state(state, self.rows))

    def get_state(self) -> dict[str, Any]:
        """The same as `state_dict`, as Grain calls it."""
        return self.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """The same as `load_state_dict`, as Grain calls it."""
        self.load_state_dict(state)

    def seek(self, row: int) -> None:
        """Go on with a row number, counted over all epochs and ranks."""
        row = whole_number(row, "row", 0, MOST_ROWS)
        if self._num_rows is not None and row > self._num_rows:
            raise UsageError(
                f"row {row} is behind the end of this loader, which has {self._num_rows} rows; pass more epochs"
            )
        self._next_row = row
        self._has_ended = self._num_left(row) == 0
        self._generation += 1

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            self.seek(0)
        self._generation += 1
        return self._hand_over(self._generation)

    def _hand_over(self, generation: int) -> Iterator[Any]:
        """Give batches one by one; a loader that was sought elsewhere ends what was being iterated."""
        chunks = self._chunks(self._next_row)
        if self._prefetch:
            chunks = Prefetcher(chunks, self._prefetch)
        size = self.global_batch_size
        for batches in chunks:
            # Whoever lets go of a batch before the next one frees its memory, and the CPU cache: none is kept here.
            batches.reverse()
            while batches:
                if self._generation != generation:
                    raise UsageError(
                        "the loader was moved, or iterated anew, since this iterator began; use the new one"
                    )
                self._next_row += size
                if self._end is not None and self._next_row >= self._end:
                    self._next_row, self._has_ended = min(self._next_row, self._num_rows or 0), True
                yield batches.pop()
        self._has_ended = True

    def _chunks(self, row: int) -> Iterator[list[Any]]:
        """Lists of batches from a row on; when the disk is slow or far, what comes next is read while this is used."""
        plan = self._plan(row)
        disk = self._disk = _Disk(is_far=self._is_settled and self.rows.is_remote)
        coming: deque[Stretch] = deque()
        while stretch := coming.popleft() if coming else next(plan, None):
            num_rows = (stretch.last - stretch.first) * self.batch_size
            if disk.is_slow(num_rows) and self._is_settled:
                for more in itertools.islice(plan, CHUNKS_AHEAD - len(coming)):
                    more.block.will_need(*self._rows_of(more))
                    coming.append(more)
            batches = self._deliver(self._fill(stretch))
            disk.look(num_rows)
            yield batches
            del batches

    def _plan(self, row: int) -> Iterator[Stretch]:
        """What is filled together, from a row on; the first ones are short, so that the first batch comes soon."""
        most = max(1, CHUNK_BYTES // (2 * self._pool.dtype.itemsize * self.batch_size * self.rows.seq_len))
        num_batches = max(1, FIRST_ROWS // self.batch_size)
        per_chunk = 1
        while num_left := self._num_left(row):
            num_batches = min(num_batches, num_left)
            block = self._block(row, num_batches)
            for first in range(0, num_batches, per_chunk):
                yield Stretch(block, first, min(first + per_chunk, num_batches))
            row += num_batches * self.global_batch_size
            per_chunk = min(most, 2 * per_chunk)
            most_rows = min(BLOCK_ROWS, BLOCK_TOKENS // self.rows.seq_len)
            num_batches = max(per_chunk, min(2 * num_batches, most_rows // self.batch_size))

    def _num_left(self, row: int) -> int:
        """How many batches begin from a row on; while rows are still being made, how many there are by now."""
        if not self._is_settled:
            num_ready = self.rows.wait_for(row + self.global_batch_size)
            if not self.rows.is_known:
                return (num_ready - row) // self.global_batch_size
            self._settle()
        if self._end is None:
            return 1 << 40
        return max(0, -(-(self._end - row) // self.global_batch_size))

    def _rows_of(self, stretch: Stretch) -> tuple[int, int]:
        return stretch.first * self.batch_size, stretch.last * self.batch_size

    def _block(self, row: int, num_batches: int) -> RowBlock:
        """The rows of this rank in some batches, in order; those behind the last epoch are blank."""
        firsts = row + np.arange(num_batches) * self.global_batch_size + self.rank * self.batch_size
        index = (firsts[:, None] + np.arange(self.batch_size)).reshape(-1)
        return RowBlock(self.rows, index, document_mask=self._document_mask, limit=self._num_rows)

    def _fill(self, stretch: Stretch) -> Chunk:
        start, stop = self._rows_of(stretch)
        both = self._pool.take((2, stop - start, self.rows.seq_len))
        stretch.block.copy(start, stop, both[0], both[1])
        return Chunk(both.reshape(2, -1, self.batch_size, self.rows.seq_len), stretch.block, start)

    def _deliver(self, chunk: Chunk) -> list[Any]:
        """The batches of a chunk as the user gets them."""
        pairs = zip(chunk.inputs, chunk.targets, strict=True)
        batches = [Batch(inputs, targets, chunk, number) for number, (inputs, targets) in enumerate(pairs)]
        return batches if self._is_plain else [self._layout(batch) for batch in batches]

    def __repr__(self) -> str:
        shape = f"{self.batch_size} x {self.rows.seq_len}, rank {self.rank} of {self.world_size}"
        return f"{type(self).__name__}({shape}, at row {self._next_row:,})\n{self.rows!r}"


def count_rows(rows: Rows, epochs: float | None) -> int | None:
    """How many rows there are to give; None: no end, or none that is known yet."""
    if epochs is None:
        return rows.limit
    epochs = positive(epochs, "epochs", MOST_ROWS // (rows.num_rows if rows.is_known else 1))
    if not rows.is_known:
        return None
    asked = max(1, rows.rows_of_epochs(Fraction(str(epochs))))
    return asked if rows.limit is None else min(asked, rows.limit)


def batch_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The type of batches, which must hold every id and -100."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        raise UsageError(f"dtype {show(dtype)} is no type of numpy; expected int64 or int32") from None
    if dtype is None or kind not in (np.dtype(np.int64), np.dtype(np.int32)):
        name = dtype if dtype is None else kind
        raise UsageError(f"dtype {name} cannot hold every id and -100; expected int64 or int32")
    return kind


class Stretch(NamedTuple):
    """The batches of a block from `first` up to `last`, which are filled together."""

    block: RowBlock
    first: int
    last: int


class _Disk:
    """Notices that rows come from the disk and not from memory, by the faults that waited for it.

    Reading ahead costs half a microsecond a row when everything is in memory already, so it is on for
    a while after such a fault, and at the start, when nothing is known.
    """

    def __init__(self, *, is_far: bool = False) -> None:
        self._is_far = is_far
        self._rows_left = FIRST_ROWS
        self._rows_unseen = 0
        self._num_faults = self._count()
        self._has_waited = False

    @property
    def was_waited_for(self) -> bool:
        """Whether the rows of late came from the disk."""
        return self._has_waited and self._rows_left > 0

    def is_slow(self, num_rows: int) -> bool:
        """Whether to read ahead while so many rows are filled."""
        self._rows_left -= num_rows
        return self._is_far or self._rows_left + num_rows > 0

    def look(self, num_rows: int) -> None:
        """See whether the disk was waited for while so many rows were filled; others in the process may have, too.

        While all is well, now and then is enough.
        """
        self._rows_unseen += num_rows
        if self._rows_left <= 0 and self._rows_unseen < FIRST_ROWS:
            return
        num_faults = self._count()
        if num_faults - self._num_faults > self._rows_unseen // 8:
            self._rows_left, self._has_waited = SLOW_ROWS, True
        self._num_faults, self._rows_unseen = num_faults, 0

    def _count(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
