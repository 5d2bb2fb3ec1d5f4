"""The origin of documents: rows of the `.docs.parquet` files of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.regular_files import open_regular
from tokenmill.store.documents import Documents

__all__ = ["read_sources"]


def read_sources(documents: Documents, numbers: list[int]) -> list[dict[str, Any]]:
    """Read the input number, the position in it and the kept fields of documents; empty for foreign formats."""
    found: list[dict[str, Any]] = [{} for _ in numbers]
    shards, inner = documents.locate(np.array(numbers, np.int64))
    for shard in np.unique(shards).tolist():
        mine = np.flatnonzero(shards == shard)
        path = Path(documents.table.local_path(shard, ".docs.parquet"))
        if path.exists():
            for place, row in zip(mine.tolist(), _read_rows(path, inner[mine].tolist()), strict=True):
                found[place] = row
    return found


def _read_rows(path: Path, numbers: list[int]) -> list[dict[str, Any]]:
    """Read some rows of a table, from only the row groups that contain them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[int, dict[str, Any]] = {}
    wanted = sorted(set(numbers))
    try:
        with open_regular(path) as opened, pq.ParquetFile(opened) as file:
            first = 0
            for group in range(file.metadata.num_row_groups):
                stop = first + file.metadata.row_group(group).num_rows
                here = [number for number in wanted if first <= number < stop]
                if here:
                    table = file.read_row_group(group).take([number - first for number in here])
                    rows |= dict(zip(here, table.to_pylist(), strict=True))
                first = stop
        return [rows[number] for number in numbers]
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({str(error)[:80]}); run tokenmill verify") from None
