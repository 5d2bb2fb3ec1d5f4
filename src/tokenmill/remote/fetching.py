"""Whole files brought into the cache while others are in use, in the order in which they will be wanted."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from tokenmill.errors import StoreError, TokenmillError
from tokenmill.remote.bucket import Bucket, ObjectInfo
from tokenmill.remote.cache import Cache, NoRoom
from tokenmill.remote.client import ChangedObject, NoSuchObject
from tokenmill.remote.crew import submit

__all__ = ["Fetcher", "RemoteFile"]

FILES_AT_ONCE = 4
"""Each has several requests under way."""
SMALL_FILES_AT_ONCE = 16
PAUSE_SECONDS = 10.0


class RemoteFile(NamedTuple):
    """A file of a store: its name in the cache, the object it comes from, and its checksum."""

    name: str
    info: ObjectInfo
    xxh3: str


class Fetcher:
    """Fetches files of one bucket into a cache, each once at a time in this process and in all others.

    Where files come and go, at most `ahead_bytes` of them are here that nobody has used yet: what is fetched too early
    would only push out what is still needed.
    """

    def __init__(self, cache: Cache, bucket: Bucket, ahead_bytes: int | None = None) -> None:
        self.cache = cache
        self.bucket = bucket
        self._ahead_bytes = ahead_bytes
        self._begin()

    def _begin(self) -> None:
        """Start with nothing, also in a process that was forked: its parent's threads are not here."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[RemoteFile] = deque()
        self._wanted: set[str] = set()
        self._unused: dict[str, int] = {}
        self._running: dict[str, Future[None]] = {}
        self._failures: dict[str, TokenmillError] = {}
        self._pause_until = 0.0

    def want(self, files: Iterable[RemoteFile]) -> None:
        """Fetch files in the background, in this order; what fails for good is said by `check`."""
        if self._process != os.getpid():
            self._begin()
        if time.monotonic() < self._pause_until:
            return
        with self._lock:
            for file in files:
                if file.name not in self._wanted and file.name not in self._failures:
                    self._wanted.add(file.name)
                    self._queue.append(file)
            self._start_some()

    def is_coming(self, file: RemoteFile) -> bool:
        """Whether a file is wanted, and not here yet."""
        return self._process == os.getpid() and file.name in self._wanted

    def has(self, file: RemoteFile) -> bool:
        """Whether a file is here."""
        return self.cache.has(file.name, file.info.num_bytes)

    def use(self, file: RemoteFile) -> None:
        """Note that a file is being read."""
        if file.name in self._unused and self._process == os.getpid():
            with self._lock:
                self._unused.pop(file.name, None)
                self._start_some()

    def wait_for(self, file: RemoteFile) -> None:
        """Wait until a file that is wanted has come, or is known not to."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            if file in self._queue:
                # Whoever waits for it needs it now, whatever else is here that nobody has used.
                self._queue.remove(file)
                self._start(file)
            running = self._running.get(file.name)
        if running is not None:
            running.result()

    def _start_some(self) -> None:
        while self._queue and len(self._running) < FILES_AT_ONCE:
            ahead = sum(self._unused.values())
            size = self._queue[0].info.num_bytes
            if self._ahead_bytes is not None and ahead and ahead + size > self._ahead_bytes:
                return
            self._start(self._queue.popleft())

    def _start(self, file: RemoteFile) -> None:
        self._unused[file.name] = file.info.num_bytes
        self._running[file.name] = submit("files", FILES_AT_ONCE, partial(self._fetch, file))

    def _fetch(self, file: RemoteFile) -> None:
        is_here, others = False, self._ahead_bytes is not None
        try:
            is_here = self.cache.fetch(file.name, self.bucket, file.info, file.xxh3, wait=others)
        except NoRoom:
            # Rows go on being read by range; to look for room takes time, which it seldom changes.
            self._pause_until = time.monotonic() + PAUSE_SECONDS
        except (StoreError, ChangedObject, NoSuchObject) as error:
            self._failures[file.name] = error
        except TokenmillError:
            # Whoever reads its rows by range meanwhile is told if the server stays away.
            self._pause_until = time.monotonic() + PAUSE_SECONDS
        finally:
            with self._lock:
                self._wanted.discard(file.name)
                self._running.pop(file.name, None)
                if not is_here:
                    self._unused.pop(file.name, None)
                self._start_some()

    def check(self, file: RemoteFile) -> None:
        """Raise what a fetch in the background has found out."""
        failure = self._failures.get(file.name)
        if failure is not None:
            raise failure

    def fetch_now(self, files: Iterable[RemoteFile]) -> None:
        """Fetch files and wait for them."""
        missing = [file for file in files if not self.has(file)]
        for answer in [submit("indexes", SMALL_FILES_AT_ONCE, partial(self._fetch_one, file)) for file in missing]:
            answer.result()

    def _fetch_one(self, file: RemoteFile) -> None:
        self.cache.fetch(file.name, self.bucket, file.info, file.xxh3, wait=True)
