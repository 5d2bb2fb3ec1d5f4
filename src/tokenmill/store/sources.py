"""What a store has beside documents: rows of the `.docs.parquet` files of shards.

`read_sources` reads the origin of a few documents. Loaders need the same columns for every batch, so `read_kept` and
`read_shared` keep the columns of shards in memory, those of the shards that were used last.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.regular_files import open_parquet
from tokenmill.store.documents import Documents
from tokenmill.store.shard import SHARED
from tokenmill.store.table import Integers

__all__ = ["KEPT", "kept_fields_of", "read_fields_of", "read_kept", "read_shared", "read_sources"]

MOST_TABLES = 256
KEPT = "key."
"""The beginning of the names of columns of kept fields."""


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


def read_kept(documents: Documents, numbers: Integers) -> dict[str, list[str | None]]:
    """Read the kept fields of documents, by name; there are none in foreign formats."""
    shards, inner = documents.locate(numbers)
    found: dict[str, list[str | None]] = {}
    for place, (shard, number) in enumerate(zip(shards.tolist(), inner.tolist(), strict=True)):
        table = _table(documents, shard, None)
        for name in table.column_names if table is not None else ():
            values = found.setdefault(name.removeprefix(KEPT), [None] * len(numbers))
            values[place] = table[name][number].as_py()
    return found


def kept_fields_of(documents: Documents, shard: int) -> set[str]:
    """Return the names of the kept fields of a shard; there are none in foreign formats."""
    import pyarrow as pa

    path = Path(documents.table.local_path(shard, ".docs.parquet"))
    if not path.exists():
        return set()
    try:
        with open_parquet(path) as file:
            return {name.removeprefix(KEPT) for name in file.schema_arrow.names if name.startswith(KEPT)}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({str(error)[:80]}); run tokenmill verify") from None


def read_fields_of(documents: Documents, shard: int, columns: list[str], count: int) -> Any:
    """Read columns of all documents of a shard, without keeping them; without columns, a table of as many rows."""
    import pyarrow as pa

    if not columns:
        return pa.table({"row": pa.nulls(count)})
    path = Path(documents.table.local_path(shard, ".docs.parquet"))
    try:
        with open_parquet(path) as file:
            return file.read(columns=columns)
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({str(error)[:80]}); run tokenmill verify") from None


def read_shared(documents: Documents, numbers: Integers) -> tuple[Integers, Integers, Integers]:
    """Read the columns `SHARED` of documents of preference pairs."""
    shards, inner = documents.locate(numbers)
    found = np.empty((len(SHARED), len(numbers)), np.int64)
    for shard in np.unique(shards).tolist():
        mine = np.flatnonzero(shards == shard)
        table = _table(documents, shard, SHARED)
        if table is None:
            raise StoreError(f"{documents.table.stems[shard]}.docs.parquet is missing; restore it, or tokenize again")
        for place, name in enumerate(SHARED):
            found[place, mine] = table[name].to_numpy()[inner[mine]]
    return found[0], found[1], found[2]


def _table(documents: Documents, shard: int, columns: tuple[str, ...] | None) -> Any:
    """Return columns of a shard's table, by default those of kept fields; None if the shard has no table."""
    path = Path(documents.table.local_path(shard, ".docs.parquet"))
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _read_columns(path, (state.st_mtime_ns, state.st_size), columns)


@lru_cache(maxsize=MOST_TABLES)
def _read_columns(path: Path, stamp: tuple[int, int], columns: tuple[str, ...] | None) -> Any:
    """Read columns of a table, again if the file has changed since."""
    import pyarrow as pa

    try:
        with open_parquet(path) as file:
            if columns is None:
                columns = tuple(name for name in file.schema_arrow.names if name.startswith(KEPT))
            return file.read(columns=list(columns)).combine_chunks()
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({str(error)[:80]}); run tokenmill verify") from None


def _read_rows(path: Path, numbers: list[int]) -> list[dict[str, Any]]:
    """Read some rows of a table, from only the row groups that contain them."""
    import pyarrow as pa

    rows: dict[int, dict[str, Any]] = {}
    wanted = sorted(set(numbers))
    try:
        with open_parquet(path) as file:
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
