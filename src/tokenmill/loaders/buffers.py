"""Memory for batches, used again when nobody holds it any more.

New memory is handed out by the kernel page by page, which costs more than filling it; so large arrays
come from a pool. A batch that the user keeps is never written to: an array refers to its *lease*,
and only when the last array of a lease is gone does the memory return to the pool.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]

MOST_FREE = 4
HUGE_PAGE = 1 << 21
LEAST_HUGE = 2 * HUGE_PAGE
"""From this many bytes on, numpy asks for huge pages, into which writing is up to a third faster."""


class BufferPool:
    """Hands out arrays of one type."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._free: deque[_Block] = deque(maxlen=MOST_FREE)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array that nobody else has, with any contents."""
        size = prod(shape)
        while self._free:
            try:
                block = self._free.pop()
            except IndexError:
                break
            if block.memory.size >= size:
                return np.asarray(_Lease(self._free, block, shape))
        return np.asarray(_Lease(self._free, _Block(self._allocate(size)), shape))

    def _allocate(self, size: int) -> npt.NDArray[Any]:
        num_bytes = size * self.dtype.itemsize
        if num_bytes < HUGE_PAGE // 2:
            return np.empty(size, self.dtype)
        raw = np.empty(max(num_bytes + HUGE_PAGE, LEAST_HUGE), np.uint8)
        first = -raw.ctypes.data % HUGE_PAGE
        return raw[first : first + num_bytes].view(self.dtype)


class _Block:
    """Memory of the pool, and what numpy is told of it: to ask for an address takes microseconds."""

    __slots__ = ("_described", "memory")

    def __init__(self, memory: npt.NDArray[Any]) -> None:
        self.memory = memory
        self._described = {"version": 3, "typestr": memory.dtype.str, "data": (memory.ctypes.data, False)}

    def describe(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """What numpy asks for; batches are nearly always of the same shape."""
        if self._described.get("shape") != shape:
            self._described = {**self._described, "shape": shape}
        return self._described


class _Lease:
    """Memory on loan: numpy keeps this object for as long as an array of it lives."""

    __slots__ = ("__array_interface__", "_block", "_free")

    def __init__(self, free: deque[_Block], block: _Block, shape: tuple[int, ...]) -> None:
        self._free = free
        self._block = block
        self.__array_interface__ = block.describe(shape)

    def __del__(self) -> None:
        # Names of this module may be gone when the interpreter ends: none is used here.
        self._free.append(self._block)
