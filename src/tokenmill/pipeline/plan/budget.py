"""The number of workers and the memory of each, from the cores and the memory budget; the room that a cluster has.

Memory is bounded by construction: a worker holds about one megabyte of text at a time, and it
recycles its engine when the engine's cache outgrows the worker's share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.executors.base import Executor
from tokenmill.formatting import format_bytes, plural
from tokenmill.machine import available_memory, total_memory, usable_cores
from tokenmill.pipeline.request import Request

__all__ = ["Budget", "Needs", "Room", "make_budget", "make_cluster_budget"]

FREE_SHARE = 0.6
CACHE_MARGIN = 0.66
"""A worker recycles its engine when it has grown to this part of its share; the rest is for long documents."""
LEAST_IN_FLIGHT = 8
"""Calls to submit even without room, because a cluster that grows with demand must see some demand."""
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
GIVE_UP_SECONDS = 600.0


class Needs:
    """The memory of the processes of a run, measured with tokenizers of 0.4 to 33 MB, plus a margin.

    The parent and the fork server hold the tokenizer in several forms, the parent also the reference. Workers share
    the fork server's memory and need room for a useful cache.
    """

    def __init__(self, tokenizer_bytes: int) -> None:
        self.parent = 200_000_000 + 34 * tokenizer_bytes
        self.worker = 200_000_000 + 6 * tokenizer_bytes

    def total(self, num_workers: int) -> int:
        """Memory of the whole run."""
        return self.parent + num_workers * self.worker


@dataclass(frozen=True)
class Budget:
    """The workers and the memory of a run."""

    num_workers: int
    memory_bytes: int
    worker_bytes: int
    gate_first: bool = False
    """Whether tasks start after the parity gate and not beside it."""


def make_budget(request: Request, tokenizer_bytes: int, num_others: int = 0) -> Budget:
    """Divide cores and memory among workers; raise if `--memory` is too small, or more than there is.

    `num_others` ranks have started on this machine before. Each takes its share of what the earlier ones leave, whether
    or not they use theirs already, so that all together never take more than there is.
    """
    needs = Needs(tokenizer_bytes)
    memory = request.memory_bytes()
    if memory is not None and memory > (total := total_memory()):
        raise UsageError(
            f"--memory {request.memory} is more than the {format_bytes(total)} that this machine or its container has; "
            "pass less, or leave it out"
        )
    free_share = FREE_SHARE * (1 - FREE_SHARE) ** num_others
    budget = memory if memory is not None else int(available_memory() * free_share)
    if request.workers != "auto":
        workers = request.workers
    else:
        workers = max(1, min(usable_cores(), (budget - needs.parent) // needs.worker))
    if memory is not None and budget < needs.total(workers):
        raise UsageError(
            f"--memory {request.memory} is too small for {plural(workers, 'worker')} with this tokenizer: it needs "
            f"{format_bytes(needs.total(workers))}"
        )
    share = int((budget - needs.parent) / workers * CACHE_MARGIN)
    return Budget(workers, budget, share)


def make_cluster_budget(request: Request, tokenizer_bytes: int, cluster: Executor) -> Budget:
    """Decide how many tasks run on a cluster at once, and how much memory each requests from its machine."""
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
    return Budget(workers, each * workers, int(each * CACHE_MARGIN))


@dataclass
class Room:
    """The room of a cluster: it gets a few more calls than fit, so that no machine is idle."""

    cluster: Executor
    call_memory: int
    most: int | None
    say: Callable[[str], None]
    num_calls: int = 0
    asked: float = -ASK_SECONDS
    waiting_since: float | None = None
    has_complained: bool = False

    def limit(self) -> int:
        """How many calls the cluster should have now."""
        return self.most if self.most is not None else max(LEAST_IN_FLIGHT, 2 * self._capacity())

    def _capacity(self) -> int:
        """How many calls fit; asked again at intervals, because machines come and go."""
        if time.monotonic() - self.asked > ASK_SECONDS:
            self.num_calls = self.cluster.capacity(self.call_memory).num_calls
            self.asked = time.monotonic()
        return self.num_calls

    def check(self, submitted: Sized, *, is_busy: bool) -> None:
        """Tell the user if a cluster has no room for a single call, and raise an error if that does not change."""
        if not submitted or is_busy:
            self.waiting_since = None
            return
        now = time.monotonic()
        self.waiting_since = self.waiting_since or now
        waited = now - self.waiting_since
        if waited < PATIENCE_SECONDS or (self.has_complained and waited < GIVE_UP_SECONDS):
            return
        if self._capacity() == 0 and waited >= GIVE_UP_SECONDS:
            raise TokenmillError(f"no machine of the cluster has room for a task: {self._wanted}")
        if not self.has_complained:
            self.has_complained = True
            self.say(f"waiting for a machine of the cluster with room for a task: {self._wanted}")

    @property
    def _wanted(self) -> str:
        return f"its CPUs and {format_bytes(self.call_memory)} of memory; ask for less, or add machines"
