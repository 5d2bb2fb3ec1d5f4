"""ArrayRecord, for Grain: `train-00000-of-00004.array_record`, each record the int32 ids of one row.

Written by the project's own writer. One record per group is what Grain asks for: with more, reading one row
would decode its neighbours too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.errors import MissingDependencyError
from tokenmill.exporters.base import Array, Shape, SplitSource, check_rows
from tokenmill.exporters.rows import RowFile, plan_files
from tokenmill.exporters.writing import BLOCK_TOKENS, row_blocks

try:
    from array_record.python import array_record_module
except ImportError:
    raise MissingDependencyError("--to arrayrecord", "arrayrecord") from None

__all__ = ["ArrayRecords"]

FILE_BYTES = 1 << 29
OPTIONS = "group_size:1,uncompressed"
NAME = "{split}-{number:05d}-of-{count:05d}.array_record"


class ArrayRecords:
    """Files of about half a gigabyte of ids."""

    shape: Shape = "rows"
    is_folder = False
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse what fills no row."""
        check_rows(split)

    def write(self, split: SplitSource, folder: Path) -> None:
        """A record per row."""
        for file in _files(split, folder):
            writer = array_record_module.ArrayRecordWriter(str(file.path), OPTIONS)
            try:
                for rows in row_blocks(split, "<i4", file.first, file.last):
                    for row in rows:
                        writer.write(row.tobytes())
            finally:
                writer.close()

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The records in order, some at a time."""
        step = max(1, BLOCK_TOKENS // split.seq_len)
        for file in _files(split, folder):
            reader = array_record_module.ArrayRecordReader(str(file.path))
            try:
                for first in range(0, reader.num_records(), step):
                    records = reader.read(first, min(first + step, reader.num_records()))
                    yield np.frombuffer(b"".join(records), "<i4")
            finally:
                reader.close()


def _files(split: SplitSource, folder: Path) -> Iterator[RowFile]:
    return plan_files(split, folder, NAME, FILE_BYTES // (4 * split.seq_len))
