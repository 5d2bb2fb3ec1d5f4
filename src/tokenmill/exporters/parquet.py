"""Parquet: rows of `input_ids` in `train-00000-of-00004.parquet`, as the Hugging Face Hub names them.

Row groups have 25,000 rows, which are in memory at once while they are encoded; rows above 2,048 tokens come in
smaller groups, so that this stays at 200 MB of ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.exporters.arrow import COLUMN, row_batch, row_schema
from tokenmill.exporters.base import Array, Shape, SplitSource, check_rows
from tokenmill.exporters.rows import RowFile, plan_files
from tokenmill.exporters.writing import BLOCK_TOKENS, copy_tokens

__all__ = ["ParquetRows"]

GROUP_ROWS = 25_000
GROUP_TOKENS = GROUP_ROWS * 2048
GROUPS_PER_FILE = 4
NAME = "{split}-{number:05d}-of-{count:05d}.parquet"


class ParquetRows:
    """Files of up to four row groups, compressed with zstd."""

    shape: Shape = "rows"
    is_folder = False
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse what fills no row."""
        check_rows(split)

    def write(self, split: SplitSource, folder: Path) -> None:
        """Fill and encode one row group after the other."""
        import pyarrow.parquet as pq

        schema = row_schema()
        group_rows = _group_rows(split)
        buffer = np.empty((min(group_rows, split.num_rows), split.seq_len), np.int32)
        for file in _files(split, folder):
            # Ids repeat too seldom within a page for a dictionary to pay.
            with pq.ParquetWriter(file.path, schema, compression="zstd", use_dictionary=False) as writer:
                for first in range(file.first, file.last, group_rows):
                    group = buffer[: min(group_rows, file.last - first)]
                    copy_tokens(split, first * split.seq_len, group.reshape(-1))
                    writer.write_batch(row_batch(group, schema), row_group_size=group_rows)
                    split.advance(group.size)

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The values of the lists, which have no gaps."""
        import pyarrow.parquet as pq

        for file in _files(split, folder):
            with pq.ParquetFile(file.path) as parquet:
                for batch in parquet.iter_batches(max(1, BLOCK_TOKENS // split.seq_len), columns=[COLUMN]):
                    yield batch.column(0).flatten().to_numpy()


def _group_rows(split: SplitSource) -> int:
    return max(1, min(GROUP_ROWS, GROUP_TOKENS // split.seq_len))


def _files(split: SplitSource, folder: Path) -> Iterator[RowFile]:
    return plan_files(split, folder, NAME, GROUPS_PER_FILE * _group_rows(split))
