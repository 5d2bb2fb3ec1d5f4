"""Pools of daemon threads that never keep a program from ending.

At exit, `concurrent.futures.ThreadPoolExecutor` joins its threads after all calls in its queue, which may be hours of
downloads. These pools drop their queue and wait a few seconds for calls that are running.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["DaemonPool", "submit"]

EXIT_SECONDS = 5.0
_pools: dict[str, DaemonPool] = {}
_lock = threading.Lock()


def submit(name: str, num_threads: int, call: Callable[[], Any]) -> Future[Any]:
    """Queue a call for the pool of this name, which is started at its first call and closed at exit."""
    with _lock:
        if name not in _pools:
            _pools[name] = DaemonPool(name, num_threads)
        pool = _pools[name]
    return pool.submit(call)


class DaemonPool:
    """Daemon threads that make calls in the order in which they are submitted."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.is_open = True
        names = (f"tokenmill-{name}-{number}" for number in range(num_threads))
        self.threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self.threads:
            thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._queue.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and self.is_open:
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, call, future  # otherwise an idle thread would keep the last result in memory

    def close(self, seconds: float) -> None:
        """Drop the queue, and wait up to some seconds for calls that are running."""
        self.is_open = False
        for _ in self.threads:
            self._queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _close_all() -> None:
    for pool in _pools.values():
        pool.close(EXIT_SECONDS)


def _after_fork() -> None:
    """Forget the parent's pools, whose threads a forked process does not have, and a lock that may be held."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
