"""MosaicML Streaming: MDS shards of version 2 and `index.json`, with one column `tokens` as llm-foundry reads it.

The column has a fixed shape, so a sample is its ids and nothing else, and a shard is a small header and bare int32.
It is written without the streaming package, and never in the encoding `pkl`, which would run code when it is read.
"""

from __future__ import annotations

import json
from typing import Any

from tokenmill.formats._row_files import OffsetRows, RowFile
from tokenmill.formats.base import SplitSource

__all__ = ["MosaicShards"]


class MosaicShards(OffsetRows):
    """Shards of 64 MB, the default of streaming's own writer; their header is the configuration as JSON."""

    name, files_called, file_name = "mds", "shards", "shard.{number:05d}.mds"
    file_bytes = 1 << 26

    def header(self, split: SplitSource) -> bytes:
        """The configuration."""
        return json.dumps(self._config(split), sort_keys=True).encode()

    def index(self, split: SplitSource, files: list[RowFile]) -> dict[str, Any]:
        """The shards, each with the configuration."""
        shards = []
        for file in files:
            raw = {"basename": file.path.name, "bytes": file.num_bytes, "hashes": {}}
            own = {"samples": file.num_rows, "raw_data": raw, "zip_data": None}
            shards.append({**self._config(split), **own})
        return {"version": 2, "shards": shards}

    def _config(self, split: SplitSource) -> dict[str, Any]:
        return {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": self.file_bytes,
            "column_names": ["tokens"],
            "column_encodings": [f"ndarray:int32:{split.seq_len}"],
            "column_sizes": [4 * split.seq_len],
        }
