"""Watching a run: the display, `progress.json` for `tokenmill status`, and `run.json` at the end.

How a run went (speed, memory, machine) is kept apart from the manifest, which must be equal
for equal inputs.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tokenmill.files import write_durably
from tokenmill.machine import tree_memory, usable_cores
from tokenmill.pipeline.budget import Budget
from tokenmill.pipeline.scheduler import Tally, WorkerTally
from tokenmill.progress import Display, Machine, Snapshot, WorkerMoment
from tokenmill.store.manifest import encode_sealed

__all__ = ["AttemptInfo", "Moment", "Observer", "RunInfo"]

WRITE_SECONDS = 1.0
MOST_MOMENTS = 400
FIRST_MOMENT_SECONDS = 0.5


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """How far an attempt was after some seconds."""

    seconds: float
    num_text_bytes: int
    num_tokens: int
    memory_bytes: int


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a run, finished or not."""

    pid: int
    started: float
    completed: bool | None
    """None while it runs."""
    peak_memory_bytes: int
    num_recycled: int
    num_retried: int
    last: Snapshot
    reason: str | None = None
    """Why it ended early, in words; None where it did not, or was killed and could not say."""
    history: list[Moment] = []
    """At most a few hundred moments, evenly spread over the attempt."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: how the run went."""

    checksum: str = ""
    machine: dict[str, Any]
    attempts: list[AttemptInfo]


class Observer:
    """Turns tallies into snapshots for people and programs."""

    def __init__(self, store: Path, display: Display, budget: Budget) -> None:
        self._store = store
        self._display = display
        self._budget = budget
        self._started = time.time()
        self._clock: float | None = None
        self._written = 0.0
        self._peak = 0
        self._memory = 0
        self._cores: list[float] = []
        self._disk_free = 0
        self._tally: Tally | None = None
        self._snapshot: Snapshot | None = None
        self._reason: str | None = None
        self._history: list[Moment] = []
        self._moment_seconds = FIRST_MOMENT_SECONDS
        self._attempts = self._earlier_attempts()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def snapshot(self) -> Snapshot | None:
        """The last moment that was observed."""
        return self._snapshot

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory the process tree was seen to take."""
        return self._peak

    def observe(self, tally: Tally) -> None:
        """Take note of how far the run is; called several times a second, first when tasks begin."""
        if self._clock is None:
            # Tasks may have begun before anything was shown, while the parity gate was held.
            self._clock = tally.started if tally.started is not None else time.monotonic()
        self._tally = tally
        work = tally.work
        self._snapshot = Snapshot(
            seconds=time.monotonic() - self._clock,
            total_bytes=tally.total_bytes,
            done_bytes=tally.done_bytes,
            resumed_bytes=tally.resumed_bytes,
            num_text_bytes=work.num_bytes,
            num_documents=work.num_documents,
            num_tokens=work.num_tokens,
            num_rejects=work.num_rejects,
            num_workers=tally.num_workers,
            num_tasks_done=tally.num_tasks_done,
            memory_bytes=self._memory,
            memory_limit=self._budget.memory_bytes,
            bottleneck=work.bottleneck,
            machine=self._look_at_machine(tally),
        )
        self._display.update(self._snapshot)
        self._remember(self._snapshot)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._written = time.monotonic()
            self._write_attempts(completed=None)

    def _look_at_machine(self, tally: Tally) -> Machine:
        slowest = tally.slowest
        return Machine(
            cores=self._cores,
            disk_free=self._disk_free,
            stages=tally.work.shares,
            workers=[_describe_worker(name, worker) for name, worker in sorted(tally.workers.items())],
            slowest_task=slowest.task if slowest is not None else "",
            slowest_input=slowest.input if slowest is not None else "",
            slowest_seconds=round(slowest.seconds, 2) if slowest is not None else 0.0,
        )

    def _remember(self, now: Snapshot) -> None:
        """Keep a moment now and then; every other one is dropped when there are too many."""
        if self._history and now.seconds - self._history[-1].seconds < self._moment_seconds:
            return
        self._history.append(Moment(round(now.seconds, 2), now.num_text_bytes, now.num_tokens, now.memory_bytes))
        if len(self._history) > MOST_MOMENTS:
            del self._history[1::2]
            self._moment_seconds *= 2

    def close(self, *, completed: bool, reason: str | None = None) -> None:
        """The attempt has ended; `reason` is what the user is told when it ended early."""
        self._reason = reason
        self._stop.set()
        self._sampler.join()
        self._display.close()
        self._write_attempts(completed=completed)

    def write_run_file(self) -> None:
        """Write run.json beside the manifest."""
        info = RunInfo(
            machine={
                "system": platform.platform(),
                "processor": _processor(),
                "cores": usable_cores(),
                "memory_bytes": int(psutil.virtual_memory().total),
                "python": platform.python_version(),
            },
            attempts=[*self._attempts, *self._current(completed=True)],
        )
        write_durably(self._store / "run.json", encode_sealed(info))

    def _sample(self) -> None:
        """Look at memory, cores and disk, as often as that takes less than a hundredth of a core."""
        process = psutil.Process()
        while True:
            started = time.perf_counter()
            with suppress(psutil.Error, OSError):
                self._memory = tree_memory(process)
                self._cores = [round(busy / 100, 2) for busy in psutil.cpu_percent(percpu=True)]
                self._disk_free = shutil.disk_usage(self._store).free
            self._peak = max(self._peak, self._memory)
            if self._stop.wait(max(0.5, 100 * (time.perf_counter() - started))):
                return

    def _current(self, *, completed: bool | None) -> list[AttemptInfo]:
        if self._snapshot is None or self._tally is None:
            return []
        attempt = AttemptInfo(
            pid=os.getpid(),
            started=self._started,
            completed=completed,
            peak_memory_bytes=self._peak,
            num_recycled=self._tally.num_recycled,
            num_retried=self._tally.num_retried,
            last=self._snapshot,
            reason=self._reason,
            history=self._history,
        )
        return [attempt]

    def _write_attempts(self, *, completed: bool | None) -> None:
        """Best effort: a full disk must not hide the error that matters."""
        path = self._store / ".tasks" / "progress.json"
        with suppress(OSError):
            temporary = path.with_suffix(".json.tmp")
            temporary.write_bytes(msgspec.json.encode([*self._attempts, *self._current(completed=completed)]))
            temporary.replace(path)

    def _earlier_attempts(self) -> list[AttemptInfo]:
        try:
            data = (self._store / ".tasks" / "progress.json").read_bytes()
            earlier = msgspec.json.decode(data, type=list[AttemptInfo])
        except (OSError, msgspec.MsgspecError):
            return []
        return [
            attempt if attempt.completed else msgspec.structs.replace(attempt, completed=False) for attempt in earlier
        ]


def _describe_worker(name: str, worker: WorkerTally) -> WorkerMoment:
    now = time.monotonic() - worker.task_started if worker.task else 0.0
    return WorkerMoment(
        name=name,
        pid=worker.pid,
        task=worker.task,
        input=worker.input,
        task_seconds=round(now, 2),
        bytes_per_second=round(worker.num_bytes / max(worker.seconds + now, 1e-3)),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
