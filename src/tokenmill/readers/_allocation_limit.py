"""Bound the memory that a library allocates in a call, where its file does not tell how much that will be.

A Parquet file of 400 bytes can hold 20,000 references to one text of a megabyte, or a page of 2 GB. pyarrow allocates
what the file says, row batch by row batch. With a limit of the process on its data, the allocation fails, pyarrow
raises `MemoryError`, and the caller can ask for fewer rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.machine import available_memory

__all__ = ["AllocationLimit"]

LEAST_BYTES, SHARE = 64 << 20, 2
STATUS = Path("/proc/self/statm")
"""Memory of this process in pages; the sixth number is what the limit counts. Only Linux has it."""

_lock = threading.Lock()
_num_inside = 0
_limits_before: tuple[int, int] | None = None


class AllocationLimit:
    """Lets calls allocate half of `memory_bytes`: what they give is copied, and becomes tokens."""

    def __init__(self, memory_bytes: int) -> None:
        self.num_bytes = max(LEAST_BYTES, min(memory_bytes, available_memory()) // SHARE)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Allocations beyond the limit fail inside the block; threads may share it."""
        _enter(self.num_bytes)
        try:
            yield
        finally:
            _leave()


def _enter(num_bytes: int) -> None:
    global _num_inside, _limits_before
    with _lock:
        _num_inside += 1
        if _num_inside > 1 or not STATUS.exists():
            return
        import resource

        _limits_before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(STATUS.read_bytes().split()[5]) * resource.getpagesize() + num_bytes
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _leave() -> None:
    global _num_inside, _limits_before
    with _lock:
        _num_inside -= 1
        if _num_inside == 0 and _limits_before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, _limits_before)
            _limits_before = None
