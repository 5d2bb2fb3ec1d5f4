"""Grain: rows as a data source for pipelines of your own, and a ready pipeline of batches.

The pipeline is the loader as an `IterDataset`, so that batches are filled together and come in tokenmill's
order; what Grain writes into a checkpoint is then the loader's own state, which fits any number of
processes. Behind `mp_prefetch` each of n workers makes every n-th batch: worker w is rank
`w * world_size + rank` of n times as many ranks, so that this takes no code of its own.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import flag, one_of
from tokenmill.dataset.base import Rows, as_rows, row_number
from tokenmill.dataset.copying import RowBlock
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.loaders.base import Loader, batch_dtype, count_rows
from tokenmill.loaders.batches import Batch, Chunk
from tokenmill.loaders.layouts import LAYOUTS
from tokenmill.loaders.parts import map_parts

try:
    import grain  # type: ignore[import-untyped]
except ImportError:
    raise MissingDependencyError("framework='grain'", "jax") from None

__all__ = ["GrainLoader", "RowSource"]


class RowSource:
    """Rows by number, as Grain's `RandomAccessDataSource`: a dict with `inputs` and `targets` of one row.

    With `layout`, what that trainer takes, for one row. `len` is one epoch; Grain takes an index modulo
    the length, so `epochs` is needed to get the orders of later epochs, and None makes it endless.
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
        self._settings: dict[str, Any] = {
            "layout": one_of(layout, LAYOUTS, "layout"),
            "document_mask": flag(document_mask, "document_mask"),
            "epochs": epochs,
            "dtype": batch_dtype(dtype),
        }
        num_rows = count_rows(rows, epochs)
        self._num_rows = sys.maxsize if num_rows is None else num_rows
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Any:
        return self._getitems([row_number(index, self._num_rows)])[0]

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        """Several rows, filled together; Grain asks so where it reads in batches."""
        block = RowBlock(self.rows, np.array(indices), document_mask=self._settings["document_mask"])
        shape = (len(indices), self.rows.seq_len)
        both = np.empty((2, *shape), self._settings["dtype"])
        inputs, targets = both
        block.copy(0, len(indices), inputs, targets)
        chunk = Chunk(both[:, :, None], block, 0)
        arrange = LAYOUTS[self._settings["layout"]]
        rows = (Batch(inputs[n : n + 1], targets[n : n + 1], chunk, n) for n in range(len(indices)))
        return [map_parts(_first_row, _plain(arrange(row))) for row in rows]

    def __repr__(self) -> str:
        # Grain's DataLoader compares this with the one in a checkpoint; training longer is no other source.
        settings = ", ".join(f"{name}={self._settings[name]!r}" for name in ("layout", "document_mask"))
        return f"RowSource({self.rows.fingerprint}, {settings})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RowSource, self.rows, **self._settings), ()


class GrainLoader(grain.IterDataset):  # type: ignore[misc]
    """The loader as a Grain dataset: `iter` starts at the first row, and its `set_state` goes on anywhere.

    Batches are plain: a dict with `inputs` and `targets`, or what the layout has. `get_state` of an
    iterator is what `state_dict` of a loader is. Chain `map`, `mp_prefetch` and the rest of Grain behind it;
    where they read ahead, the states of their iterators are the ones to keep.
    """

    def __init__(self, rows: Rows, **settings: Any) -> None:
        super().__init__()
        self.rows = rows
        self._settings = {"dtype": np.int32, **settings}
        self._worker, self._num_workers = 0, 1
        self._start = self._make_loader().state_dict()
        self._latest: _PlainLoader | None = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator is that was made last; the start, if there is none."""
        return copy.deepcopy(self._start) if self._latest is None else self._latest.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let `iter` begin at a state, of any loader of these rows."""
        self._make_loader().load_state_dict(state)
        self._start, self._latest = state, None

    def __getstate__(self) -> dict[str, Any]:
        # Where an iterator is belongs to its process.
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
        """Be every n-th batch; Grain's `mp_prefetch` asks a worker's copy to."""
        if sequential_slice:
            raise UsageError("sequential_slice would give batches in another order; leave it out")
        self._worker += (sl.start or 0) * self._num_workers
        self._num_workers *= sl.step or 1

    def __repr__(self) -> str:
        return f"GrainLoader of {self._make_loader()!r}"

    def __str__(self) -> str:
        return f"GrainLoader({self.rows.fingerprint})"


class _BatchIterator(grain.DatasetIterator):  # type: ignore[misc]
    """Where a loader is, as Grain has it."""

    def __init__(self, loader: _PlainLoader, state: dict[str, Any]) -> None:
        super().__init__()
        self._loader = loader
        self.set_state(state)

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The state of the loader, after the last batch that was handed over."""
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._loader.load_state_dict(state)
        self._batches = iter(self._loader)

    def _get_next_index(self) -> int:
        return self._loader.step

    def _set_next_index(self, index: int) -> None:
        self._loader.go_to_step(index)
        self._batches = iter(self._loader)


class _PlainLoader(Loader):
    """Batches as dicts of numpy arrays, of which a worker makes every n-th; at the end it stays at the end."""

    def __init__(self, rows: Rows, *, worker: int, num_workers: int, **settings: Any) -> None:
        super().__init__(rows, **settings)
        self._rows_before = worker * self.global_batch_size
        self.rank += worker * self.world_size
        self.world_size *= num_workers

    def __iter__(self) -> Iterator[Any]:
        self._generation += 1
        return self._hand_over(self._generation)

    def go_to_step(self, step: int) -> None:
        """Go on with a batch; behind the last one there is none."""
        row = step * self.global_batch_size
        self.seek(row if self._num_rows is None else min(row, self._num_rows))

    def _num_left(self, row: int) -> int:
        return super()._num_left(row + self._rows_before)

    def _deliver(self, chunk: Chunk) -> list[Any]:
        return [_plain(batch) for batch in super()._deliver(chunk)]


def _plain(batch: Any) -> Any:
    """A batch as a tree that Grain can look into and send between processes."""
    return {"inputs": batch.inputs, "targets": batch.targets} if isinstance(batch, Batch) else batch


def _first_row(part: Any, is_ragged: bool) -> Any:
    return part[0] if isinstance(part, np.ndarray) and not is_ragged else part
