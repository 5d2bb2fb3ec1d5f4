"""Fetching files into the user's own cache of the Hub, several at a time, and only as many as a command needs.

The threads are daemons and check a flag whenever bytes arrive, so that Ctrl-C in the middle of a large file ends a run
at once. The cache keeps the files that are complete, and the same command continues from there.
"""

from __future__ import annotations

import inspect
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill.display import Display, Preparation
from tokenmill.errors import TokenmillError
from tokenmill.formatting import format_bytes
from tokenmill.inputs._hub_client import File, Repository, cache_folder, retry
from tokenmill.inputs._peek import count_documents
from tokenmill.remote.thread_pool import DaemonPool

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
        # The client links content that the cache already has from another commit.
        total = sum(files[path].bytes for path in absent if not repository.has_blob(files[path]))
        _check_space(repository, total)
        _download(repository, absent, total, display)
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


def _download(repository: Repository, paths: list[str], total: int, display: Display) -> None:
    """Fetch files in threads, and show how far they are."""
    started = time.monotonic()
    pool = DaemonPool("hub", min(NUM_THREADS, len(paths)))
    counter = _make_counter(pool)
    calls = [partial(_download_one, repository, path, counter) for path in paths]
    pending = {pool.submit(partial(retry, call, repository.target)) for call in calls}
    try:
        while pending:
            done, pending = wait(pending, SHOW_SECONDS, FIRST_COMPLETED)
            for call in done:
                call.result()
            moment = Preparation(
                action="fetching",
                what=f"{len(paths) - len(pending):,} of {len(paths):,} files of {repository.id}",
                unit="bytes",
                seconds=time.monotonic() - started,
                total=total,
                done=min(counter.num_bytes, total) if pending else total,
            )
            display.update(moment)
    finally:
        # Give the threads a moment to remove their incomplete files.
        pool.close(STOP_SECONDS)
        display.close()


def _make_counter(pool: DaemonPool) -> Any:
    """The class of a progress bar that shows nothing and counts the bytes of all files.

    Once the pool is closed, it stops the thread that reports bytes, if that is one of the pool.
    """
    from huggingface_hub.utils import tqdm

    lock = threading.Lock()

    class Counter(tqdm):  # type: ignore[misc]
        num_bytes = 0

        def update(self, n: float | None = 1) -> None:
            if not pool.is_open and threading.current_thread() in pool.threads:
                raise _Stopped
            with lock:
                Counter.num_bytes += int(n or 0)

        def update_transfer(self, n: float = 1) -> None:
            """Ignore the transfer of parts: `update` counts the same bytes."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            """Ignore the speed."""

    return Counter


def _download_one(repository: Repository, path: str, counter: Any) -> None:
    from huggingface_hub import hf_hub_download

    # An older client does not report bytes; then only whole files are counted.
    reports = "tqdm_class" in inspect.signature(hf_hub_download).parameters
    options = {"tqdm_class": counter} if reports else {}
    hf_hub_download(repository.id, path, repo_type="dataset", revision=repository.commit, **options)
