"""How many workers, and how much memory for each: decided from cores and the memory budget.

Memory is bounded by construction: workers hold about one megabyte of text at a time, and an
engine whose cache has outgrown the worker's share is recycled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.machine import available_memory, usable_cores
from tokenmill.pipeline.request import Request
from tokenmill.progress import format_bytes

__all__ = ["Budget", "make_budget", "worker_memory"]

FREE_SHARE = 0.6
PARENT_BYTES = 150_000_000
WORKER_BYTES = 260_000_000
"""What a worker needs with a small tokenizer: libraries, buffers and room for a useful cache."""
TOKENIZER_RATIO = 12
"""A loaded tokenizer takes about this many times the size of its file."""
CACHE_MARGIN = 0.66
"""An engine is recycled when its worker has grown to this part of its share; the rest is for long documents."""


@dataclass(frozen=True)
class Budget:
    """The resources of a run."""

    num_workers: int
    memory_bytes: int
    worker_bytes: int
    gate_beside_tasks: bool
    """Whether there is memory for the parity gate while workers are at their first tasks."""


def worker_memory(tokenizer_bytes: int, num_workers: int) -> int:
    """What a run with so many workers needs in all."""
    return PARENT_BYTES + num_workers * (WORKER_BYTES + TOKENIZER_RATIO * tokenizer_bytes)


def make_budget(request: Request, tokenizer_bytes: int) -> Budget:
    """Divide cores and memory; a budget that is too small for one worker is an error."""
    memory = request.memory_bytes()
    budget = memory if memory is not None else int(available_memory() * FREE_SHARE)
    smallest = worker_memory(tokenizer_bytes, 1) - PARENT_BYTES
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
    return Budget(workers, budget, share, PARENT_BYTES + smallest * (workers + 1) <= budget)
