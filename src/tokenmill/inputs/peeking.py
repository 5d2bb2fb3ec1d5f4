"""Looking into a file whose kind is not settled yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill.errors import DataError
from tokenmill.files import DamagedInput, detect_compression, open_stream

__all__ = ["is_json", "read_blocks"]

BLOCK_BYTES = 1 << 20


def is_json(path: str) -> bool:
    """Whether a name says JSON or JSON lines."""
    return bool({"json", "jsonl", "ndjson"}.intersection(path.rpartition("/")[2].lower().split(".")[1:]))


def read_blocks(path: str) -> Iterator[bytes]:
    """The content of a file without its compression, block by block, as far as it can be read."""
    file = Path(path)
    try:
        with file.open("rb") as head:
            compression = detect_compression(head.read(64), path)
        with open_stream(file, compression) as stream:
            while data := stream.read(BLOCK_BYTES):
                yield data
    except (DamagedInput, DataError, OSError):
        return
