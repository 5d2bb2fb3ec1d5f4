"""Whole files, downloaded into the cache in the background in the order in which they will be needed."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from tokenmill.errors import StoreError, TokenmillError
from tokenmill.remote.bucket import Bucket
from tokenmill.remote.cache import Cache, CacheEntry, NoRoom
from tokenmill.remote.remote_errors import ChangedObject, NoSuchObject
from tokenmill.remote.thread_pool import submit

__all__ = ["Fetcher"]

MAX_FILES = 4
"""Concurrent downloads; each makes several requests at a time."""
MAX_SMALL_FILES = 16
PAUSE_SECONDS = 10.0


class Fetcher:
    """Downloads files of one bucket into a cache, each in one process at a time.

    `ahead_bytes` limits the prefetched files that were not used yet, for a cache that is smaller than the store: a file
    that is prefetched too early would evict one that is still needed.
    """

    def __init__(self, cache: Cache, bucket: Bucket, ahead_bytes: int | None = None) -> None:
        self.cache = cache
        self.bucket = bucket
        self._ahead_bytes = ahead_bytes
        self._reset()

    def _reset(self) -> None:
        """Start without downloads; also in a forked process, which does not have its parent's threads."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[CacheEntry] = deque()
        self._pending: set[str] = set()
        self._unused: dict[str, int] = {}
        self._running: dict[str, Future[None]] = {}
        self._failures: dict[str, TokenmillError] = {}
        self._pause_until = 0.0

    def prefetch(self, files: Iterable[CacheEntry]) -> None:
        """Download files in the background, in this order; `raise_failure` raises errors that remain after retries."""
        if self._process != os.getpid():
            self._reset()
        if time.monotonic() < self._pause_until:
            return
        with self._lock:
            for file in files:
                if file.name not in self._pending and file.name not in self._failures:
                    self._pending.add(file.name)
                    self._queue.append(file)
            self._start_some()

    def is_pending(self, file: CacheEntry) -> bool:
        """Whether a file is queued or being downloaded."""
        return self._process == os.getpid() and file.name in self._pending

    def mark_used(self, file: CacheEntry) -> None:
        """Note that a file is being read, so that another may be prefetched."""
        if file.name in self._unused and self._process == os.getpid():
            with self._lock:
                self._unused.pop(file.name, None)
                self._start_some()

    def wait_for(self, file: CacheEntry) -> None:
        """Wait until the download of a file has ended, and start it now if it is queued."""
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            if file in self._queue:
                self._queue.remove(file)
                self._start(file)
            running = self._running.get(file.name)
        if running is not None:
            running.result()

    def _start_some(self) -> None:
        while self._queue and len(self._running) < MAX_FILES:
            ahead = sum(self._unused.values())
            size = self._queue[0].info.num_bytes
            if self._ahead_bytes is not None and ahead and ahead + size > self._ahead_bytes:
                return
            self._start(self._queue.popleft())

    def _start(self, file: CacheEntry) -> None:
        self._unused[file.name] = file.info.num_bytes
        self._running[file.name] = submit("files", MAX_FILES, partial(self._download, file))

    def _download(self, file: CacheEntry) -> None:
        is_here = False
        try:
            is_here = self.cache.download(file, self.bucket, wait=self._ahead_bytes is not None)
        except NoRoom:
            # Rows are read by range instead. Looking for space takes time and seldom succeeds soon after.
            self._pause_until = time.monotonic() + PAUSE_SECONDS
        except (StoreError, ChangedObject, NoSuchObject) as error:
            self._failures[file.name] = error
        except TokenmillError:
            # Rows are read by range meanwhile, and that raises an error if the outage lasts.
            self._pause_until = time.monotonic() + PAUSE_SECONDS
        finally:
            with self._lock:
                self._pending.discard(file.name)
                self._running.pop(file.name, None)
                if not is_here:
                    self._unused.pop(file.name, None)
                self._start_some()

    def raise_failure(self, file: CacheEntry) -> None:
        """Raise the error of a download in the background, if there was one."""
        failure = self._failures.get(file.name)
        if failure is not None:
            raise failure

    def fetch(self, files: Iterable[CacheEntry]) -> None:
        """Download small files now, many at once."""
        calls = [
            partial(self.cache.download, file, self.bucket, wait=True) for file in files if not self.cache.has(file)
        ]
        for download in [submit("indexes", MAX_SMALL_FILES, call) for call in calls]:
            download.result()
