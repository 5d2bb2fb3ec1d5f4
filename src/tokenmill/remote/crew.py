"""Threads that do what is queued, first come first served, and that never keep a program from ending.

Those of `concurrent.futures` finish everything in their queue before the interpreter may end, which can be hours of
downloads. A process that was forked has none of its parent's threads, so crews are found by process.
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

__all__ = ["submit"]

LAST_SECONDS = 5.0
"""How long the end of a program waits for requests that are under way."""
Work = tuple[Callable[[], Any], "Future[Any]"]
_crews: dict[tuple[int, str], _Crew] = {}
_lock = threading.Lock()


def submit(crew: str, size: int, call: Callable[[], Any]) -> Future[Any]:
    """Queue a call for a crew of this process, which has so many threads."""
    key = (os.getpid(), crew)
    with _lock:
        if key not in _crews:
            _crews[key] = _Crew(crew, size)
        found = _crews[key]
    return found.submit(call)


class _Crew:
    def __init__(self, name: str, size: int) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._is_open = True
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenmill-{name}-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._queue.put((call, answer))
        return answer

    def _work(self) -> None:
        while (work := self._queue.get()) is not None and self._is_open:
            call, answer = work
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del work, call, answer

    def close(self) -> None:
        self._is_open = False
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _renew_lock() -> None:
    """A lock that another thread held when the process was forked would stay so."""
    global _lock
    _lock = threading.Lock()


def _close_all() -> None:
    for (process, _), crew in list(_crews.items()):
        if process == os.getpid():
            crew.close()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(_close_all)
