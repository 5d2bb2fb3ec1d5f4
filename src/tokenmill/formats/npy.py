"""NumPy's own `.npy`: opened as one array of ids per file, exported as four arrays of rows per split.

The exported arrays have the shape (rows, seq_len): inputs, targets, attention mask, loss mask and, if the store has
them, the weights of targets. Rows are those of
`tm.pack(method="pad")`: one document each, a long one in several, followed by padding. A target is the next token of
the row, or -100 where the loss mask is 0: at the end of a row, in padding, and in a supervised store where the next
token is not trained on. All arrays can be mapped with `np.load(path, mmap_mode="r")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.dataset.pack import pack
from tokenmill.errors import StoreError
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import IGNORED, Chunk
from tokenmill.formats._token_blocks import BLOCK_TOKENS, file_blocks
from tokenmill.formats.base import ID_TYPES, Array, Exporter, Opener, Shape, SplitSource, TokenFile
from tokenmill.regular_files import open_regular
from tokenmill.store.shard import OutputFile

__all__ = ["NumpyArrays"]

TYPES = {"input_ids": "<i4", "target_ids": "<i4", "attention_mask": "|u1", "loss_mask": "|u1"}
"""The exported arrays: ids are int32, masks are bytes of 0 and 1."""
WEIGHTS = {"loss_weights": "<f4"}
"""One more array, if the store has weights."""


class NumpyArrays(Opener, Exporter):
    """Opens files that `numpy.save` wrote, each as one document; exports `train_input_ids.npy` and so on."""

    label = "NumPy"
    pattern = "*.npy"
    magics = (b"\x93NUMPY",)  # OLMo's files with the same suffix have none
    shape: Shape = "padded rows"
    carries_mask = carries_weights = True

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Read the header, which says what the ids are; `dtype` is not needed."""
        size = path.stat().st_size
        shape, kind, offset = _read_header(path)
        if len(shape) != 1 or kind.str.lstrip("|") not in ID_TYPES.values():
            raise StoreError(
                f"{path} is an array of {kind} with shape {shape}; expected ids in one dimension, of type "
                f"{', '.join(ID_TYPES)}"
            )
        if offset + shape[0] * kind.itemsize != size:
            said = f"its header says {shape[0]} ids of type {kind}"
            raise StoreError(f"{path} has {size} bytes and {said}; it is damaged")
        return TokenFile(str(path), kind, shape[0], size, offset=offset)

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write all arrays together, some rows at a time."""
        rows = pack(split.documents, seq_len=split.seq_len, method="pad")
        types = TYPES if split.weight is None else TYPES | WEIGHTS
        pool = BufferPool(np.int32)
        step = max(1, BLOCK_TOKENS // split.seq_len)
        with ExitStack() as stack:
            files = {name: stack.enter_context(OutputFile(_path(split, folder, name))) for name in types}
            for name, file in files.items():
                file.write(_header(types[name], (len(rows), split.seq_len)))
            for first in range(0, len(rows), step):
                chunk = Chunk(rows, np.arange(first, min(first + step, len(rows)))).fill(pool)
                arrays = _arrays(chunk, types)
                for name, file in files.items():
                    file.write(arrays[name])
                split.advance(int(np.count_nonzero(arrays["attention_mask"])))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the inputs that are not padding."""
        blocks = []
        for path in (_path(split, folder, name) for name in ("input_ids", "attention_mask")):
            _, dtype, offset = _read_header(path)
            blocks.append(file_blocks(path, dtype, offset=offset))
        for inputs, attention in zip(*blocks, strict=True):
            yield inputs[attention == 1]


def _arrays(chunk: Chunk, types: dict[str, str]) -> dict[str, Array]:
    """Return all arrays of some rows."""
    arrays = {
        "input_ids": chunk.inputs,
        "target_ids": chunk.targets,
        "attention_mask": chunk.spread("segment_ids") > 0,
        "loss_mask": chunk.targets != IGNORED,
    }
    if "loss_weights" in types:
        arrays["loss_weights"] = chunk.loss_weights
    return {name: arrays[name].astype(kind, copy=False) for name, kind in types.items()}


def _header(kind: str, shape: tuple[int, int]) -> bytes:
    out = BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": kind, "fortran_order": False, "shape": shape})
    return out.getvalue()


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Read the shape and type of an array, and the offset of its values."""
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with open_regular(path) as file:
            shape, _, kind = readers[np.lib.format.read_magic(file)](file)
            return shape, kind, file.tell()
    except (ValueError, KeyError, EOFError):
        raise StoreError(f"{path} has a header that is not NumPy's; save it again with numpy.save") from None


def _path(split: SplitSource, folder: Path, name: str) -> Path:
    return folder / f"{split.name}_{name}.npy"
