"""Memory for batches, reused as soon as no array refers to it.

The kernel hands out new memory page by page, which costs more than filling it, so large arrays come from a pool. The
pool never overwrites a batch that the user keeps: an array refers to its *lease*, and the memory returns to the pool
only when the last array of the lease is gone.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool", "Lease"]

MOST_FREE = 4
HUGE_PAGE = 1 << 21
LEAST_HUGE = 2 * HUGE_PAGE
"""From this many bytes on, numpy asks for huge pages, into which writing is up to a third faster."""

_Block = tuple[npt.NDArray[Any], dict[str, Any]]
"""Memory, and its description for numpy, which is stored because asking for an address takes microseconds."""


class BufferPool:
    """Arrays of one type."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._free: deque[_Block] = deque(maxlen=MOST_FREE)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return an array that no one else has, with any contents."""
        size = prod(shape)
        memory = None
        while memory is None:
            try:
                memory, described = self._free.pop()
            except IndexError:  # also if another thread has just taken the last one
                memory = self._allocate(size)
                described = {"version": 3, "typestr": memory.dtype.str, "data": (memory.ctypes.data, False)}
            if memory.size < size:
                memory = None
        if described.get("shape") != shape:
            described = {**described, "shape": shape}
        return np.asarray(Lease(self._free, (memory, described)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dtype,)  # memory stays in its process

    def _allocate(self, size: int) -> npt.NDArray[Any]:
        num_bytes = size * self.dtype.itemsize
        if num_bytes < HUGE_PAGE // 2:
            return np.empty(size, self.dtype)
        raw = np.empty(max(num_bytes + HUGE_PAGE, LEAST_HUGE), np.uint8)
        first = -raw.ctypes.data % HUGE_PAGE
        return raw[first : first + num_bytes].view(self.dtype)


class Lease:
    """Memory on loan: numpy keeps this object for as long as an array of it lives.

    The second item of the block describes the memory to numpy. The block then returns to those that are free.
    """

    __slots__ = ("__array_interface__", "_block", "_free")

    def __init__(self, free: deque[Any], block: tuple[Any, ...]) -> None:
        self._free = free
        self._block = block
        self.__array_interface__ = block[1]

    def __del__(self) -> None:
        # This uses no name of the module: at interpreter exit these may be gone.
        self._free.append(self._block)
