"""MosaicML Streaming: MDS shards of version 2 and `index.json`, with one column `tokens` as llm-foundry reads it.

The column has a fixed shape, so a sample is its ids and nothing else: a shard is a small head and bare int32, which
is written here without the streaming package. Never the encoding `pkl`, which runs what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.exporters.base import Array, Shape, SplitSource
from tokenmill.exporters.rows import RowFile, check_row_size, plan_files
from tokenmill.exporters.writing import OutputFile, file_blocks, row_blocks

__all__ = ["MosaicShards"]

SHARD_BYTES = 1 << 26
"""The default of streaming's own writer."""
NAME = "shard.{number:05d}.mds"


class MosaicShards:
    """Shards of 64 MB: u32 number of samples, u32 offsets, the configuration as JSON, samples."""

    shape: Shape = "rows"
    is_folder = True
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse what fills no row, and rows that an offset of 32 bits cannot pass."""
        check_row_size(split, "mds", "shards")

    def write(self, split: SplitSource, folder: Path) -> None:
        """Shards, then the index that names them."""
        config = _config(split)
        shards = []
        for file in _files(split, folder):
            with OutputFile(file.path) as out:
                for piece in _head(file, config, 4 * split.seq_len):
                    out.write(piece)
                for rows in row_blocks(split, "<i4", file.first, file.last):
                    out.write(rows)
            raw = {"basename": file.path.name, "bytes": file.path.stat().st_size, "hashes": {}}
            shards.append({**config, "samples": file.num_rows, "raw_data": raw, "zip_data": None})
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}, sort_keys=True))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """What lies behind the first offset of each shard."""
        for file in _files(split, folder):
            head = np.fromfile(file.path, "<u4", 2)
            yield from file_blocks(file.path, "<i4", offset=int(head[1]))


def _config(split: SplitSource) -> dict[str, Any]:
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": SHARD_BYTES,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:int32:{split.seq_len}"],
        "column_sizes": [4 * split.seq_len],
    }


def _head(file: RowFile, config: dict[str, Any], row_bytes: int) -> list[bytes]:
    text = json.dumps(config, sort_keys=True).encode()
    start = 4 + 4 * (file.num_rows + 1) + len(text)
    offsets = start + np.arange(file.num_rows + 1, dtype=np.int64) * row_bytes
    return [np.uint32(file.num_rows).tobytes(), offsets.astype("<u4").tobytes(), text]


def _files(split: SplitSource, folder: Path) -> Iterator[RowFile]:
    room = SHARD_BYTES - 8 - len(json.dumps(_config(split)))
    return plan_files(split, folder, NAME, room // (4 * split.seq_len + 4))
