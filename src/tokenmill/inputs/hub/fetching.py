"""Fetching files into the user's own cache of the Hub, several at a time.

Threads are daemons and look at a flag whenever some bytes have come: Ctrl-C in the middle of a large file ends a run at
once. What has been fetched stays, so the same command goes on from there.
"""

from __future__ import annotations

import inspect
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.inputs.hub.refusals import cache_folder
from tokenmill.inputs.hub.repository import File, Repository, persist, repository_folder
from tokenmill.progress import Display, Preparation, format_bytes

__all__ = ["fetch"]

NUM_THREADS = 8
SHOW_SECONDS = 0.25
STOP_SECONDS = 2.0


def fetch(repository: Repository, files: dict[str, File], display: Display) -> list[str]:
    """The paths of files on this machine, in the order given; those that are not in the cache are fetched."""
    missing = {path: file for path, file in files.items() if not _is_cached(repository, path, file)}
    total = sum(file.bytes for file in missing.values())
    if missing and repository.silence is not None:
        raise repository.silence
    _check_space(repository, total)
    return _Fetcher(repository, total, display).fetch(list(files), set(missing))


def _is_cached(repository: Repository, path: str, file: File) -> bool:
    folder = repository_folder(repository.id)
    if (folder / "snapshots" / repository.commit / path).exists():
        return True
    # What another commit has as well is there already; only the Hub can tell the client so.
    return repository.silence is None and (folder / "blobs" / file.mark).exists()


def _check_space(repository: Repository, total: int) -> None:
    folder = Path(cache_folder())
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if total > free:
        raise TokenmillError(
            f"{repository.id} needs {format_bytes(total)} more in {cache_folder()}, and its disk has "
            f"{format_bytes(free)} free; set HF_HOME to a folder on another disk, or name fewer files"
        )


class _Stopped(BaseException):
    """Nobody waits for this file any more; no reason to try again."""


class _Fetcher:
    """Threads that fetch, and what the one who waits for them shows."""

    def __init__(self, repository: Repository, total: int, display: Display) -> None:
        self._repository = repository
        self._display = display
        self._total = total
        self._started = time.monotonic()
        self._todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, str | TokenmillError]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def fetch(self, paths: Sequence[str], missing: set[str]) -> list[str]:
        for path in paths:
            self._todo.put(path)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(NUM_THREADS, len(paths)))]
        found: dict[str, str] = {}
        try:
            for thread in self._threads:
                thread.start()
            while len(found) < len(paths):
                self._take(found)
                if missing:
                    self._show(len(missing & found.keys()), len(missing))
        finally:
            self._stop.set()
            self._join()
        if missing:
            self._display.close()
        return [found[path] for path in paths]

    def _take(self, found: dict[str, str]) -> None:
        try:
            path, result = self._done.get(timeout=SHOW_SECONDS)
        except queue.Empty:
            return
        if isinstance(result, TokenmillError):
            self._display.close()
            raise result
        found[path] = result

    def _show(self, num_files: int, num_missing: int) -> None:
        moment = Preparation(
            action="fetching",
            what=f"{num_files:,} of {num_missing:,} files of {self._repository.id}",
            unit="bytes",
            seconds=time.monotonic() - self._started,
            total=self._total,
            done=self._total if num_files == num_missing else min(self._num_bytes, self._total),
        )
        self._display.update(moment)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                path = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._done.put((path, persist(partial(self._download, path), self._repository.target)))
            except TokenmillError as error:
                self._done.put((path, error))
            except _Stopped:
                return

    def _download(self, path: str) -> str:
        from huggingface_hub import hf_hub_download

        repository = self._repository
        counted = {"tqdm_class": self._counter()} if _counts_bytes() else {}
        return str(hf_hub_download(repository.id, path, repo_type="dataset", revision=repository.commit, **counted))

    def _counter(self) -> Any:
        """A progress bar, as the client makes one for each file, that shows nothing and counts for all of them."""
        from huggingface_hub.utils import tqdm

        fetcher = self

        class Counter(tqdm):  # type: ignore[misc]
            def update(self, n: float | None = 1) -> None:
                fetcher.count(int(n or 0))

            def update_transfer(self, n: float = 1) -> None:
                """The same bytes on their way, of a file that is put together from parts."""

            def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
                """Their speed."""

        return Counter

    def count(self, num_bytes: int) -> None:
        """Some bytes have come; the end of a run ends the threads that fetch, and not those of the client."""
        if self._stop.is_set() and threading.current_thread() in self._threads:
            raise _Stopped
        with self._lock:
            self._num_bytes += num_bytes

    def _join(self) -> None:
        """Give threads a moment to take away the parts of files that they have."""
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _counts_bytes() -> bool:
    """Whether the installed client lets others count; where it does not, whole files are."""
    from huggingface_hub import hf_hub_download

    return "tqdm_class" in inspect.signature(hf_hub_download).parameters
