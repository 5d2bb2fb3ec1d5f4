"""A plugin of pytest: rows of token lists in torchtitan's tests become documents that tokenmill opens.

Its tests of packing, mixing, sharding and restoring then read tokenmill's `Documents`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm

num_opened = 0


class DocumentSource:
    """Documents by number, as a `RandomAccessDataSource`."""

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": self.documents.document(number)}


def build(self: Any, *, dataset_iteration_policy: Any) -> Any:
    """Return the rows of a test as documents, if they are lists of ids and nothing else."""
    global num_opened
    rows = self.rows
    if not rows or not all(isinstance(row, dict) and set(row) == {"tokens"} for row in rows):
        return rows
    path = Path(tempfile.mkdtemp()) / "rows.parquet"
    pq.write_table(pa.table({"input_ids": pa.array([row["tokens"] for row in rows], pa.list_(pa.int32()))}), path)
    num_opened += 1
    return DocumentSource(tm.open(path).split())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        if hasattr(module, "RowsSourceConfig"):
            module.RowsSourceConfig.build = build


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"OPENED {num_opened}")
