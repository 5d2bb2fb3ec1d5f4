"""Parquet with a column `input_ids`: `train-00000-of-00004.parquet`, as the Hugging Face Hub names files.

When a file is opened, each row is a document. Columns are compressed and cannot be mapped, so they are copied once,
some rows at a time, into a spool. An export has row groups of 25,000 rows, which are in memory while they are encoded;
if rows are long or have many columns, groups have fewer rows, so that this stays at 200 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.filling.fill import IGNORED
from tokenmill.formats._arrow_tables import Limits, Tables, limit_tokens, table_schema
from tokenmill.formats._spool import Spool
from tokenmill.formats._table_blocks import IDS, MASKS
from tokenmill.formats.base import Opener, SplitSource, TokenFile
from tokenmill.regular_files import check_regular

__all__ = ["ParquetRows"]

GROUP_ROWS = 25_000
GROUP_BYTES = GROUP_ROWS * 2048 * 4
GROUPS_PER_FILE = 4
BATCH_TOKENS = 1 << 18
MOST_BATCH_ROWS = 8192
BUFFER_BYTES = 1 << 20
LARGEST_ID = (1 << 31) - 1


class ParquetRows(Opener, Tables):
    """Exported files have up to four row groups, compressed with zstd."""

    label = "Parquet"
    pattern = "*.parquet"
    file_name = "{split}-{number}-of-{count}.parquet"

    def recognise(self, path: Path) -> Path | None:
        """Take any `.parquet` except a store's `.docs.parquet`, which has no ids."""
        return None if path.name.endswith(".docs.parquet") else super().recognise(path)

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Copy all files into one spool; ids are two bytes wide if those of all columns are, else four."""
        import pyarrow as pa

        path = paths[0]
        try:
            widths = [_id_bits(path := some) for some in paths]
            spool = Spool("<u2" if max(widths) <= 16 else "<i4", partial(self.describe, paths, dtype))
            for path in paths:
                row = 0
                for batch in _read_batches(path):
                    _check_losses(batch, path, row)
                    _append(spool, batch.column(IDS), path, row)
                    row += len(batch)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0][:120]
            raise StoreError(f"{path} is damaged, or not a Parquet file: {reason}") from None
        return [spool.finish()]

    def limits(self, split: SplitSource) -> Limits:
        """Return the limits of a row group, and four groups per file."""
        return Limits(GROUP_ROWS, limit_tokens(split, GROUP_BYTES), file_blocks=GROUPS_PER_FILE)

    @contextmanager
    def open_file(self, split: SplitSource, path: Path) -> Iterator[Callable[[Any], None]]:
        """Write each batch as a row group."""
        import pyarrow.parquet as pq

        # Ids repeat too rarely within a page for a dictionary to save space.
        with pq.ParquetWriter(path, table_schema(split), compression="zstd", use_dictionary=False) as writer:
            yield lambda batch: writer.write_batch(batch, row_group_size=max(1, len(batch)))

    def read_file(self, path: Path) -> Iterator[Any]:
        """Read some rows at a time."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as parquet:
            footer = parquet.metadata
            values = sum(footer.row_group(n).column(0).num_values for n in range(footer.num_row_groups))
            yield from parquet.iter_batches(_rows_at_once(footer.num_rows, values))


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    check_regular(path)
    # A buffered column chunk is read in pieces, so memory does not grow with the row group.
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)


def _id_bits(path: Path) -> int:
    """Check that a file has a column of ids, and return how many bits wide they are."""
    import pyarrow.types as types

    with _open(path) as file:
        schema = file.schema_arrow
    if schema.names.count(IDS) != 1:
        raise StoreError(f"{path} has no column {IDS!r} with ids; it has {', '.join(map(repr, schema.names))}")
    kind = schema.field(IDS).type
    if not _is_list(kind) or not types.is_integer(kind.value_type):
        raise StoreError(f"{path} has a column {IDS!r} of type {kind}; expected a list of integers")
    return int(kind.value_type.bit_width)


def _read_batches(path: Path) -> Iterator[Any]:
    """Read rows with about `BATCH_TOKENS` ids at a time, estimated from the footer."""
    with _open(path) as file:
        footer = file.metadata
        place = next(n for n in range(footer.num_columns) if footer.schema.column(n).path.split(".")[0] == IDS)
        columns = [name for name in (IDS, *MASKS) if name in file.schema_arrow.names]
        for group in range(footer.num_row_groups):
            num_rows, num_ids = footer.row_group(group).num_rows, footer.row_group(group).column(place).num_values
            size = _rows_at_once(num_rows, num_ids)
            yield from file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)


def _rows_at_once(num_rows: int, num_ids: int) -> int:
    """Return how many rows have about `BATCH_TOKENS` ids."""
    return max(1, min(MOST_BATCH_ROWS, BATCH_TOKENS * num_rows // max(1, num_ids)))


def _check_losses(batch: Any, path: Path, row: int) -> None:
    """Refuse rows with tokens that are not trained on: only ids are read, so prompts would be."""
    import pyarrow.compute as compute
    import pyarrow.types as types

    for name in MASKS:
        kind = batch.schema.field(name).type if name in batch.schema.names else None
        if kind is None or not _is_list(kind) or not (types.is_integer(kind.value_type) or name == "loss_weights"):
            continue
        column = batch.column(name)
        lengths = compute.list_value_length(column).fill_null(0).to_numpy(False)
        ends = np.cumsum(lengths)
        unused = compute.equal(column.flatten(), IGNORED if name == "labels" else 0).fill_null(False)
        is_unused = unused.to_numpy(False).copy()
        # The first token of a row is never trained on.
        is_unused[(ends - lengths)[lengths > 0]] = False
        if is_unused.any():
            wrong = row + int(np.searchsorted(ends, is_unused.argmax(), "right"))
            raise StoreError(
                f"{path} has a column {name!r} that leaves tokens of row {wrong} out of the loss, and only ids are "
                "read; open the store that it was exported from, or remove the column to train on every token"
            )


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _append(spool: Spool, column: Any, path: Path, row: int) -> None:
    """Copy the rows of a batch, the first of which has number `row`."""
    import pyarrow.compute as compute

    values = column.flatten()
    if column.null_count or values.null_count:
        null = next(n for n, ids in enumerate(column.to_pylist()) if ids is None or None in ids)
        raise StoreError(f"{path} has a null in column {IDS!r}, in row {row + null}; leave it out")
    ids = values.to_numpy()
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise StoreError(f"{path} has {wrong} in column {IDS!r}, near row {row}, which is not a token id")
    spool.append(ids, compute.list_value_length(column).to_numpy().astype(np.int64))
