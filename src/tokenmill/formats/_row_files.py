"""What formats of rows of equal length share: which rows go into which file, and rows as blocks or after offsets."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.formats._token_blocks import BLOCK_TOKENS, file_blocks, token_blocks
from tokenmill.formats.base import Array, Exporter, Shape, SplitSource
from tokenmill.store.shard import OutputFile

__all__ = ["OffsetRows", "RowFile", "RowFiles", "row_blocks", "rows_at_once"]

LARGEST_ROW = 1 << 30


class RowFile(NamedTuple):
    """One of several files, with the rows from `first` up to `last`."""

    path: Path
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        """How many rows it holds."""
        return self.last - self.first

    @property
    def num_bytes(self) -> int:
        """How large it is, once it has been written."""
        return self.path.stat().st_size


def rows_at_once(split: SplitSource) -> int:
    """Return how many rows make a block."""
    return max(1, BLOCK_TOKENS // split.seq_len)


def row_blocks(
    split: SplitSource, dtype: npt.DTypeLike, first: int, last: int, num_rows: int | None = None
) -> Iterator[Array]:
    """Yield the rows from `first` up to `last` as arrays of (num_rows, seq_len); all blocks share one buffer."""
    seq_len, size = split.seq_len, (num_rows or rows_at_once(split)) * split.seq_len
    for block in token_blocks(split, first * seq_len, last * seq_len, dtype, size):
        yield block.reshape(-1, seq_len)
        split.advance(block.size)


class RowFiles(Exporter):
    """A format with rows in files of equal size."""

    shape: Shape = "rows"
    file_name: str
    """The name of each file, with `{split}`, `{number}` and `{count}` to fill in."""
    file_bytes: int

    def rows_per_file(self, split: SplitSource) -> int:
        """Return how many rows of int32 make a file of about `file_bytes`."""
        return self.file_bytes // (4 * split.seq_len)

    def files(self, split: SplitSource, folder: Path) -> list[RowFile]:
        """Spread the rows over files."""
        step = max(1, self.rows_per_file(split))
        firsts = range(0, split.num_rows, step)
        files = []
        for number, first in enumerate(firsts):
            name = self.file_name.format(split=split.name, number=number, count=len(firsts))
            files.append(RowFile(folder / name, first, min(first + step, split.num_rows)))
        return files

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write the files, then those that describe them."""
        files = self.files(split, folder)
        for file in files:
            self.write_file(split, file)
        self.write_index(split, folder, files)

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read one file after the other."""
        for file in self.files(split, folder):
            yield from self.read_file(split, file)

    @abstractmethod
    def write_file(self, split: SplitSource, file: RowFile) -> None:
        """Write the rows of one file."""

    def write_index(self, split: SplitSource, folder: Path, files: list[RowFile]) -> None:
        """Write what describes all files."""

    @abstractmethod
    def read_file(self, split: SplitSource, file: RowFile) -> Iterator[Array]:
        """Read the rows of one file."""


class OffsetRows(RowFiles):
    """Files of rows of int32 after their u32 number, the u32 offset of each and the end, and a header; and an index."""

    is_folder = True
    name: str
    files_called: str
    """What the format calls its files, in messages."""

    def check(self, split: SplitSource) -> None:
        """Refuse rows that are too long for offsets of 32 bits."""
        if 4 * split.seq_len > LARGEST_ROW:
            what = f"--to {self.name}, whose {self.files_called} are below 4 GB"
            raise UsageError(f"--seq-len {split.seq_len:,} is too much for {what}")

    def rows_per_file(self, split: SplitSource) -> int:
        """Leave space for offsets and the header."""
        header = self.header(split)
        room = self.file_bytes - len(header) - 8 if header else self.file_bytes
        return room // (4 * split.seq_len + 4)

    def write_file(self, split: SplitSource, file: RowFile) -> None:
        """Write number, offsets, header and rows."""
        header = self.header(split)
        start = 4 * (file.num_rows + 2) + len(header)
        offsets = start + np.arange(file.num_rows + 1, dtype=np.int64) * 4 * split.seq_len
        with OutputFile(file.path) as out:
            out.write(np.uint32(file.num_rows).tobytes())
            out.write(offsets.astype("<u4"))
            out.write(header)
            for rows in row_blocks(split, "<i4", file.first, file.last):
                out.write(rows)

    def write_index(self, split: SplitSource, folder: Path, files: list[RowFile]) -> None:
        """Write the index that names the files."""
        (folder / "index.json").write_text(json.dumps(self.index(split, files), sort_keys=True))

    def read_file(self, split: SplitSource, file: RowFile) -> Iterator[Array]:
        """Read all that follows the first offset."""
        _, start = np.fromfile(file.path, "<u4", 2).tolist()
        return file_blocks(file.path, "<i4", offset=start)

    def header(self, split: SplitSource) -> bytes:
        """The header of each file."""
        return b""

    @abstractmethod
    def index(self, split: SplitSource, files: list[RowFile]) -> dict[str, Any]:
        """The content of `index.json`; all files have been written."""
