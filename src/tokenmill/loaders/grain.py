"""Grain: rows as a data source for your own pipelines, and a ready pipeline of batches.

The pipeline is the loader as an `IterDataset`, so batches are filled together and come in tokenmill's order. What
Grain writes into a checkpoint is the loader's own state, which fits any number of processes. Under `mp_prefetch`,
each of n workers makes every n-th batch: worker w is rank `w * world_size + rank` of n times as many ranks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import flag, one_of
from tokenmill.dataset.rows import Rows, as_rows, row_number
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk
from tokenmill.filling.layouts import FLAT_LAYOUTS, LAYOUTS, map_parts
from tokenmill.loaders._extras import read_fields
from tokenmill.loaders.base import Loader, batch_dtype
from tokenmill.loaders.passes import count_rows

try:
    import grain  # type: ignore[import-untyped]
except ImportError:
    raise MissingDependencyError("framework='grain'", "jax") from None

__all__ = ["GrainLoader", "RowSource"]


class RowSource:
    """Rows by number, as Grain's `RandomAccessDataSource`: a dict with `inputs` and `targets` of one row.

    With `layout`, an item is one row as that trainer takes it. `len` is one epoch. Grain takes an index modulo the
    length, so pass `epochs` to get the orders of later epochs; None makes the source endless.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        layout: str = "xy",
        document_mask: bool = False,
        epochs: float | None = 1,
        dtype: npt.DTypeLike = np.int32,
    ) -> None:
        self.rows = as_rows(rows, "RowSource")
        if rows.layout is not None:
            raise UsageError(f"a RowSource has packed documents, and these rows are {rows.layout}; use tm.load")
        self._layout = one_of(layout, LAYOUTS, "layout")
        self._document_mask = flag(document_mask, "document_mask")
        self._pool = BufferPool(batch_dtype(dtype))
        num_rows = count_rows(rows, epochs)
        self._num_rows = sys.maxsize if num_rows is None else num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Any:
        return self._getitems([row_number(index, self._num_rows)])[0]

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows, filled together; Grain calls this when it reads in batches."""
        chunk = Chunk(self.rows, np.array(indices), document_mask=self._document_mask).fill(self._pool)
        rows = (Batch(chunk.inputs[n], chunk.targets[n], chunk, n) for n in range(len(indices)))
        is_flat = self._layout in FLAT_LAYOUTS
        return [map_parts(_first_row, _plain(LAYOUTS[self._layout](row)), is_flat) for row in rows]

    def __repr__(self) -> str:
        # Grain's DataLoader compares this with the one in a checkpoint; a source with more epochs counts as the same.
        settings = f"layout={self._layout!r}, document_mask={self._document_mask!r}"
        return f"RowSource({self.rows.fingerprint}, {settings})"


class GrainLoader(grain.IterDataset):  # type: ignore[misc]
    """The loader as a Grain dataset: `iter` starts at the first row, and `set_state` of the iterator moves it.

    A batch is a dict with `inputs` and `targets`, or what the layout has. `get_state` of an iterator returns what
    `state_dict` of a loader does. You can chain `map`, `mp_prefetch` and the rest of Grain; if a step of the chain
    prefetches, checkpoint the state of its iterator.
    """

    def __init__(self, rows: Rows, **settings: Any) -> None:
        super().__init__()
        self.rows = rows
        self._settings = {"dtype": np.int32, **settings}
        self._worker, self._num_workers = 0, 1
        self._start = self._make_loader().state_dict()
        self._latest: _PlainLoader | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the iterator that was made last; the start, if there is none."""
        return copy.deepcopy(self._start) if self._latest is None else self._latest.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let `iter` begin at the state of any loader of these rows."""
        self._make_loader().load_state_dict(state)
        self._start, self._latest = state, None

    def __getstate__(self) -> dict[str, Any]:
        # The place of an iterator belongs to its process.
        return {**self.__dict__, "_latest": None}

    def _make_loader(self) -> _PlainLoader:
        return _PlainLoader(self.rows, worker=self._worker, num_workers=self._num_workers, **self._settings)

    def __len__(self) -> int:
        """Steps in all epochs."""
        return len(self._make_loader())

    def __iter__(self) -> _BatchIterator:
        self._latest = self._make_loader()
        return _BatchIterator(self._latest, self._start)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keep every n-th batch; `mp_prefetch` calls this on a worker's copy."""
        if sequential_slice:
            raise UsageError("sequential_slice would give batches in another order; leave it out")
        self._worker += (sl.start or 0) * self._num_workers
        self._num_workers *= sl.step or 1

    def __repr__(self) -> str:
        return f"GrainLoader of {self._make_loader()!r}"

    def __str__(self) -> str:
        return f"GrainLoader({self.rows.fingerprint})"


class _BatchIterator(grain.DatasetIterator):  # type: ignore[misc]
    """The iterator of a loader, with the methods that Grain expects."""

    def __init__(self, loader: _PlainLoader, state: dict[str, Any]) -> None:
        super().__init__()
        self._loader = loader
        self.set_state(state)

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the loader, after the last batch that was handed over."""
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self._loader.load_state_dict(state)
        self._batches = iter(self._loader)

    def _get_next_index(self) -> int:
        return self._loader.step

    def _set_next_index(self, index: int) -> None:
        self._loader.go_to_step(index)
        self._batches = iter(self._loader)


class _PlainLoader(Loader):
    """Every n-th batch as a dict of numpy arrays; at the end it does not start over."""

    def __init__(self, rows: Rows, *, worker: int, num_workers: int, **settings: Any) -> None:
        super().__init__(rows, **settings)
        self._rows_before = worker * self.global_batch_size
        self.rank += worker * self.world_size
        self.world_size *= num_workers
        self._num_turns = num_workers
        self.global_batch_size *= num_workers

    def __iter__(self) -> Iterator[Any]:
        self._generation += 1
        return self._batches(self._generation)

    def go_to_step(self, step: int) -> None:
        """Continue with a batch; a step past the last one is the end."""
        row = step * self.global_batch_size
        self.seek(row if self._pass.stop is None else min(row, self._pass.stop))

    def _num_left(self, row: int) -> int:
        return super()._num_left(row + self._rows_before)

    def _make_batches(self, chunk: Chunk) -> list[Any]:
        return [_plain(batch, self._extras.fields) for batch in super()._make_batches(chunk)]


def _plain(batch: Any, fields: Sequence[str] = ()) -> Any:
    """Turn a batch into a tree that Grain can traverse and send between processes."""
    if not isinstance(batch, Batch):
        return batch
    return {"inputs": batch.inputs, "targets": batch.targets, **read_fields(batch, fields)}


def _first_row(part: Any, is_ragged: bool) -> Any:
    return part[0] if isinstance(part, np.ndarray) and not is_ragged else part
