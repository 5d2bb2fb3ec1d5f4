"""The seam between a run and the processes that do its work.

An executor starts workers and carries messages; it knows nothing of texts or tokens. What
a worker does is named as `module:function`, called with a `Channel` and a payload of bytes.
Messages are bytes as well: nothing is pickled between processes.

A cluster has machines instead of workers: it is given calls, which need nothing of each other,
and runs each wherever there is room, again if a machine is lost. A call is named in the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "Answer",
    "Begun",
    "Call",
    "CallEvent",
    "Capacity",
    "Channel",
    "Cluster",
    "Death",
    "Event",
    "Executor",
    "Loss",
    "Message",
    "Note",
    "Place",
    "Post",
    "Worker",
    "resolve",
]


class Channel(Protocol):
    """A worker's connection to the run that started it."""

    def send_bytes(self, data: bytes) -> None:
        """Send one message."""
        ...

    def recv_bytes(self) -> bytes:
        """Wait for one message; EOFError when the other side is gone."""
        ...

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a message has arrived."""
        ...


class Worker(Protocol):
    """One process that was started by an executor."""

    name: str
    pid: int

    def send(self, data: bytes) -> None:
        """Send one message; a worker that has died is reported by `wait`, not here."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...


@dataclass(frozen=True)
class Message:
    """Bytes that a worker sent."""

    worker: Worker
    data: bytes


@dataclass(frozen=True)
class Death:
    """A worker that ended; `how` says in words what ended it."""

    worker: Worker
    how: str


Event = Message | Death


class Executor(Protocol):
    """Starts workers, tells what they say, and notices at once when one dies."""

    def warm(self, target: str, payload: bytes) -> None:
        """Call a function once, ahead of the workers, so that they find its work done."""
        ...

    def launch(self, name: str, target: str, payload: bytes) -> Worker:
        """Start a worker that calls `target(channel, payload)`."""
        ...

    def wait(self, timeout: float) -> list[Event]:
        """What has happened, after at most `timeout` seconds."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


Post = Callable[[bytes], None]
"""Sends a note from a call to the run; notes may be lost, answers are not."""


@dataclass(frozen=True)
class Call:
    """Work for any machine of a cluster: `target(post, payload)`, whose result is the answer."""

    name: str
    target: str
    payload: bytes
    memory_bytes: int
    is_last: bool = False
    """Whether the process ends with the call, and gives back its memory."""


@dataclass(frozen=True)
class Place:
    """Where a call runs."""

    machine: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"


@dataclass(frozen=True)
class Begun:
    """A call was begun; `lost` is where it ran before, when that process or machine is gone."""

    call: Call
    place: Place
    lost: Place | None = None


@dataclass(frozen=True)
class Note:
    """Bytes that a call sent on its way."""

    call: Call
    data: bytes


@dataclass(frozen=True)
class Answer:
    """The result of a call."""

    call: Call
    data: bytes


@dataclass(frozen=True)
class Loss:
    """A call that was lost as often as the cluster tries; in words what ended it, and what may help."""

    call: Call
    how: str
    remedy: str


CallEvent = Begun | Note | Answer | Loss


@dataclass(frozen=True)
class Capacity:
    """How many calls a cluster runs at once, and how much memory there is for each of them."""

    num_calls: int
    memory_bytes: int


@runtime_checkable
class Cluster(Protocol):
    """Runs calls on the machines that it has, which may come and go."""

    memory_per_call: int | None
    """What every call asks for, if that was said; else a call says it."""

    @property
    def may_grow(self) -> bool:
        """Whether somebody may add machines, so that it makes sense to wait for room."""
        ...

    def join(self, num_calls: int | None) -> None:
        """Connect, or start what there is to connect to, with room for so many calls."""
        ...

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        """What there is room for now, with calls that take so much memory at least."""
        ...

    def submit(self, call: Call) -> None:
        """Run a call as soon as there is room for it; those that were submitted earlier go first."""
        ...

    def wait(self, timeout: float) -> list[CallEvent]:
        """What has happened, after at most `timeout` seconds."""
        ...

    def close(self) -> None:
        """End all calls, and leave the cluster; joining it again is possible."""
        ...


def resolve(target: str) -> Callable[..., Any]:
    """The function that a target names."""
    module, _, function = target.partition(":")
    resolved: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return resolved
