"""Memory that a loader shares with its worker processes: a few slots, each for the batches of one chunk.

The memory has no name, so nothing of it is left behind, however the processes end, and a small `/dev/shm` does not
limit it. A slot is free again as soon as no array refers to it, see `Lease`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.filling.buffers import Lease

__all__ = ["SharedSlots"]

Bytes = npt.NDArray[np.uint8]

_Block = tuple[int, dict[str, Any], Bytes]
"""The number of a slot, its description for numpy, and its memory."""

ALIGNMENT = 4096


class SharedSlots:
    """Slots of equal size. The loader's process gives them out; a worker writes to those that it is told to fill."""

    def __init__(self, count: int, num_bytes: int, descriptor: int | None = None) -> None:
        self.count, self.num_bytes = count, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        size = self.count * self.num_bytes
        self._descriptor = _allocate(size) if descriptor is None else descriptor
        memory = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
        self._blocks = [_describe(slot, memory[slot * self.num_bytes :][: self.num_bytes]) for slot in range(count)]
        self._free = deque(self._blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.count, self.num_bytes, DupFd(self._descriptor))

    def close_descriptor(self) -> None:
        """Close the file; the memory stays until no process uses it."""
        os.close(self._descriptor)

    @property
    def num_free(self) -> int:
        """How many slots no array refers to."""
        return len(self._free)

    def choose(self) -> int:
        """Take a free slot; the one that was freed last is still in the CPU cache."""
        return self._free.pop()[0]

    def free(self, slot: int) -> None:
        """Give back a slot that no array refers to."""
        self._free.append(self._blocks[slot])

    def lend(self, slot: int) -> Bytes:
        """Return the memory of a slot, which is free again when the last array of it is gone."""
        # The block refers to the memory, which therefore outlives this object if batches do.
        return np.asarray(Lease(self._free, self._blocks[slot]))

    def memory_of(self, slot: int) -> Bytes:
        """Return the memory of a slot to the worker that fills it."""
        return self._blocks[slot][2]


def _describe(slot: int, memory: Bytes) -> _Block:
    place = memory.ctypes.data
    return slot, {"version": 3, "typestr": "|u1", "data": (place, False), "shape": memory.shape}, memory


def _attach(count: int, num_bytes: int, descriptor: Any) -> SharedSlots:
    """Map the slots in a process that was not forked."""
    slots = SharedSlots(count, num_bytes, descriptor.detach())
    slots.close_descriptor()
    return slots


def _allocate(size: int) -> int:
    """Return a descriptor of memory without a name."""
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("tokenmill")
            os.truncate(descriptor, size)
        else:  # not Linux
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
            os.truncate(descriptor, size)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(
            f"{size:,} bytes of memory cannot be shared with worker processes: {why}; pass num_workers=0"
        ) from None
    return descriptor
