"""How many workers, and how much memory for each: decided from cores and the memory budget.

Memory is bounded by construction: workers hold about one megabyte of text at a time, and an
engine whose cache has outgrown the worker's share is recycled.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.machine import available_memory, usable_cores
from tokenmill.pipeline.request import Request
from tokenmill.progress import format_bytes

__all__ = ["Budget", "make_budget"]

FREE_SHARE = 0.6
PARENT_BYTES = 150_000_000
WORKER_BYTES = 260_000_000
"""What a worker needs with a small tokenizer: libraries, buffers and room for a useful cache."""
TOKENIZER_RATIO = 12
"""A loaded tokenizer takes about this many times the size of its file."""
CACHE_MARGIN = 0.85
SHARED_MEMORY = Path("/dev/shm")
SPOOL_SHARE = 0.2


@dataclass(frozen=True)
class Budget:
    """The resources of a run."""

    num_workers: int
    memory_bytes: int
    worker_bytes: int

    def spool_folder(self, store: Path, task_bytes: int) -> Path:
        """Where feeders put decompressed text: in memory when it fits the budget, else in the store."""
        needed = (self.num_workers + 2) * task_bytes
        folder = store / ".tasks" / "spool"
        if needed <= SPOOL_SHARE * self.memory_bytes and _has_room(SHARED_MEMORY, 2 * needed):
            folder = SHARED_MEMORY / f"tokenmill-{store.stat().st_ino:x}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def make_budget(request: Request, tokenizer_bytes: int) -> Budget:
    """Divide cores and memory; a budget that is too small for one worker is an error."""
    memory = request.memory_bytes()
    budget = memory if memory is not None else int(available_memory() * FREE_SHARE)
    smallest = WORKER_BYTES + TOKENIZER_RATIO * tokenizer_bytes
    fit = (budget - PARENT_BYTES) // smallest
    if request.workers != "auto":
        workers = request.workers
        if workers < 1:
            raise UsageError(f"--workers {workers} must be at least 1")
    else:
        workers = max(1, min(usable_cores(), fit))
    if memory is not None and fit < min(workers, 1 if request.workers == "auto" else workers):
        needed = PARENT_BYTES + smallest * (1 if request.workers == "auto" else workers)
        raise UsageError(
            f"--memory {request.memory} is too small for {workers} worker{'s' if workers > 1 else ''} with this "
            f"tokenizer: it needs {format_bytes(needed)}"
        )
    share = int((budget - PARENT_BYTES) / workers * CACHE_MARGIN)
    return Budget(workers, budget, max(share, WORKER_BYTES))


def _has_room(folder: Path, needed: int) -> bool:
    try:
        return shutil.disk_usage(folder).free > needed
    except OSError:
        return False
