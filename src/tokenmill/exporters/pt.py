"""PyTorch files: `chunk_000000.pt` with one int64 tensor per row, and `metadata.json`.

`torch.save` takes a quarter of a millisecond per file, most of it for things that are the same in every
file. So it is called once, and each row's ids and their checksum are put into that file's bytes.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.errors import MissingDependencyError, StoreError
from tokenmill.exporters.base import Array, Shape, SplitSource, check_rows
from tokenmill.exporters.writing import row_blocks

try:
    import torch
except ImportError:
    raise MissingDependencyError("--to pt", "torch") from None

__all__ = ["TensorFiles"]


class TensorFiles:
    """A file per row, which `torch.load(path, weights_only=True, mmap=True)` opens."""

    shape: Shape = "rows"
    is_folder = True
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse what fills no row."""
        check_rows(split)

    def write(self, split: SplitSource, folder: Path) -> None:
        """One file after the other, then what they are."""
        template = _Template(split.seq_len)
        number = 0
        for rows in row_blocks(split, "<i8"):
            for row in rows:
                with open(folder / f"chunk_{number:06d}.pt", "wb", buffering=0) as file:  # noqa: PTH123 (fast)
                    file.write(template.fill(row))
                number += 1
        metadata = {
            "num_chunks": number,
            "seq_len": split.seq_len,
            "num_tokens": number * split.seq_len,
            "dtype": "int64",
            "split": split.name,
            "tokenizer": split.tokenizer,
            "vocab_size": split.vocab_size,
            "eos_id": split.eos_id,
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The tensors; torch loads the first and the last, all others must be the same file but for their values."""
        template = _Template(split.seq_len)
        for number in range(split.num_rows):
            path = f"{folder}/chunk_{number:06d}.pt"
            if number in (0, split.num_rows - 1) or not template.is_good:
                yield torch.load(path, weights_only=True, mmap=True).numpy()
            else:
                yield template.values(path)


class _Template:
    """The bytes that `torch.save` makes of a tensor, with places for its values and the two copies of their CRC."""

    def __init__(self, seq_len: int) -> None:
        values = np.random.default_rng(0).integers(0, 1 << 62, seq_len)
        raw = values.tobytes()
        self._bytes = bytearray(_save(values))
        self._start = self._bytes.find(raw)
        self._size = len(raw)
        self._checksums = _find_all(bytes(self._bytes), zlib.crc32(raw).to_bytes(4, "little"))
        self.is_good = self._start >= 0 and len(self._checksums) == 2 and self._proves_itself(seq_len)

    def _proves_itself(self, seq_len: int) -> bool:
        """Whether another tensor can be put in and is read back."""
        self.is_good = True
        other = np.arange(seq_len, dtype=np.int64)
        return bool(np.array_equal(torch.load(io.BytesIO(self.fill(other)), weights_only=True).numpy(), other))

    def values(self, path: str) -> Array:
        """The values in a file, all other bytes of which must be those of the template."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (fast)
            data = file.read()
        row = np.frombuffer(data, "<i8", self._size // 8, self._start)
        if self.fill(row) != data:
            raise StoreError(f"{path} is not the file that was written")
        return row

    def fill(self, row: Array) -> bytes | bytearray:
        """The file of one row; the next call changes it."""
        if not self.is_good:
            return _save(row)
        raw = row.data.cast("B")
        self._bytes[self._start : self._start + self._size] = raw
        checksum = zlib.crc32(raw).to_bytes(4, "little")
        for place in self._checksums:
            self._bytes[place : place + 4] = checksum
        return self._bytes


def _save(values: Array) -> bytes:
    out = io.BytesIO()
    torch.save(torch.from_numpy(values.copy()), out)
    return out.getvalue()


def _find_all(data: bytes, part: bytes) -> list[int]:
    found = []
    place = data.find(part)
    while place >= 0:
        found.append(place)
        place = data.find(part, place + 1)
    return found
