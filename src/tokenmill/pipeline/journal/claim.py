"""The right to publish, for runs whose processes are on other machines, where no file lock works.

`attempt.json` in the journal holds the digest of the attempt that claimed the store last. Processes read it before
they publish a task, so a call that outlives its run does not write into the store of the next one.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.errors import StoreError
from tokenmill.files import write_durably
from tokenmill.pipeline.journal.mirror import JOURNAL, Mirror

__all__ = ["SHARED", "check_claim", "claim", "wait_for_claim"]

SEEN_SECONDS = 5.0
"""How long a file may take to become visible on another machine."""
SHARED = "it must be on storage that all machines of the cluster share"
ATTEMPT = f"{JOURNAL}/attempt.json"


def claim(place: str, digest: str) -> None:
    """Take the right to publish at `place`, a directory or a URL, from earlier attempts."""
    data = msgspec.json.encode(digest)
    if is_remote(place):
        Mirror(place).put(ATTEMPT, data)
    else:
        write_durably(Path(place) / ATTEMPT, data)


def wait_for_claim(place: str, digest: str) -> None:
    """Wait until this machine sees the claim of its own run; raise if it does not share the storage."""
    deadline = time.monotonic() + SEEN_SECONDS
    while _read(place) != digest:
        if time.monotonic() > deadline:
            raise StoreError(
                f"{socket.gethostname()} does not see the same {place} as the machine that started the run: {SHARED}"
            )
        time.sleep(0.2)


def check_claim(place: str, digest: str) -> None:
    """Raise if another attempt has claimed the store."""
    if _read(place) != digest:
        raise StoreError(f"{place} has been taken over by another run")


def _read(place: str) -> str | None:
    data = None
    if is_remote(place):
        data = Mirror(place).read(ATTEMPT)
    else:
        with suppress(FileNotFoundError):
            data = (Path(place) / ATTEMPT).read_bytes()
    return None if data is None else msgspec.json.decode(data, type=str)
