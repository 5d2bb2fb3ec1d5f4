"""Bound the memory of what pyarrow reads: a file does not tell how much that will be.

A Parquet file of 400 bytes can hold 20,000 references to one text of a megabyte, or a page of 2 GB. pyarrow allocates
what the file says, row batch by row batch. With a limit of the process on its data, the allocation fails, pyarrow
raises `MemoryError`, and the caller can ask for fewer rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.machine import available_memory

__all__ = ["AllocationLimit", "expanded_bytes", "halve", "use_system_allocator", "without_dictionaries"]

MOST_BATCH_BYTES = 4 << 20
"""A larger batch is cut in half."""

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


def use_system_allocator() -> None:
    """Let files that are opened from here on allocate with malloc.

    pyarrow's own allocator reserves a gigabyte at a time, so it has memory that a limit on allocations does not see.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def without_dictionaries(rows: Any) -> Any:
    """Write the values of columns that refer to a dictionary out, while memory is limited."""
    import pyarrow as pa

    columns = [c.dictionary_decode() if isinstance(c, pa.DictionaryArray) else c for c in rows.columns]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def expanded_bytes(values: Any) -> int:
    """Count the bytes of values; a text of a dictionary counts for each value that refers to it, also inside lists."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = values.type
    if types.is_struct(kind):
        return sum(map(expanded_bytes, values.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return int(values.nbytes) if types.is_primitive(kind.value_type) else expanded_bytes(values.flatten())
    if not isinstance(values, pa.DictionaryArray):
        return int(values.nbytes)
    if not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
        return int(values.indices.nbytes) * 8
    return pc.sum(pc.take(pc.binary_length(values.dictionary), values.indices).cast(pa.int64())).as_py() or 0


def halve(rows: Any) -> Iterator[Any]:
    """Cut rows until each part has at most `MOST_BATCH_BYTES`: rows can be longer than the average of their group."""
    if len(rows) <= 1 or sum(map(expanded_bytes, rows.columns)) <= MOST_BATCH_BYTES:
        yield rows
        return
    middle = len(rows) // 2
    yield from halve(rows.slice(0, middle))
    yield from halve(rows.slice(middle))
