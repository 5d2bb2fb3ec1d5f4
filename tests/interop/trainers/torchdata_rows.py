"""A plugin of pytest: the data sets of torchdata's `test_state_dict.py` become tokenmill's.

Its map-style dummy becomes `TorchRows`, and its iterable ones the loader as an `IterableDataset`, each of n workers as
one of n ranks. Its dummies that shuffle, count or fail by themselves stay: these tests are of the `DataLoader`.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import tokenmill as tm

num_opened = 0


def make_rows(count: int) -> Any:
    """Return rows, each a document of three tokens, all different."""
    global num_opened
    num_opened += 1
    path = Path(tempfile.mkdtemp()) / "rows.parquet"
    ids = [[number, number + 1, number + 2] for number in range(count)]
    pq.write_table(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}), path)
    return tm.pack(tm.open(path), seq_len=4, method="pad")


class MapRows(tm.TorchRows):
    """Rows in place of `DummyMapDataset`; the sampler shuffles, not the data set."""

    def __init__(self, size: int, shuffle: bool = False, include_generator: bool = True) -> None:
        super().__init__(make_rows(size))

    def __getitems__(self, indices: Any) -> Any:
        """Return a list of rows, because these tests have a `collate_fn` that expects one."""
        inputs, targets = super().__getitems__(indices)
        return [{"id": x.tolist(), "targets": y.tolist()} for x, y in zip(inputs, targets, strict=True)]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


class LoaderRows(IterableDataset[Any]):
    """The loader in place of `DummyIterableDataset` and `GeneratorIterable`; its state is the loader's own."""

    def __init__(self, sizes: Any, shuffle: bool = False, include_generator: bool = True) -> None:
        self.rows = tm.shuffle(make_rows(sum(sizes)), seed=0) if shuffle else make_rows(sum(sizes))
        self.loader: Any = None
        self.state: Any = None

    def __iter__(self) -> Any:
        worker = get_worker_info()
        rank, world_size = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        self.loader = tm.load(self.rows, batch_size=1, framework="torch", epochs=1, rank=rank, world_size=world_size)
        if self.state is not None:
            self.loader.load_state_dict(self.state)
            self.state = None
        return (x[0].tolist() for x, y in self.loader)

    def state_dict(self) -> Any:
        """Return the place after the last batch that was handed over."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue there when the iteration begins."""
        self.state = state


def _choose(dummy: Any, sizes: Any, increment_epoch: bool = False) -> Any:
    """Keep the dummy where its items are counters of its own epochs."""
    return dummy(sizes, True) if increment_epoch else LoaderRows(sizes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module.DummyMapDataset = MapRows
        module.DummyIterableDataset = LoaderRows
        module.GeneratorIterable = partial(_choose, module.GeneratorIterable)
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"OPENED {num_opened}")
