"""Memory for batches, used again when nobody holds it any more.

New memory is handed out by the kernel page by page, which costs more than filling it; so large arrays
come from a pool. A batch that the user keeps is never written to: an array refers to its *lease*,
and only when the last array of a lease is gone does the memory return to the pool.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]

MOST_FREE = 4


class BufferPool:
    """Hands out arrays of one type."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._free: list[npt.NDArray[Any]] = []

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array that nobody else has, with any contents."""
        size = prod(shape)
        while self._free:
            try:
                block = self._free.pop()
            except IndexError:
                break
            if block.size >= size:
                return np.asarray(_Lease(self._free, block, shape))
        return np.asarray(_Lease(self._free, self._allocate(size), shape))

    def _allocate(self, size: int) -> npt.NDArray[Any]:
        return np.empty(size, self._dtype)


class _Lease:
    """Memory on loan: numpy keeps this object for as long as an array of it lives."""

    def __init__(self, free: list[npt.NDArray[Any]], block: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
        self._free = free
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "typestr": block.dtype.str,
            "shape": shape,
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        if len(self._free) < MOST_FREE:
            self._free.append(self._block)
