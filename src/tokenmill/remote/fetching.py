"""Whole files brought into the cache while others are in use, in the order in which they will be wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import NamedTuple

from tokenmill.errors import TokenmillError
from tokenmill.remote.bucket import Bucket, ObjectInfo
from tokenmill.remote.cache import Cache
from tokenmill.remote.crew import submit

__all__ = ["Fetcher", "RemoteFile"]

FILES_AT_ONCE = 2
"""Each has several requests under way."""
SMALL_FILES_AT_ONCE = 16


class RemoteFile(NamedTuple):
    """A file of a store: its name in the cache, the object it comes from, and its checksum."""

    name: str
    info: ObjectInfo
    xxh3: str


class Fetcher:
    """Fetches files of one bucket into a cache, each once at a time in this process and in all others."""

    def __init__(self, cache: Cache, bucket: Bucket) -> None:
        self.cache = cache
        self.bucket = bucket
        self._begin()

    def __reduce__(self) -> tuple[object, ...]:
        return Fetcher, (self.cache, self.bucket)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._failures: dict[str, TokenmillError] = {}

    def want(self, files: Iterable[RemoteFile]) -> None:
        """Fetch files in the background; what fails is said by `check`."""
        if self._process != os.getpid():
            self._begin()
        for file in files:
            with self._lock:
                is_known = file.name in self._wanted or file.name in self._failures
                self._wanted.add(file.name)
            if not is_known:
                submit("files", FILES_AT_ONCE, lambda file=file: self._fetch(file))  # type: ignore[misc]

    def _fetch(self, file: RemoteFile) -> None:
        try:
            self.cache.fetch(file.name, self.bucket, file.info, file.xxh3)
        except TokenmillError as error:
            self._failures[file.name] = error
        except OSError:
            # A full disk, perhaps; rows go on being read by range.
            pass
        finally:
            with self._lock:
                self._wanted.discard(file.name)

    def check(self, file: RemoteFile) -> None:
        """Raise what a fetch in the background has found out."""
        failure = self._failures.get(file.name)
        if failure is not None:
            raise failure

    def fetch_now(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        """Fetch files and wait for them; gives back those for which there is no room."""
        missing = [file for file in files if not self.cache.has(file.name)]
        answers = [submit("indexes", SMALL_FILES_AT_ONCE, lambda file=file: self._fetch_one(file)) for file in missing]  # type: ignore[misc]
        return [file for file, answer in zip(missing, answers, strict=True) if not answer.result()]

    def _fetch_one(self, file: RemoteFile) -> bool:
        return self.cache.fetch(file.name, self.bucket, file.info, file.xxh3, wait=True)
