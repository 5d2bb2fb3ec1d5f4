"""litdata and litgpt: `chunk-0-N.bin` and `index.json`, for a StreamingDataset with a TokensLoader.

A chunk is u32 number of rows, u32 offsets, and bare int32. A TokensLoader cuts each chunk into blocks of its own size
and drops the rest, so `--seq-len` should be its `block_size`; litgpt's is one more than the context.
"""

from __future__ import annotations

from typing import Any

from tokenmill.formats._row_files import OffsetRows, RowFile
from tokenmill.formats.base import SplitSource

__all__ = ["LitChunks"]

INT32 = "no_header_tensor:15"
"""Number 15 in litdata's list of types; not all versions know the number of uint16."""
LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
"""How litdata writes that a sample is one tensor."""


class LitChunks(OffsetRows):
    """Chunks of 64 MB of rows, the usual size of litdata's own writer."""

    name, files_called, file_name = "litdata", "chunks", "chunk-0-{number}.bin"
    file_bytes = 64_000_000

    def index(self, split: SplitSource, files: list[RowFile]) -> dict[str, Any]:
        """The chunks, and how a TokensLoader reads them."""
        chunks = [
            {
                "chunk_bytes": file.num_bytes,
                "chunk_size": file.num_rows,
                "dim": file.num_rows * split.seq_len,
                "filename": file.path.name,
            }
            for file in files
        ]
        config = {
            "chunk_bytes": self.file_bytes,
            "chunk_size": None,
            "compression": None,
            "data_format": [INT32],
            "data_spec": LEAF,
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        return {"chunks": chunks, "config": config}
