"""A record of each attempt at a run: `progress.json` during the run, `run.json` after its end.

Speed, memory and machine stay out of the manifest, because equal inputs must produce equal manifests.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tokenmill.display import Snapshot
from tokenmill.errors import StoreError
from tokenmill.files import write_durably
from tokenmill.machine import processor_name, usable_cores
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.plan.ranks import Share
from tokenmill.store.manifest import decode_sealed, encode_sealed

__all__ = ["AttemptInfo", "Moment", "RunInfo", "read_attempts", "read_progress", "write_run_file"]

CONTINUE = "; run the same command again"


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The progress of an attempt after some seconds."""

    seconds: float
    num_text_bytes: int
    num_tokens: int
    memory_bytes: int


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a run, finished or not."""

    pid: int
    started: float
    completed: bool | None
    """None while the attempt runs."""
    peak_memory_bytes: int
    num_recycled: int
    num_retried: int
    last: Snapshot
    reason: str | None = None
    """The message of an attempt that ended early; None if it did not, or if it was killed before it could write one."""
    history: list[Moment] = []
    """At most a few hundred moments, spread evenly over the attempt."""
    host: str = ""
    heard: float = 0.0
    """The time at which this record was written."""
    rank: int = 0
    world_size: int = 1
    """Rank 0 of 1 if the run was not divided among ranks."""

    @property
    def cause(self) -> str | None:
        """The reason without the advice, which only mattered when the attempt stopped."""
        return None if self.reason is None else self.reason.partition(CONTINUE)[0].rstrip(".")

    @property
    def share(self) -> Share:
        """The part of the run that this attempt worked on."""
        return Share(self.rank, self.world_size)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`: the machine, and all attempts at the run."""

    checksum: str = ""
    machine: dict[str, Any]
    attempts: list[AttemptInfo]
    origins: list[str] = []
    """The sources of fetched inputs, with their revisions: `hf://datasets/owner/name@5f2c91...`."""


def read_attempts(store: Path) -> list[AttemptInfo]:
    """Read the attempts of all ranks at a run, sorted by start time."""
    ended = _read_run_file(store)
    if ended is not None:
        return ended.attempts
    found = [attempt for path in (store / ".tasks").glob("progress*.json") for attempt in read_progress(path)]
    return sorted(found, key=lambda attempt: attempt.started)


def write_run_file(store: Path, attempts: list[AttemptInfo], inputs: list[InputFile]) -> None:
    """Write run.json beside the manifest, or replace the attempts in it; `machine` is the one that finished the run."""
    info = _read_run_file(store) or RunInfo(
        machine={
            "system": platform.platform(),
            "processor": processor_name(),
            "cores": usable_cores(),
            "memory_bytes": int(psutil.virtual_memory().total),
            "python": platform.python_version(),
        },
        attempts=[],
        origins=sorted({file.origin for file in inputs if file.origin is not None}),
    )
    ended = [msgspec.structs.replace(attempt, completed=bool(attempt.completed)) for attempt in attempts]
    ended.sort(key=lambda attempt: attempt.started)
    write_durably(store / "run.json", encode_sealed(msgspec.structs.replace(info, attempts=ended)))


def _read_run_file(store: Path) -> RunInfo | None:
    """Read the run.json of a finished run; None while a run is unfinished, even if an earlier run left a file."""
    if not (store / ".tasks").is_dir():
        with suppress(OSError, StoreError):
            return decode_sealed((store / "run.json").read_bytes(), RunInfo, store / "run.json")
    return None


def read_progress(path: Path) -> list[AttemptInfo]:
    """Read the attempts in a `progress.json`; an empty list if the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[AttemptInfo])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
