"""The record of each attempt at a run: `progress.json` during the run, `run.json` after its end.

An `Observer` shows an attempt to the user and writes its record, which `tokenmill status` reads. Speed, memory and
machine stay out of the manifest, because equal inputs must produce equal manifests.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tokenmill.display import Display, Machine, Snapshot, WorkerMoment
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.files import write_durably
from tokenmill.machine import describe_machine, own_command, tree_memory
from tokenmill.pipeline.counts import STAGES, Counts, Pace
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.pipeline.plan.ranks import Share
from tokenmill.regular_files import read_regular
from tokenmill.store.manifest import decode_sealed, encode_sealed, read_sealed

__all__ = ["AttemptInfo", "Moment", "Observer", "RunInfo", "read_attempts", "write_run_file"]

CONTINUE = "; run the same command again"
WRITE_SECONDS = 1.0
PUSH_SECONDS = 10.0
"""The interval of uploads to a bucket, where each request costs money."""
MOST_MOMENTS = 400
FIRST_MOMENT_SECONDS = 0.5
ROOM_BYTES = 1 << 16


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
    command: str = ""
    """What was typed, if it was a command; for `status`, which tells how to resume."""

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


class Observer:
    """Turns counts into snapshots for the display and for `progress.json`."""

    def __init__(self, journal: Journal, display: Display, budget: Budget, seconds_before: float = 0.0) -> None:
        """Begin an attempt; `seconds_before` is how long its preparation took."""
        self._journal = journal
        self._path = journal.folder / f"{'-'.join(filter(None, ('progress', journal.share.name)))}.json"
        self._pushed = time.monotonic()
        self._display = display
        self._budget = budget
        self._started = time.time() - seconds_before
        self._clock = time.monotonic() - seconds_before
        self._pace = Pace()
        self._written = 0.0
        self.peak_memory_bytes = 0
        """The peak memory of the process tree, as sampled."""
        self._memory = 0
        self._cores: list[float] = []
        self._disk_free = 0
        self._counts: Counts | None = None
        self.snapshot: Snapshot | None = None
        """The last snapshot."""
        self._reason: str | None = None
        self._history: list[Moment] = []
        self._moment_seconds = FIRST_MOMENT_SECONDS
        # An attempt that was killed could not record its end.
        self._attempts = _mark_ended(_read_progress(self._path))
        self._command = own_command()
        # Space for the last words of a run that fills the disk.
        self._room = self._path.with_suffix(".room")
        with suppress(OSError):
            self._room.write_bytes(os.urandom(ROOM_BYTES))
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def observe(self, counts: Counts) -> None:
        """Show the progress of the run; called several times a second, first when tasks begin.

        The history keeps a moment at intervals. If there are too many, every other one is dropped and the interval
        doubles.
        """
        snapshot = self._take_snapshot(counts)
        self._display.update(snapshot)
        if not self._history or snapshot.seconds - self._history[-1].seconds >= self._moment_seconds:
            self._history.append(
                Moment(round(snapshot.seconds, 2), snapshot.num_text_bytes, snapshot.num_tokens, snapshot.memory_bytes)
            )
        if len(self._history) > MOST_MOMENTS:
            del self._history[1::2]
            self._moment_seconds *= 2
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._written = time.monotonic()
            self._write_attempts(completed=None)

    def _take_snapshot(self, counts: Counts) -> Snapshot:
        self._counts = counts
        work, slowest, now = counts.work, counts.slowest, time.monotonic()
        rates = self._pace.measure(counts, now)
        # Tasks may have started before the first call, while the parity gate was running.
        work_started = counts.work_started if counts.work_started is not None else now
        workers = []
        for name, worker in sorted(counts.workers.items()):
            seconds = now - worker.task_started if worker.task else 0.0
            workers.append(
                WorkerMoment(
                    name=name,
                    pid=worker.pid,
                    task=worker.task,
                    input=worker.input,
                    task_seconds=round(seconds, 2),
                    bytes_per_second=round(worker.num_bytes / max(worker.seconds + seconds, 1e-3)),
                )
            )
        machine = Machine(
            cores=self._cores,
            disk_free=self._disk_free,
            stages=work.shares,
            workers=workers,
            slowest_task=slowest.task,
            slowest_input=slowest.input,
            slowest_seconds=round(slowest.seconds, 2),
        )
        memory = sum(worker.memory_bytes for worker in counts.workers.values()) or self._memory
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory)
        self.snapshot = Snapshot(
            seconds=now - self._clock,
            startup_seconds=max(0.0, work_started - self._clock),
            total_bytes=counts.total_bytes,
            done_bytes=counts.done_bytes,
            resumed_bytes=counts.resumed_bytes,
            num_text_bytes=work.num_bytes,
            num_documents=work.num_documents,
            num_tokens=work.num_tokens,
            num_rejects=work.num_rejects,
            num_workers=counts.num_workers,
            num_tasks_done=counts.num_tasks_done,
            memory_bytes=memory,
            memory_limit=self._budget.memory_bytes,
            bottleneck=max(STAGES, key=lambda name: float(getattr(work, name))),
            input_rate=rates.input,
            text_rate=rates.text,
            token_rate=rates.tokens,
            machine=machine,
        )
        return self.snapshot

    def close(self, *, completed: bool, reason: str | None = None, counts: Counts | None = None) -> None:
        """End the attempt; `reason` is the error message if it ended early.

        `counts` is its progress if it ended before the first snapshot. A completed attempt that had nothing to do is
        recorded only if it is the first.
        """
        if self.snapshot is None and counts is not None and not (completed and self._attempts):
            self._take_snapshot(counts)
        if completed and self.snapshot is not None:
            # Some bytes may stay unread because of --limit, or after the last document of a stream.
            self._display.update(msgspec.structs.replace(self.snapshot, done_bytes=self.snapshot.total_bytes))
        self._reason = reason
        self._stop.set()
        self._sampler.join()
        self._display.close()
        self._write_attempts(completed=completed)
        self._push()

    def mark_failed(self, reason: str) -> None:
        """Record that the attempt failed after its tasks were done, while it finished the run."""
        self._reason = reason
        self._write_attempts(completed=False)
        self._push()

    def write_run_file(self, inputs: list[InputFile]) -> None:
        """Write run.json beside the manifest, or add this attempt to the file of another rank."""
        own = [*self._attempts, *self._current_attempt(completed=True)]
        known = {(a.rank, a.world_size, a.started) for a in own}
        others = [a for a in read_attempts(self._journal.store) if (a.rank, a.world_size, a.started) not in known]
        write_run_file(self._journal.store, [*others, *own], inputs)

    def _sample(self) -> None:
        """Sample memory, cores and disk, using less than a hundredth of a core."""
        process = psutil.Process()
        while True:
            # Measure CPU time, not wall time: on busy cores, sampling takes longer but costs no more.
            started = time.thread_time()
            with suppress(psutil.Error, OSError):
                self._memory = tree_memory(process)
                self._cores = [round(busy / 100, 2) for busy in psutil.cpu_percent(percpu=True)]
                self._disk_free = shutil.disk_usage(self._journal.store).free
            self.peak_memory_bytes = max(self.peak_memory_bytes, self._memory)
            if time.monotonic() - self._pushed > PUSH_SECONDS:
                self._push()
            if self._stop.wait(max(0.5, 100 * (time.thread_time() - started))):
                return

    def _current_attempt(self, *, completed: bool | None) -> list[AttemptInfo]:
        if self.snapshot is None or self._counts is None:
            return []
        attempt = AttemptInfo(
            pid=os.getpid(),
            started=self._started,
            completed=completed,
            peak_memory_bytes=self.peak_memory_bytes,
            num_recycled=self._counts.num_recycled,
            num_retried=self._counts.num_retried,
            last=self.snapshot,
            reason=self._reason,
            history=self._history,
            host=socket.gethostname(),
            heard=time.time(),
            rank=self._journal.share.rank,
            world_size=self._journal.share.world_size,
            command=self._command,
        )
        return [attempt]

    def _write_attempts(self, *, completed: bool | None) -> None:
        """Write `progress.json` if possible; a full disk must not hide the original error."""
        if completed is not None:
            self._room.unlink(missing_ok=True)
        with suppress(OSError):
            temporary = self._path.with_suffix(".json.tmp")
            temporary.write_bytes(msgspec.json.encode([*self._attempts, *self._current_attempt(completed=completed)]))
            temporary.replace(self._path)

    def _push(self) -> None:
        """Upload `progress.json` if the store is in a bucket; ignore errors, as the run does not need it."""
        self._pushed = time.monotonic()
        if self._journal.mirror is not None:
            with suppress(TokenmillError, OSError):
                self._journal.mirror.put_if_unfinished(f".tasks/{self._path.name}", self._path.read_bytes())


def read_attempts(store: Path) -> list[AttemptInfo]:
    """Read the attempts of all ranks at a run, sorted by start time."""
    ended = _read_run_file(store)
    if ended is not None:
        return ended.attempts
    found = [attempt for path in (store / ".tasks").glob("progress*.json") for attempt in _read_progress(path)]
    return sorted(found, key=lambda attempt: attempt.started)


def write_run_file(store: Path, attempts: list[AttemptInfo], inputs: list[InputFile]) -> None:
    """Write run.json beside the manifest, or replace the attempts in it; `machine` is the one that finished the run."""
    info = _read_run_file(store) or RunInfo(
        machine=describe_machine(),
        attempts=[],
        origins=sorted({file.origin for file in inputs if file.origin is not None}),
    )
    ended = sorted(_mark_ended(attempts), key=lambda attempt: attempt.started)
    write_durably(store / "run.json", encode_sealed(msgspec.structs.replace(info, attempts=ended)))


def _read_run_file(store: Path) -> RunInfo | None:
    """Read the run.json of a finished run; None while a run is unfinished, even if an earlier run left a file."""
    if not (store / ".tasks").is_dir():
        with suppress(OSError, StoreError):
            return decode_sealed(read_sealed(store / "run.json"), RunInfo, store / "run.json")
    return None


def _read_progress(path: Path) -> list[AttemptInfo]:
    """Read the attempts in a `progress.json`; an empty list if the file cannot be read."""
    try:
        return msgspec.json.decode(read_regular(path), type=list[AttemptInfo])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def _mark_ended(attempts: list[AttemptInfo]) -> list[AttemptInfo]:
    """Mark attempts that could not record their end as not completed: they were killed."""
    return [msgspec.structs.replace(attempt, completed=bool(attempt.completed)) for attempt in attempts]
