"""The seam between a run and the processes that do its work.

An executor starts workers and carries messages; it knows nothing of texts or tokens. What
a worker does is named as `module:function`, called with a `Channel` and a payload of bytes.
Messages are bytes as well: nothing is pickled between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Death", "Event", "Executor", "Message", "Worker"]


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
