"""What formats of rows share: which rows go into which file, and rows as blocks, after offsets, or in Arrow columns."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.formats._token_blocks import BLOCK_TOKENS, OutputFile, convert, copy_tokens, file_blocks
from tokenmill.formats.base import Array, Exporter, Shape, SplitSource

__all__ = ["COLUMN", "OffsetRows", "RowFile", "plan_files", "row_batch", "row_blocks", "row_schema"]

COLUMN = "input_ids"
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


def plan_files(split: SplitSource, folder: Path, pattern: str, rows_per_file: int) -> list[RowFile]:
    """Spread rows over files of equal size; `{split}`, `{number}` and `{count}` in the pattern are filled in."""
    rows_per_file = max(1, rows_per_file)
    firsts = range(0, split.num_rows, rows_per_file)
    return [
        RowFile(
            folder / pattern.format(split=split.name, number=number, count=len(firsts)),
            first,
            min(first + rows_per_file, split.num_rows),
        )
        for number, first in enumerate(firsts)
    ]


def row_blocks(split: SplitSource, dtype: npt.DTypeLike, first: int, last: int) -> Iterator[Array]:
    """Yield the rows from `first` up to `last` as arrays of (rows, seq_len); all blocks share one buffer."""
    step = max(1, BLOCK_TOKENS // split.seq_len)
    stored = split.documents.dtype
    # The cast happens while copying, unless it could change an id.
    is_safe = np.can_cast(stored, dtype)
    buffer = np.empty((min(step, last - first), split.seq_len), dtype if is_safe else stored)
    for row in range(first, last, step):
        rows = buffer[: min(step, last - row)]
        copy_tokens(split, row * split.seq_len, rows.reshape(-1))
        yield rows if is_safe else convert(rows, dtype)
        split.advance(rows.size)


class OffsetRows(Exporter):
    """Files of rows of int32 after their u32 number, the u32 offset of each and the end, and a header; and an index."""

    shape: Shape = "rows"
    is_folder = True
    name: str
    files_called: str
    """What the format calls its files, in messages."""
    file_name: str
    file_bytes: int

    def check(self, split: SplitSource) -> None:
        """Refuse rows that are too long for offsets of 32 bits."""
        if 4 * split.seq_len > LARGEST_ROW:
            what = f"--to {self.name}, whose {self.files_called} are below 4 GB"
            raise UsageError(f"--seq-len {split.seq_len:,} is too much for {what}")

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write the files, then the index that names them."""
        header = self.header(split)
        sizes = [(file, _write_offset_rows(split, file, header)) for file in self._files(split, folder)]
        (folder / "index.json").write_text(json.dumps(self.index(split, sizes), sort_keys=True))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the rows of all files: all that follows the first offset."""
        for file in self._files(split, folder):
            _, start = np.fromfile(file.path, "<u4", 2).tolist()
            yield from file_blocks(file.path, "<i4", offset=start)

    def header(self, split: SplitSource) -> bytes:
        """The header of each file."""
        return b""

    @abstractmethod
    def index(self, split: SplitSource, sizes: list[tuple[RowFile, int]]) -> dict[str, Any]:
        """The content of `index.json`, from all files and their sizes in bytes."""

    def _files(self, split: SplitSource, folder: Path) -> list[RowFile]:
        header = self.header(split)
        room = self.file_bytes - len(header) - 8 if header else self.file_bytes
        return plan_files(split, folder, self.file_name, room // (4 * split.seq_len + 4))


def _write_offset_rows(split: SplitSource, file: RowFile, header: bytes) -> int:
    """Write one file and return its size."""
    start = 4 * (file.num_rows + 2) + len(header)
    offsets = start + np.arange(file.num_rows + 1, dtype=np.int64) * 4 * split.seq_len
    with OutputFile(file.path) as out:
        out.write(np.uint32(file.num_rows).tobytes())
        out.write(offsets.astype("<u4"))
        out.write(header)
        for rows in row_blocks(split, "<i4", file.first, file.last):
            out.write(rows)
    return int(offsets[-1])


def row_schema(metadata: dict[str, str] | None = None) -> Any:
    """Return the Arrow schema of one column of lists of int32."""
    import pyarrow as pa

    return pa.schema([(COLUMN, pa.list_(pa.int32()))], metadata=metadata)


def row_batch(rows: Array, schema: Any) -> Any:
    """Wrap an int32 array of (rows, seq_len) into a record batch, without copying and without an object per row."""
    import pyarrow as pa

    num_rows, seq_len = rows.shape
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * np.int32(seq_len))
    column = pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)))
    return pa.record_batch([column], schema=schema)
