"""Parquet with a column `input_ids`, as Hugging Face's tokenizing scripts write it: each row is a document.

Columns are compressed, so they cannot be mapped: they are read once, some rows at a time, into a spool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import TokenFile
from tokenmill.store.foreign.spool import Spool

__all__ = ["Parquet"]

COLUMN = "input_ids"
BATCH_TOKENS = 1 << 18
MOST_BATCH_ROWS = 8192
BUFFER_BYTES = 1 << 20
LARGEST_ID = (1 << 31) - 1


class Parquet:
    """Files such as `train-00000-of-00008.parquet`."""

    name = "Parquet"
    pattern = "*.parquet"

    def recognise(self, path: Path) -> Path | None:
        """By name; tokenmill's own tables of where documents came from have no ids."""
        is_table = path.suffix == ".parquet" and not path.name.endswith(".docs.parquet")
        return path if is_table and path.is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """All files in one spool; ids are two bytes wide where all columns are, else four."""
        import pyarrow as pa

        path = paths[0]
        try:
            widths = [_id_bits(path := some) for some in paths]
            spool = Spool("<u2" if max(widths) <= 16 else "<i4", partial(self.describe, paths, dtype))
            for path in paths:
                row = 0
                for batch in _read_batches(path):
                    _append(spool, batch.column(0), path, row)
                    row += len(batch)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0][:120]
            raise StoreError(f"{path} is damaged, or not a Parquet file: {reason}") from None
        return [spool.finish()]


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    # A buffered column chunk is read in pieces, so memory does not follow the row group's size.
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)


def _id_bits(path: Path) -> int:
    """How wide the ids of a file are."""
    import pyarrow.types as types

    with _open(path) as file:
        schema = file.schema_arrow
    if schema.names.count(COLUMN) != 1:
        raise StoreError(f"{path} has no column {COLUMN!r} with ids; it has {', '.join(map(repr, schema.names))}")
    kind = schema.field(COLUMN).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise StoreError(f"{path} has a column {COLUMN!r} of type {kind}; expected a list of integers")
    return int(kind.value_type.bit_width)


def _read_batches(path: Path) -> Iterator[Any]:
    """Rows with about `BATCH_TOKENS` ids at a time, as far as the footer foretells it."""
    with _open(path) as file:
        footer = file.metadata
        place = next(n for n in range(footer.num_columns) if footer.schema.column(n).path.split(".")[0] == COLUMN)
        for group in range(footer.num_row_groups):
            num_rows, num_ids = footer.row_group(group).num_rows, footer.row_group(group).column(place).num_values
            size = max(1, min(MOST_BATCH_ROWS, BATCH_TOKENS * num_rows // max(1, num_ids)))
            yield from file.iter_batches(size, row_groups=[group], columns=[COLUMN], use_threads=False)


def _append(spool: Spool, column: Any, path: Path, row: int) -> None:
    """Copy the rows of a batch, of which the first has number `row`."""
    import pyarrow.compute as compute

    values = column.flatten()
    if column.null_count or values.null_count:
        raise StoreError(f"{path} has a null in column {COLUMN!r}, in row {row + _null_row(column)}; leave it out")
    ids = values.to_numpy()
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise StoreError(f"{path} has {wrong} in column {COLUMN!r}, near row {row}, which is no token id")
    spool.append(ids, compute.list_value_length(column).to_numpy().astype(np.int64))


def _null_row(column: Any) -> int:
    """The first row that is null or has a null."""
    return next(n for n, ids in enumerate(column.to_pylist()) if ids is None or None in ids)
