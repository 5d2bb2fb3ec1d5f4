"""Fetching files into the user's own cache of the Hub, several at a time, and only as many as a command needs.

The threads are daemons and check a flag whenever bytes arrive, so that Ctrl-C in the middle of a large file ends a run
at once. The cache keeps the files that are complete, and the same command continues from there.
"""

from __future__ import annotations

import inspect
import queue
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill.display import Display, Preparation
from tokenmill.errors import TokenmillError
from tokenmill.formatting import format_bytes
from tokenmill.inputs._hub_client import File, Repository, cache_folder, retry
from tokenmill.inputs._peek import count_documents

__all__ = ["choose_sample", "fetch", "fetch_first", "weigh"]

NUM_THREADS = 8
SHOW_SECONDS = 0.25
STOP_SECONDS = 2.0
SAMPLE_BYTES = 256_000_000
"""The size of a sample, unless two files are larger than that."""
MIN_FILES, MAX_FILES = 2, 16


def choose_sample(files: Mapping[str, File]) -> list[str]:
    """Choose files at even distances; all of them if they are small together."""
    paths = list(files)
    total = sum(file.bytes for file in files.values())
    if total <= SAMPLE_BYTES or len(paths) <= MIN_FILES:
        return paths
    count = min(max(SAMPLE_BYTES * len(paths) // total, MIN_FILES), MAX_FILES)
    return [paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)]


def weigh(files: Mapping[str, File], chosen: Iterable[str]) -> float:
    """How many times their own size the chosen files stand for."""
    size = sum(files[path].bytes for path in chosen)
    return sum(file.bytes for file in files.values()) / size if size else 1.0


def fetch_first(repository: Repository, files: Mapping[str, File], display: Display, limit: int) -> dict[str, str]:
    """Fetch the first files that together have `limit` documents."""
    paths = list(files)
    local: dict[str, str] = {}
    num_documents, step = 0, 1
    while len(local) < len(paths):
        some = {path: files[path] for path in paths[len(local) : len(local) + step]}
        for path, file in fetch(repository, some, display).items():
            local[path] = file
            num_documents += count_documents(file, limit)
            if num_documents >= limit:
                display.say(f"           the first {limit:,} documents are in {len(local):,} of these files")
                return local
        step *= 2
    return local


def fetch(repository: Repository, files: Mapping[str, File], display: Display) -> dict[str, str]:
    """Fetch the files that are not in the cache; returns where each is, in the order given."""
    local = {path: repository.cache / path for path in files}
    absent = [path for path, file in local.items() if not file.exists()]
    if absent:
        if repository.silence is not None:
            raise repository.silence
        # The client links a content that the cache has from another commit.
        total = sum(files[path].bytes for path in absent if not repository.has_blob(files[path]))
        _check_space(repository, total)
        _Fetcher(repository, total, display).fetch(absent)
    return {path: str(file) for path, file in local.items()}


def _check_space(repository: Repository, total: int) -> None:
    folder = Path(cache_folder())
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    if total > free:
        raise TokenmillError(
            f"{repository.id} needs {format_bytes(total)} more in {cache_folder()}, and its disk has "
            f"{format_bytes(free)} free; set HF_HOME to a folder on another disk, or name fewer files"
        )


class _Stopped(BaseException):
    """The run has ended, so the file is not needed; not an `Exception`, which the client would retry."""


class _Fetcher:
    """Threads that fetch files, while the calling thread shows how far they are."""

    def __init__(self, repository: Repository, total: int, display: Display) -> None:
        self._repository = repository
        self._display = display
        self._total = total
        self._started = time.monotonic()
        self._todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[TokenmillError | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def fetch(self, paths: list[str]) -> None:
        for path in paths:
            self._todo.put(path)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(NUM_THREADS, len(paths)))]
        num_done = 0
        try:
            for thread in self._threads:
                thread.start()
            while num_done < len(paths):
                try:
                    error = self._done.get(timeout=SHOW_SECONDS)
                except queue.Empty:
                    pass
                else:
                    if error is not None:
                        raise error
                    num_done += 1
                self._show(num_done, len(paths))
        finally:
            self._stop.set()
            # Give the threads a moment to remove their incomplete files.
            deadline = time.monotonic() + STOP_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self._display.close()

    def _show(self, num_done: int, num_files: int) -> None:
        moment = Preparation(
            action="fetching",
            what=f"{num_done:,} of {num_files:,} files of {self._repository.id}",
            unit="bytes",
            seconds=time.monotonic() - self._started,
            total=self._total,
            done=self._total if num_done == num_files else min(self._num_bytes, self._total),
        )
        self._display.update(moment)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                path = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                retry(partial(self._download, path), self._repository.target)
            except TokenmillError as error:
                self._done.put(error)
            except _Stopped:
                return
            else:
                self._done.put(None)

    def _download(self, path: str) -> None:
        from huggingface_hub import hf_hub_download

        # An older client does not report bytes, so that only whole files count.
        reports = "tqdm_class" in inspect.signature(hf_hub_download).parameters
        options = {"tqdm_class": self._counter()} if reports else {}
        hf_hub_download(self._repository.id, path, repo_type="dataset", revision=self._repository.commit, **options)

    def _counter(self) -> Any:
        """The class of a progress bar that shows nothing and adds its bytes to the count of all files."""
        from huggingface_hub.utils import tqdm

        fetcher = self

        class Counter(tqdm):  # type: ignore[misc]
            def update(self, n: float | None = 1) -> None:
                fetcher.count(int(n or 0))

            def update_transfer(self, n: float = 1) -> None:
                """Ignore the transfer of parts: `update` counts the same bytes."""

            def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
                """Ignore the speed."""

        return Counter

    def count(self, num_bytes: int) -> None:
        """Count bytes that arrived; after the end of a run, stop the thread if it is one of ours."""
        if self._stop.is_set() and threading.current_thread() in self._threads:
            raise _Stopped
        with self._lock:
            self._num_bytes += num_bytes
