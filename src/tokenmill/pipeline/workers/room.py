"""How many calls a cluster should have at once, and what to do when it has no room for any."""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

from tokenmill.errors import TokenmillError
from tokenmill.executors.base import Executor
from tokenmill.formatting import format_bytes

__all__ = ["Room"]

LEAST_IN_FLIGHT = 8
"""A cluster that grows with demand must see some demand."""
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
GIVE_UP_SECONDS = 600.0


@dataclass
class Room:
    """The room of a cluster: it gets some more calls than fit, so that no machine waits for one."""

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
        """How many calls fit; asked now and then, because machines come and go."""
        if time.monotonic() - self.asked > ASK_SECONDS:
            self.num_calls = self.cluster.capacity(self.call_memory).num_calls
            self.asked = time.monotonic()
        return self.num_calls

    def check(self, submitted: Sized, *, is_busy: bool) -> None:
        """Tell the user when a cluster has no room for a single call, and give up when that does not change."""
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
