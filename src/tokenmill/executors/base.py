"""The seam between a run and the processes that do its work.

An executor is given calls and reports what happens to them; it knows nothing of texts or tokens. Calls are
independent: each runs where there is room, and is retried if its process or its machine is lost.
Targets are named as `module:function`. Everything else that crosses a process boundary is bytes; nothing is pickled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Answer", "Call", "CallEvent", "Capacity", "Executor", "Lost", "Note", "Place", "Post", "Started", "resolve"]

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""The environment of calls: one call runs per core, so libraries must not start thread pools of their own."""

Post = Callable[[bytes], None]
"""Sends a note from a call to the run. Notes may be lost; answers are not."""


@dataclass(frozen=True, eq=False)
class Call:
    """One unit of work: `target(post, context, payload)` runs in some process, and what it returns is the answer."""

    name: str
    target: str
    context: bytes
    """The data that all calls of a run share; it is sent to each process once."""
    payload: bytes
    memory_bytes: int = 0
    is_last: bool = False
    """Run it in a process of its own, which ends with it and frees its memory."""


@dataclass(frozen=True)
class Place:
    """The process that a call runs in."""

    machine: str
    pid: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})" if self.name else f"process {self.pid} on {self.machine}"


@dataclass(frozen=True)
class Started:
    """A call has started. If it is a retry, `lost` says where it ran before and what ended that process."""

    call: Call
    place: Place
    lost: str | None = None


@dataclass(frozen=True)
class Note:
    """Bytes that a running call sent."""

    call: Call
    data: bytes


@dataclass(frozen=True)
class Answer:
    """The result of a call."""

    call: Call
    data: bytes


@dataclass(frozen=True)
class Lost:
    """A call whose retries are exhausted: what ended it, and what may help."""

    call: Call
    how: str
    remedy: str = "give tasks more memory (--memory, or fewer --workers)"


CallEvent = Started | Note | Answer | Lost


@dataclass(frozen=True)
class Capacity:
    """How many calls fit at once, and how much memory there is for each of them."""

    num_calls: int
    memory_bytes: int


class Executor(Protocol):
    """Runs calls in processes of this machine or of others, which may come and go."""

    shares_disk: bool
    """Whether every process sees this machine's files, so that text and results can be handed over as files."""
    memory_per_call: int | None
    """The memory of every call, if the user set it; otherwise each call has its own `memory_bytes`."""

    @property
    def may_grow(self) -> bool:
        """Whether machines may be added, so that waiting for room makes sense."""
        ...

    def join(self, num_calls: int | None) -> None:
        """Connect to the cluster, or start one, with room for this many calls."""
        ...

    def pin(self, cpus: Sequence[int]) -> None:
        """Give each process that is started from now on one of these CPUs, in turn, if they are on this machine."""
        ...

    def warm(self, target: str, payload: bytes) -> None:
        """Call a function once before the first call, in the process from which the others are forked."""
        ...

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        """How much room there is now for calls that take at least this much memory."""
        ...

    def submit(self, call: Call) -> None:
        """Run a call as soon as there is room for it; earlier ones go first."""
        ...

    def wait(self, timeout: float) -> list[CallEvent]:
        """Return what has happened, after at most `timeout` seconds."""
        ...

    def close(self) -> None:
        """End all calls, and leave the cluster if there is one. The executor can be used again."""
        ...


def resolve(target: str) -> Callable[..., Any]:
    """Import the function that a target names."""
    module, _, function = target.partition(":")
    resolved: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return resolved
