"""What Parquet and Arrow tables share: rows of any length with a mask, split over files, and read back as columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill.formats._table_blocks import COLUMNS, IDS, TableBlock, bytes_per_token, table_blocks
from tokenmill.formats.base import Array, Exporter, Shape, SplitSource

__all__ = ["Columns", "Limits", "Tables", "limit_tokens", "table_schema"]

Columns = dict[str, tuple[Array, Array]]
"""For each column the values of some rows, laid end to end, and how many of them each row has."""


class Limits(NamedTuple):
    """The most rows and tokens of a block, and the most blocks and tokens of a file; a longer row is alone in both."""

    rows: int
    tokens: int
    file_blocks: int = 1 << 62
    file_tokens: int = 1 << 62


class Tables(Exporter):
    """A format of lists by row: ids, and the columns that were asked for."""

    shape: Shape = "table"
    carries_mask = carries_weights = True
    file_name: str
    """The name of each file, with `{split}`, `{number}` and `{count}` to fill in."""

    @abstractmethod
    def limits(self, split: SplitSource) -> Limits:
        """Return how large blocks and files may be."""

    @abstractmethod
    def open_file(self, split: SplitSource, path: Path) -> Any:
        """Return a context manager for a new file, which gives a function that writes one record batch."""

    @abstractmethod
    def read_file(self, path: Path) -> Iterator[Any]:
        """Yield the record batches of a file, or tables of them."""

    def write_index(self, split: SplitSource, folder: Path, files: list[Path]) -> None:
        """Write what describes all files."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write the rows, and name the files when it is known how many they are."""
        limits, schema, paths = self.limits(split), table_schema(split), list[Path]()
        blocks = table_blocks(split, limits.rows, limits.tokens)
        block = next(blocks, None)
        while block is not None:
            paths.append(folder / f"{split.name}-{len(paths)}.part")
            with self.open_file(split, paths[-1]) as write_batch:
                num_blocks = num_tokens = 0
                while block is not None:
                    num_blocks, num_tokens = num_blocks + 1, num_tokens + len(block.ids)
                    if num_blocks > 1 and (num_blocks > limits.file_blocks or num_tokens > limits.file_tokens):
                        break
                    write_batch(record_batch(block, schema))
                    split.advance(len(block.ids))
                    block = next(blocks, None)
        names = [self._name(split, number, len(paths)) for number in range(len(paths))]
        files = [path.rename(folder / name) for path, name in zip(paths, names, strict=True)]
        self.write_index(split, folder, files)

    def _name(self, split: SplitSource, number: int, count: int) -> str:
        return self.file_name.format(split=split.name, number=f"{number:05d}", count=f"{count:05d}")

    def read(self, split: SplitSource, folder: Path) -> Iterator[Columns]:
        """Read all columns, file by file."""
        for path in sorted(folder.glob(self.file_name.format(split=split.name, number="*", count="*"))):
            for batch in self.read_file(path):
                yield read_columns(batch)

    def expect(self, split: SplitSource) -> Iterator[Columns]:
        """Make the same columns from the store."""
        limits = self.limits(split)
        for block in table_blocks(split, limits.rows, limits.tokens):
            yield {name: block.column(name) for name in (IDS, *split.rows.columns)}


def table_schema(split: SplitSource, metadata: dict[str, str] | None = None) -> Any:
    """Return the Arrow schema: a list of numbers for each column."""
    import pyarrow as pa

    kinds = {IDS: "<i4", **{name: COLUMNS[name][0] for name in split.rows.columns}}
    fields = [(name, pa.list_(pa.from_numpy_dtype(np.dtype(kind)))) for name, kind in kinds.items()]
    return pa.schema(fields, metadata=metadata)


def record_batch(block: TableBlock, schema: Any) -> Any:
    """Wrap the columns of a block into a record batch, without an object per row."""
    import pyarrow as pa

    columns = []
    for name in schema.names:
        values, lengths = block.column(name)
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)))
    return pa.record_batch(columns, schema=schema)


def read_columns(batch: Any) -> Columns:
    """Return the columns of a record batch as arrays."""
    from pyarrow import compute

    return {
        name: (batch.column(name).flatten().to_numpy(), compute.list_value_length(batch.column(name)).to_numpy())
        for name in batch.schema.names
    }


def limit_tokens(split: SplitSource, most_bytes: int) -> int:
    """Return how many tokens, with all columns, have at most so many bytes."""
    return max(1, most_bytes // bytes_per_token(split))
