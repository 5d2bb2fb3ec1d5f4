"""litdata and litgpt: `chunk-0-N.bin` and `index.json`, for a StreamingDataset with a TokensLoader.

A chunk is u32 number of rows, u32 offsets, and bare int32. A TokensLoader cuts blocks of its own size out of a chunk
and leaves the rest of the chunk out, so `--seq-len` should be its `block_size`; litgpt's is one more than the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.exporters.base import Array, Shape, SplitSource
from tokenmill.exporters.rows import RowFile, check_row_size, plan_files
from tokenmill.exporters.writing import OutputFile, file_blocks, row_blocks

__all__ = ["LitChunks"]

CHUNK_BYTES = 64_000_000
"""The usual size of litdata's own writer."""
INT32 = "no_header_tensor:15"
"""Number 15 in litdata's list of types; the one of uint16 is not known to all versions."""
LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
"""How litdata writes that a sample is one tensor."""
NAME = "chunk-0-{number}.bin"


class LitChunks:
    """Chunks of 64 MB of rows."""

    shape: Shape = "rows"
    is_folder = True
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse what fills no row, and rows that an offset of 32 bits cannot pass."""
        check_row_size(split, "litdata", "chunks")

    def write(self, split: SplitSource, folder: Path) -> None:
        """Chunks, then the index that names them."""
        chunks = []
        for file in _files(split, folder):
            with OutputFile(file.path) as out:
                offsets = _head_bytes(file) + np.arange(file.num_rows + 1, dtype=np.int64) * 4 * split.seq_len
                out.write(np.uint32(file.num_rows).tobytes())
                out.write(offsets.astype("<u4"))
                for rows in row_blocks(split, "<i4", file.first, file.last):
                    out.write(rows)
            chunks.append(
                {
                    "chunk_bytes": file.path.stat().st_size,
                    "chunk_size": file.num_rows,
                    "dim": file.num_rows * split.seq_len,
                    "filename": file.path.name,
                }
            )
        config = {
            "chunk_bytes": CHUNK_BYTES,
            "chunk_size": None,
            "compression": None,
            "data_format": [INT32],
            "data_spec": LEAF,
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}, sort_keys=True))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """What lies behind the offsets of each chunk."""
        for file in _files(split, folder):
            yield from file_blocks(file.path, "<i4", offset=_head_bytes(file))


def _head_bytes(file: RowFile) -> int:
    return 4 * (file.num_rows + 2)


def _files(split: SplitSource, folder: Path) -> Iterator[RowFile]:
    return plan_files(split, folder, NAME, CHUNK_BYTES // (4 * split.seq_len + 4))
