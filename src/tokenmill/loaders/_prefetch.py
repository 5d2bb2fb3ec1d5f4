"""Fill batches in a thread while earlier ones are used, which hides latency and adds no speed."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["Prefetcher"]

PATIENCE_SECONDS = 0.1
LAST_SECONDS = 5.0


class Prefetcher:
    """An iterator whose items are made in a thread, up to `count` of them in advance.

    The thread ends after the last item, or when this object is gone. At exit all threads are joined, also those whose
    iterator is gone: killing one inside a library's code would crash the program.
    """

    def __init__(self, items: Iterator[Any], count: int) -> None:
        self._waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_work, args=(items, self._waiting, self._stopped), name="tokenmill-prefetch", daemon=True
        )
        _running[self._thread] = self._stopped
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stopped.is_set():
            raise StopIteration
        is_item, value = self._waiting.get()
        if is_item:
            return value
        self._stopped.set()
        raise value

    def __del__(self) -> None:
        self._stopped.set()


def _work(items: Iterator[Any], waiting: queue.Queue[tuple[bool, Any]], stopped: threading.Event) -> None:
    """Put items, then the exception that ended them; stop when the iterator is gone."""
    entry: tuple[bool, Any]
    while not stopped.is_set():
        try:
            entry = (True, next(items))
        except BaseException as error:
            entry = (False, error)
        while not stopped.is_set():
            try:
                waiting.put(entry, timeout=PATIENCE_SECONDS)
                break
            except queue.Full:
                continue
        if not entry[0]:
            return


_running: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """Let threads finish the item they are making, and join them."""
    threads = list(_running.items())
    for _, stopped in threads:
        stopped.set()
    for thread, _ in threads:
        thread.join(LAST_SECONDS)
