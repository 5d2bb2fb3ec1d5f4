"""NumPy's own `.npy`: one array with one dimension; the header says its type and how many ids there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import ID_TYPES, TokenFile, one_document

__all__ = ["Npy"]

MAGIC = b"\x93NUMPY"


class Npy:
    """Files that `numpy.save` wrote; a file counts as one document."""

    name = "NumPy"
    pattern = "*.npy"

    def recognise(self, path: Path) -> Path | None:
        """A `.npy` that begins with NumPy's magic bytes; OLMo's does not."""
        if path.suffix != ".npy" or not path.is_file():
            return None
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """The header says what the ids are, so `dtype` is not needed."""
        return [_read_header(path) for path in paths]


def _read_header(path: Path) -> TokenFile:
    size = path.stat().st_size
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with path.open("rb") as file:
            shape, _, kind = readers[np.lib.format.read_magic(file)](file)
            offset = file.tell()
    except (ValueError, KeyError, EOFError):
        raise StoreError(f"{path} has a header that is not NumPy's; save it again with numpy.save") from None
    if len(shape) != 1 or kind.str.lstrip("|") not in ID_TYPES.values():
        raise StoreError(
            f"{path} is an array of {kind} with shape {shape}; expected ids in one dimension, of type "
            f"{', '.join(ID_TYPES)}"
        )
    if offset + shape[0] * kind.itemsize != size:
        raise StoreError(f"{path} has {size} bytes and its header says {shape[0]} ids of type {kind}; it is damaged")
    return TokenFile(str(path), kind, shape[0], one_document(), size, offset)
