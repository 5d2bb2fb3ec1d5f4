"""Byte ranges of objects, prefetched in the order in which they will be read.

Rows of a shuffled epoch are a few kilobytes each, all over the objects, and one request takes as long as copying a
thousand of them. So the loader announces the next rows (`prefetch`), neighbours are joined into one request, many
requests run at once, and `read` finds the bytes in memory. A range that was not announced is fetched by `read`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tokenmill.remote.bucket import Bucket, ObjectInfo
from tokenmill.remote.thread_pool import submit

__all__ = ["AHEAD_BYTES", "ByteRange", "RangeReader"]

MAX_REQUESTS = 32
GAP_BYTES = 32 << 10
"""Join ranges that are at most this far apart: unused bytes cost less than another request."""
MAX_JOINED_BYTES = 4 << 20
AHEAD_BYTES = 64 << 20
"""Default limit of bytes that are fetched and not read yet."""
MAX_ANNOUNCEMENTS = 8
"""How many calls of `prefetch` to remember, so that those of a loader that was dropped are forgotten."""


class ByteRange(NamedTuple):
    """The bytes of an object from `start` up to `stop`."""

    key: str
    start: int
    stop: int


class RangeReader:
    """Reads ranges of objects of one bucket, whose sizes are known; threads may share it.

    At most `ahead_bytes` are fetched before they are read. Objects for which `is_cached` is True have been downloaded
    whole, and are not prefetched any more.
    """

    def __init__(
        self, bucket: Bucket, ahead_bytes: int = AHEAD_BYTES, is_cached: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._bucket = bucket
        self._ahead_bytes = ahead_bytes
        self._is_cached = is_cached
        self._reset()

    def _reset(self) -> None:
        """Start without requests; also in a forked process, which never gets the answers to its parent's."""
        self._process = os.getpid()
        self._etags: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._announcements: deque[list[_JoinedRange]] = deque()
        self._announced: dict[ByteRange, _JoinedRange] = {}
        self._queue: deque[_JoinedRange] = deque()
        self._num_ahead = 0

    def prefetch(self, ranges: Iterable[ByteRange], sizes: dict[str, int]) -> None:
        """Announce ranges that will be read in this order, each once; `sizes` has the bytes of their objects."""
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            new = [one for one in dict.fromkeys(ranges) if one not in self._announced]
            joined = _join(new, sizes)
            self._announcements.append(joined)
            self._announced.update((member, request) for request in joined for member in request.members)
            self._queue.extend(joined)
            while len(self._announcements) > MAX_ANNOUNCEMENTS:
                self._forget(self._announcements.popleft())
            self._start_some()

    def is_announced(self, byte_range: ByteRange) -> bool:
        """Whether a range was announced and not read since."""
        return byte_range in self._announced

    def read(self, byte_range: ByteRange, num_bytes: int) -> memoryview:
        """Read all bytes of a range of an object that has `num_bytes`."""
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            request = self._announced.pop(byte_range, None)
            if request is not None:
                if request.has_failed:
                    # The prefetch may have failed in an earlier outage: retry.
                    self._release(request)
                answer = request.answer or self._start(request)
        if request is None:
            return self._fetch(byte_range, num_bytes)
        try:
            data = answer.result()
        except CancelledError:
            # Another thread's announcements pushed this one out before its request had begun.
            return self._fetch(byte_range, num_bytes)
        finally:
            with self._lock:
                request.num_unread -= 1
                if request.num_unread == 0:
                    self._release(request)
                self._start_some()
        return data[byte_range.start - request.start : byte_range.stop - request.start]

    def _fetch(self, byte_range: ByteRange, num_bytes: int) -> memoryview:
        info = ObjectInfo(byte_range.key, num_bytes, self._etags.get(byte_range.key))
        data, etag = self._bucket.read_range_and_etag(info, byte_range.start, byte_range.stop)
        self._etags.setdefault(byte_range.key, etag)
        return data

    def _start_some(self) -> None:
        while self._queue and self._num_ahead < self._ahead_bytes:
            request = self._queue.popleft()
            if request.answer is None and request.num_unread > 0 and not self._is_cached(request.key):
                self._start(request)

    def _start(self, request: _JoinedRange) -> Future[memoryview]:
        self._num_ahead += request.stop - request.start
        whole = ByteRange(request.key, request.start, request.stop)
        request.answer = submit("ranges", MAX_REQUESTS, partial(self._fetch, whole, request.num_bytes))
        return request.answer

    def _release(self, request: _JoinedRange) -> None:
        """Drop the bytes of a request."""
        self._num_ahead -= request.stop - request.start
        request.answer = None

    def _forget(self, requests: list[_JoinedRange]) -> None:
        for request in requests:
            for member in request.members:
                if self._announced.get(member) is request:
                    del self._announced[member]
            if request.answer is not None and request.num_unread > 0:
                request.answer.cancel()
                self._release(request)
            request.num_unread = 0


@dataclass(slots=True, eq=False)
class _JoinedRange:
    """Ranges of one object that one request fetches; `num_unread` of them were not read yet."""

    order: int
    key: str
    start: int
    stop: int
    num_bytes: int
    members: list[ByteRange]
    num_unread: int = 1
    answer: Future[memoryview] | None = None

    def add(self, order: int, byte_range: ByteRange) -> None:
        self.order = min(self.order, order)
        self.stop = max(self.stop, byte_range.stop)
        self.members.append(byte_range)
        self.num_unread += 1

    @property
    def has_failed(self) -> bool:
        """Whether the request has ended with an error."""
        return self.answer is not None and self.answer.done() and self.answer.exception() is not None

    def can_add(self, byte_range: ByteRange) -> bool:
        is_near = byte_range.key == self.key and byte_range.start - self.stop <= GAP_BYTES
        return is_near and max(byte_range.stop, self.stop) - self.start <= MAX_JOINED_BYTES


def _join(ranges: list[ByteRange], sizes: dict[str, int]) -> list[_JoinedRange]:
    """Join neighbouring ranges into requests, in the order in which the first range of each is needed."""
    requests: list[_JoinedRange] = []
    for order in sorted(range(len(ranges)), key=ranges.__getitem__):
        byte_range = ranges[order]
        if requests and requests[-1].can_add(byte_range):
            requests[-1].add(order, byte_range)
        else:
            requests.append(_JoinedRange(order, *byte_range, sizes[byte_range.key], [byte_range]))
    return sorted(requests, key=lambda request: request.order)
