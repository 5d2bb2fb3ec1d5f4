"""Stretches of objects, fetched ahead of their use in the order in which they will be used.

Rows of a shuffled epoch are a few kilobytes each, all over the objects; one request takes as long as copying a
thousand of them. So whoever knows the next rows says so (`expect`), neighbours are joined into one request, many
requests are under way at once, and `read` finds the bytes here. What was not announced is fetched when it is read.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple

from tokenmill.remote.bucket import Bucket, ObjectInfo
from tokenmill.remote.crew import submit

__all__ = ["RangeReader", "Stretch"]

NUM_REQUESTS = 32
"""Requests under way at once."""
GAP_BYTES = 32 << 10
"""Stretches that are no further apart are fetched together: bytes nobody wants cost less than another request."""
MOST_JOINED_BYTES = 4 << 20
AHEAD_BYTES = 64 << 20
"""Bytes that are fetched before they are used; more would only fill memory."""
MOST_BATCHES = 8
"""Announcements that are remembered; those of a loader that was given up are forgotten in time."""


class Stretch(NamedTuple):
    """The bytes of an object from `start` up to `stop`."""

    key: str
    start: int
    stop: int


class RangeReader:
    """Reads objects of one bucket by range; their sizes are known. Threads may share it.

    At most `ahead_bytes` are fetched before they are used. Objects that `is_here` knows have come some other way, and
    are not fetched ahead any more.
    """

    def __init__(
        self, bucket: Bucket, ahead_bytes: int = AHEAD_BYTES, is_here: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._bucket = bucket
        self._ahead_bytes = ahead_bytes
        self._is_here = is_here
        self._begin()

    def _begin(self) -> None:
        """Start with nothing, also in a process that was forked: what its parent waits for never comes to it."""
        self._process = os.getpid()
        self._etags: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, list[_Group]] = OrderedDict()
        self._places: dict[Stretch, _Group] = {}
        self._waiting: deque[_Group] = deque()
        self._num_ahead = 0
        self._num_batches = 0

    def expect(self, stretches: Iterable[Stretch], sizes: dict[str, int]) -> None:
        """Stretches that will be read in this order, each once; and how many bytes their objects have."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            fresh = [one for one in dict.fromkeys(stretches) if one not in self._places]
            groups = _join(fresh, sizes)
            self._num_batches += 1
            self._batches[self._num_batches] = groups
            self._places.update((member, group) for group in groups for member in group.members)
            self._waiting.extend(groups)
            while len(self._batches) > MOST_BATCHES:
                self._forget(self._batches.popitem(last=False)[1])
            self._start_some()

    def is_expected(self, stretch: Stretch) -> bool:
        """Whether a stretch was announced, and not read since."""
        return stretch in self._places

    def read(self, stretch: Stretch, num_bytes: int) -> memoryview:
        """The bytes of a stretch, all of them, of an object that has so many."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            group = self._places.pop(stretch, None)
            if group is not None and group.has_failed:
                # It was fetched ahead while the server was away, which may be long ago.
                self._release(group)
            if group is not None and group.answer is None:
                self._start(group)
            answer = group.answer if group is not None else None
        if group is None or answer is None:
            return self._fetch(stretch, num_bytes)
        wait([answer])
        with self._lock:
            group.num_left -= 1
            if group.num_left == 0:
                self._release(group)
            self._start_some()
        return answer.result()[stretch.start - group.start : stretch.stop - group.start]

    def _fetch(self, stretch: Stretch, num_bytes: int) -> memoryview:
        info = ObjectInfo(stretch.key, num_bytes, self._etags.get(stretch.key))
        data, etag = self._bucket.read_part(info, stretch.start, stretch.stop)
        self._etags.setdefault(stretch.key, etag)
        return data

    def _start_some(self) -> None:
        while self._waiting and self._num_ahead < self._ahead_bytes:
            group = self._waiting.popleft()
            if group.answer is None and group.num_left > 0 and not self._is_here(group.key):
                self._start(group)

    def _start(self, group: _Group) -> None:
        self._num_ahead += group.stop - group.start
        whole = Stretch(group.key, group.start, group.stop)
        group.answer = submit("ranges", NUM_REQUESTS, partial(self._fetch, whole, group.num_bytes))

    def _release(self, group: _Group) -> None:
        """Let go of bytes that nobody wants any more."""
        self._num_ahead -= group.stop - group.start
        group.answer = None

    def _forget(self, groups: list[_Group]) -> None:
        for group in groups:
            for member in group.members:
                if self._places.get(member) is group:
                    del self._places[member]
            if group.answer is not None and group.num_left > 0:
                group.answer.cancel()
                self._release(group)
            group.num_left = 0


class _Group:
    """Stretches of one object that one request brings; `num_left` of them have not been read."""

    __slots__ = ("answer", "key", "members", "num_bytes", "num_left", "order", "start", "stop")

    def __init__(self, order: int, first: Stretch, num_bytes: int) -> None:
        self.order = order
        self.key, self.start, self.stop = first
        self.num_bytes = num_bytes
        self.members = [first]
        self.num_left = 1
        self.answer: Future[memoryview] | None = None

    def add(self, order: int, stretch: Stretch) -> None:
        self.order = min(self.order, order)
        self.stop = max(self.stop, stretch.stop)
        self.members.append(stretch)
        self.num_left += 1

    @property
    def has_failed(self) -> bool:
        """Whether the request has ended with an error."""
        return self.answer is not None and self.answer.done() and self.answer.exception() is not None

    def has_room_for(self, stretch: Stretch) -> bool:
        is_near = stretch.key == self.key and stretch.start - self.stop <= GAP_BYTES
        return is_near and max(stretch.stop, self.stop) - self.start <= MOST_JOINED_BYTES


def _join(stretches: list[Stretch], sizes: dict[str, int]) -> list[_Group]:
    """Stretches that lie near each other as one request, in the order in which the first of each is wanted."""
    groups: list[_Group] = []
    for order in sorted(range(len(stretches)), key=stretches.__getitem__):
        stretch = stretches[order]
        if groups and groups[-1].has_room_for(stretch):
            groups[-1].add(order, stretch)
        else:
            groups.append(_Group(order, stretch, sizes[stretch.key]))
    return sorted(groups, key=lambda group: group.order)
