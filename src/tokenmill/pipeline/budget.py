"""How many workers, and how much memory for each: decided from cores and the memory budget.

Memory is bounded by construction: workers hold about one megabyte of text at a time, and an
engine whose cache has outgrown the worker's share is recycled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.executors.base import Cluster
from tokenmill.machine import available_memory, usable_cores
from tokenmill.pipeline.request import Request
from tokenmill.progress import format_bytes

__all__ = ["Budget", "Needs", "make_budget", "make_cluster_budget"]

FREE_SHARE = 0.6
CACHE_MARGIN = 0.66
"""An engine is recycled when its worker has grown to this part of its share; the rest is for long documents."""


@dataclass(frozen=True)
class Needs:
    """What the processes of a run take, measured with tokenizers of 0.4 to 33 MB, with a little room.

    The parent and the nursery hold the tokenizer in several forms, the gate the engine and its reference;
    workers share the nursery's memory, and need room for a useful cache.
    """

    tokenizer_bytes: int

    @property
    def parent(self) -> int:
        """The run itself and the process that workers are forked from."""
        return 120_000_000 + 22 * self.tokenizer_bytes

    @property
    def worker(self) -> int:
        """One worker."""
        return 200_000_000 + 6 * self.tokenizer_bytes

    @property
    def gate(self) -> int:
        """The parity gate."""
        return 90_000_000 + 28 * self.tokenizer_bytes

    def total(self, num_workers: int) -> int:
        """The whole run, where the gate comes before the tasks."""
        return self.parent + max(num_workers * self.worker, self.gate)


@dataclass(frozen=True)
class Budget:
    """The resources of a run."""

    num_workers: int
    memory_bytes: int
    worker_bytes: int
    gate_beside_tasks: bool
    """Whether there is memory for the parity gate while workers are at their first tasks."""


def make_budget(request: Request, tokenizer_bytes: int) -> Budget:
    """Divide cores and memory; a budget that is too small for one worker is an error."""
    needs = Needs(tokenizer_bytes)
    memory = request.memory_bytes()
    budget = memory if memory is not None else int(available_memory() * FREE_SHARE)
    if request.workers != "auto":
        workers = request.workers
    else:
        workers = max(1, min(usable_cores(), (budget - needs.parent) // needs.worker))
    if memory is not None and budget < needs.total(workers):
        raise UsageError(
            f"--memory {request.memory} is too small for {workers} worker{'s' if workers > 1 else ''} with this "
            f"tokenizer: it needs {format_bytes(needs.total(workers))}"
        )
    share = int((budget - needs.parent) / workers * CACHE_MARGIN)
    return Budget(workers, budget, share, needs.parent + needs.worker * workers + needs.gate <= budget)


def make_cluster_budget(request: Request, tokenizer_bytes: int, cluster: Cluster) -> Budget:
    """How many tasks run on a cluster at once, and how much memory each asks for: a share of the smallest machine's."""
    least = Needs(tokenizer_bytes).total(1)
    capacity = cluster.capacity(least)
    memory = request.memory_bytes()
    workers = max(1, capacity.num_calls) if request.workers == "auto" else request.workers
    if memory is not None and request.workers == "auto":
        workers = max(1, min(workers, memory // (cluster.memory_per_call or least)))
    each = cluster.memory_per_call
    if each is None:
        each = memory // workers if memory is not None else max(least, int(capacity.memory_bytes * FREE_SHARE))
    if each < least:
        raise UsageError(
            f"{format_bytes(each)} of memory are too little for a task with this tokenizer: it needs "
            f"{format_bytes(least)}; raise --memory, or memory_per_task, or lower --workers"
        )
    if not cluster.may_grow and cluster.capacity(each).num_calls == 0:
        raise UsageError(
            f"this machine has no room for a task that asks for {format_bytes(each)} of memory; ask for less"
        )
    return Budget(workers, each * workers, int(each * CACHE_MARGIN), gate_beside_tasks=False)
