"""Rows of ids as Arrow columns, without a Python object per row: what Parquet and HF files are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.exporters.base import Array

__all__ = ["COLUMN", "row_batch", "row_schema"]

COLUMN = "input_ids"


def row_schema(metadata: dict[str, str] | None = None) -> Any:
    """One column of lists of int32."""
    import pyarrow as pa

    return pa.schema([(COLUMN, pa.list_(pa.int32()))], metadata=metadata)


def row_batch(rows: Array, schema: Any) -> Any:
    """An int32 array of (rows, seq_len) as a record batch that refers to its memory."""
    import pyarrow as pa

    num_rows, seq_len = rows.shape
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * np.int32(seq_len))
    column = pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)))
    return pa.record_batch([column], schema=schema)
