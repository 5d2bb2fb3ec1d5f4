"""What machines of a cluster have to know of a run: posted in its journal, in a directory that they share or a bucket.

`job.json` says what the run does; every process reads it once. `attempt.json` says which attempt at the run may
publish, and is looked at before every task is published: a call that outlives its run finds another one there.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from tokenmill.errors import StoreError, TokenmillError
from tokenmill.files import write_durably
from tokenmill.pipeline.finish import package_version
from tokenmill.pipeline.mirroring import JOURNAL, Mirror
from tokenmill.pipeline.task import Job
from tokenmill.remote.bucket import is_remote

__all__ = ["SHARED", "check_current", "post_job", "see_job"]

SEEN_SECONDS = 5.0
"""How long a machine may take to see what another one has written."""
SHARED = "it must be on storage that all machines of the cluster share"
JOB, ATTEMPT = f"{JOURNAL}/job.json", f"{JOURNAL}/attempt.json"


class SharedJob(msgspec.Struct, frozen=True):
    """`job.json`: what a process has to know, and which packages it has to have."""

    job: Job
    versions: dict[str, str]


def post_job(job: Job, place: str) -> str:
    """Post the job of an attempt at `place`, which takes the right to publish from earlier ones; gives its digest."""
    data = msgspec.json.encode(SharedJob(job, _versions(job.engine)))
    digest = xxhash.xxh3_128_hexdigest(data)
    _write(place, JOB, data)
    _write(place, ATTEMPT, msgspec.json.encode(digest))
    return digest


def see_job(place: str, digest: str) -> Job:
    """The job as the machine that started the run has posted it, or a sentence on what this one does not have."""
    deadline = time.monotonic() + SEEN_SECONDS
    while (data := _read(place, JOB)) is None or xxhash.xxh3_128_hexdigest(data) != digest:
        if time.monotonic() > deadline:
            raise StoreError(
                f"{socket.gethostname()} does not see {place} as the machine does that started the run: {SHARED}"
            )
        time.sleep(0.2)
    shared = msgspec.json.decode(data, type=SharedJob)
    _check_versions(shared)
    return shared.job


def check_current(place: str, digest: str) -> None:
    """A call whose run was killed and begun again must leave the store to the new one."""
    data = _read(place, ATTEMPT)
    if data is None or msgspec.json.decode(data) != digest:
        raise StoreError(f"{place} has been taken over by another run")


def _write(place: str, name: str, data: bytes) -> None:
    if is_remote(place):
        Mirror(place).put(name, data)
    else:
        write_durably(Path(place) / name, data)


def _read(place: str, name: str) -> bytes | None:
    if is_remote(place):
        return Mirror(place).read(name)
    with suppress(FileNotFoundError):
        return (Path(place) / name).read_bytes()
    return None


def _versions(engine: str) -> dict[str, str]:
    """The packages that decide the bytes of a store."""
    return {name: package_version(name) for name in ("tokenmill", "pyarrow", engine)}


def _check_versions(shared: SharedJob) -> None:
    """Machines with other versions would write other bytes than a run without them."""
    for name, version in _versions(shared.job.engine).items():
        if version != shared.versions[name]:
            raise TokenmillError(
                f"{socket.gethostname()} has {name} {version}, and the machine that started the run "
                f"{shared.versions[name]}; install the same version on all machines of the cluster"
            )
