"""ArrayRecord, for Grain: `train-00000-of-00004.array_record`, each record the int32 ids of one row.

The project's own writer makes the files. Grain asks for one record per group: with more, reading one row would also
decode its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import MissingDependencyError
from tokenmill.formats._row_files import RowFile, plan_files, row_blocks
from tokenmill.formats._token_blocks import BLOCK_TOKENS
from tokenmill.formats.base import Array, Exporter, Shape, SplitSource

__all__ = ["ArrayRecords"]

FILE_BYTES = 1 << 29
OPTIONS = "group_size:1,uncompressed"
NAME = "{split}-{number:05d}-of-{count:05d}.array_record"


class ArrayRecords(Exporter):
    """Files of about half a gigabyte of ids."""

    shape: Shape = "rows"

    def check(self, split: SplitSource) -> None:
        """Refuse to export without the array_record package."""
        _import_array_record()

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write a record per row."""
        module = _import_array_record()
        for file in _files(split, folder):
            writer = module.ArrayRecordWriter(str(file.path), OPTIONS)
            try:
                for rows in row_blocks(split, "<i4", file.first, file.last):
                    for row in rows:
                        writer.write(row.tobytes())
            finally:
                writer.close()

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the records in order, some at a time."""
        module = _import_array_record()
        step = max(1, BLOCK_TOKENS // split.seq_len)
        for file in _files(split, folder):
            reader = module.ArrayRecordReader(str(file.path))
            try:
                for first in range(0, reader.num_records(), step):
                    records = reader.read(first, min(first + step, reader.num_records()))
                    yield np.frombuffer(b"".join(records), "<i4")
            finally:
                reader.close()


def _import_array_record() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise MissingDependencyError("--to arrayrecord", "arrayrecord") from None
    return array_record_module


def _files(split: SplitSource, folder: Path) -> list[RowFile]:
    return plan_files(split, folder, NAME, FILE_BYTES // (4 * split.seq_len))
