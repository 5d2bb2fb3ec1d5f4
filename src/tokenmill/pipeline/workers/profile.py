"""`--profile`: a profile of one worker."""

from __future__ import annotations

import cProfile
import fcntl
import pstats
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Profile", "claim_profile"]


class Profile:
    """The profile of one worker, written again after each task, because a run may be killed."""

    def __init__(self, path: Path, lock: object) -> None:
        self._path = path
        self._lock = lock
        """Held until the process ends."""
        self._profiler = cProfile.Profile()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile a block, and write the result for `pstats`, or as a table if the name of the file ends in .txt."""
        try:
            with self._profiler:
                yield
        finally:
            if self._path.suffix != ".txt":
                self._profiler.dump_stats(self._path)
            else:
                with self._path.open("w") as file:
                    pstats.Stats(self._profiler, stream=file).sort_stats("tottime").print_stats(60)


def claim_profile(path: Path) -> Profile | None:
    """Start a profile, unless another worker has the lock on its file."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return Profile(path, file)
