"""Directories for what a run needs on its own machine while its store is made in a bucket."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenmill.errors import UsageError

__all__ = ["scratch_directory"]

SCRATCH, ALIVE = "tokenmill-scratch-", ".alive"


@contextmanager
def scratch_directory(folder: str | None) -> Iterator[Path]:
    """A directory for one attempt, which goes with it: the bucket has everything that counts.

    Its process holds a lock in it, so that what a killed one has left is known, and removed by the next.
    """
    place = Path(folder or tempfile.gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
        alive = (path / "new").open("wb")
        fcntl.flock(alive, fcntl.LOCK_EX)
        # It has its name when it is locked: whoever sweeps finds nothing before that.
        (path / "new").rename(path / ALIVE)
    except OSError as error:
        raise UsageError(f"--scratch {place} cannot be used: {error.strerror}") from None
    with alive:
        _sweep(place)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            # What processes of a cluster have left on this machine, which ended with the run.
            _sweep(place)


def _sweep(place: Path) -> None:
    for path in place.glob(f"{SCRATCH}*/{ALIVE}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
