"""ArrayRecord, for Grain: `train-00000-of-00004.array_record`, each record the int32 ids of one row.

The project's own writer makes the files. Grain asks for one record per group: with more, reading one row would also
decode its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from tokenmill.errors import MissingDependencyError
from tokenmill.formats._row_files import RowFile, RowFiles, row_blocks, rows_at_once
from tokenmill.formats.base import Array, SplitSource

__all__ = ["ArrayRecords"]

OPTIONS = "group_size:1,uncompressed"


class ArrayRecords(RowFiles):
    """Files of about half a gigabyte of ids."""

    file_name = "{split}-{number:05d}-of-{count:05d}.array_record"
    file_bytes = 1 << 29

    def check(self, split: SplitSource) -> None:
        """Refuse to export without the array_record package."""
        _import_array_record()

    def write_file(self, split: SplitSource, file: RowFile) -> None:
        """Write a record per row."""
        with closing(_import_array_record().ArrayRecordWriter(str(file.path), OPTIONS)) as writer:
            for rows in row_blocks(split, "<i4", file.first, file.last):
                for row in rows:
                    writer.write(row.tobytes())

    def read_file(self, split: SplitSource, file: RowFile) -> Iterator[Array]:
        """Read the records in order, some at a time."""
        with closing(_import_array_record().ArrayRecordReader(str(file.path))) as reader:
            num_records, step = reader.num_records(), rows_at_once(split)
            for first in range(0, num_records, step):
                yield np.frombuffer(b"".join(reader.read(first, min(first + step, num_records))), "<i4")


def _import_array_record() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise MissingDependencyError("--to arrayrecord", "arrayrecord") from None
    return array_record_module
