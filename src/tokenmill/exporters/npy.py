"""Four real `.npy` arrays per split, of shape (rows, seq_len): inputs, targets, attention mask and loss mask.

Rows are those of `tm.pack(method="pad")`: one document each, a long one in several, padding behind it. A target is the
next token of the row, or -100 where the loss mask is 0: at the end of a row, in padding, and in a supervised store
where the next token is not trained on. All arrays can be mapped with `np.load(path, mmap_mode="r")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.dataset.base import PackedRows
from tokenmill.dataset.copying import IGNORED, RowBlock
from tokenmill.dataset.packing import pack
from tokenmill.exporters.base import Array, Shape, SplitSource
from tokenmill.exporters.writing import BLOCK_TOKENS, OutputFile, file_blocks

__all__ = ["NumpyArrays"]

TYPES = {"input_ids": "<i4", "target_ids": "<i4", "attention_mask": "|u1", "loss_mask": "|u1"}


class NumpyArrays:
    """`train_input_ids.npy` and so on; ids are int32, masks are bytes of 0 and 1."""

    shape: Shape = "padded rows"
    is_folder = False
    carries_mask = True
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Every split that has tokens fits."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """All four arrays side by side, some rows at a time."""
        rows = pack(split.documents, seq_len=split.seq_len, method="pad")
        mask = split.documents.mask
        trained = None if mask is None else pack(mask, seq_len=split.seq_len, method="pad")
        with ExitStack() as stack:
            files = {name: stack.enter_context(OutputFile(_path(split, folder, name))) for name in TYPES}
            for name, file in files.items():
                file.write(_header(TYPES[name], (len(rows), split.seq_len)))
            for index in _steps(len(rows), split.seq_len):
                arrays = _fill(rows, trained, index)
                for name, file in files.items():
                    file.write(arrays[name])
                split.advance(int(np.count_nonzero(arrays["attention_mask"])))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The inputs that are not padding."""
        blocks = [_values(_path(split, folder, name)) for name in ("input_ids", "attention_mask")]
        for inputs, attention in zip(*blocks, strict=True):
            yield inputs[attention == 1]


def _steps(num_rows: int, seq_len: int) -> Iterator[Array]:
    step = max(1, BLOCK_TOKENS // seq_len)
    return (np.arange(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def _fill(rows: PackedRows, trained: PackedRows | None, index: Array) -> dict[str, Array]:
    """Some rows of all four arrays."""
    inputs, targets = _copy(rows, index)
    lengths = rows.spans(index).lengths
    attention = (np.arange(rows.seq_len) < lengths[:, None]).astype("u1")
    loss = targets != IGNORED
    if trained is not None:
        loss &= _copy(trained, index)[1] == 1
        targets[~loss] = IGNORED
    return {"input_ids": inputs, "target_ids": targets, "attention_mask": attention, "loss_mask": loss.astype("u1")}


def _copy(rows: PackedRows, index: Array) -> tuple[Array, Array]:
    both = np.empty((2, len(index), rows.seq_len), np.int32)
    RowBlock(rows, index, document_mask=False).copy(0, len(index), both[0], both[1])
    return both[0], both[1]


def _header(kind: str, shape: tuple[int, int]) -> bytes:
    """The head of an `.npy` file whose values follow."""
    head: dict[str, Any] = {"descr": kind, "fortran_order": False, "shape": shape}
    out = BytesIO()
    np.lib.format.write_array_header_1_0(out, head)
    return out.getvalue()


def _values(path: Path) -> Iterator[Array]:
    """The values of an `.npy` file in the order of the file, read and not mapped."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        offset = file.tell()
    return file_blocks(path, dtype, offset=offset)


def _path(split: SplitSource, folder: Path, name: str) -> Path:
    return folder / f"{split.name}_{name}.npy"
