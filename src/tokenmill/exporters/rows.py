"""What formats of rows share: how many rows go into a file, and the names of numbered files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenmill.errors import UsageError
from tokenmill.exporters.base import SplitSource, check_rows

__all__ = ["RowFile", "check_row_size", "plan_files"]

LARGEST_ROW = 1 << 30


class RowFile(NamedTuple):
    """One of several files, and the rows from `first` up to `last` that it holds."""

    path: Path
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        """How many rows it holds."""
        return self.last - self.first


def check_row_size(split: SplitSource, to: str, files: str) -> None:
    """Refuse what fills no row, and rows of int32 that an offset of 32 bits cannot pass."""
    check_rows(split)
    if 4 * split.seq_len > LARGEST_ROW:
        raise UsageError(f"--seq-len {split.seq_len:,} is too much for --to {to}, whose {files} are below 4 GB")


def plan_files(split: SplitSource, folder: Path, pattern: str, rows_per_file: int) -> Iterator[RowFile]:
    """Files of as many rows, the last with what is left; `{number}` and `{count}` are filled into the pattern."""
    rows_per_file = max(1, rows_per_file)
    count = -(-split.num_rows // rows_per_file)
    for number in range(count):
        name = pattern.format(split=split.name, number=number, count=count)
        first = number * rows_per_file
        yield RowFile(folder / name, first, min(first + rows_per_file, split.num_rows))
