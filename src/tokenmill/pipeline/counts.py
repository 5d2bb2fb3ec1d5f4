"""How much work was done, and where its time went: what progress bars and `tokenmill status` show."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import msgspec

__all__ = ["STAGES", "Counts", "Pace", "Rates", "Stages", "TaskTime", "WorkerCounts"]

STAGES = ("read", "decompress", "parse", "encode", "write")


class Stages(msgspec.Struct):
    """Counts of finished work and the seconds that each stage took."""

    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    read: float = 0.0
    decompress: float = 0.0
    parse: float = 0.0
    encode: float = 0.0
    write: float = 0.0

    def add(self, other: Stages) -> None:
        """Add the counts of another piece of work."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, earlier: Stages) -> Stages:
        """Return what was added since an earlier count."""
        return Stages(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))

    @property
    def seconds(self) -> float:
        """The time that all stages took together."""
        return sum(float(getattr(self, name)) for name in STAGES)

    @property
    def shares(self) -> dict[str, float]:
        """The part of all time that each stage took."""
        total = self.seconds or 1.0
        return {name: round(getattr(self, name) / total, 4) for name in STAGES}


class WorkerCounts(msgspec.Struct):
    """What one worker is doing, and what it has done so far."""

    pid: int
    task: str
    input: str
    task_started: float
    seconds: float = 0.0
    """Time spent on finished tasks."""
    num_bytes: int = 0
    memory_bytes: int = 0
    """The memory of a process on another machine; that of processes on this machine is measured here."""


class TaskTime(msgspec.Struct, frozen=True):
    """How long a task took."""

    task: str = ""
    input: str = ""
    seconds: float = 0.0


class Counts(msgspec.Struct):
    """The progress of a run, including earlier attempts."""

    total_bytes: int
    """Size of the inputs on disk."""
    done_bytes: int = 0
    resumed_bytes: int = 0
    """Of the done bytes, those that earlier attempts had finished."""
    num_tasks_done: int = 0
    num_rejects: int = 0
    work_started: float | None = None
    """When the first text was read, on the monotonic clock; None before that."""
    work: Stages = msgspec.field(default_factory=Stages)
    num_recycled: int = 0
    num_retried: int = 0
    workers: dict[str, WorkerCounts] = msgspec.field(default_factory=dict)
    """The workers that have had a task, by name."""
    slowest: TaskTime = TaskTime()
    """The slowest finished task; 0 seconds before the first one has finished."""

    @property
    def num_workers(self) -> int:
        """The number of workers that have a task now."""
        return sum(worker.task != "" for worker in self.workers.values())

    def add_work(self, work: Stages) -> None:
        """Add what a process has done since its last report."""
        if self.work_started is None and work.num_bytes:
            self.work_started = time.monotonic() - work.seconds
        self.work.add(work)

    def start_task(self, worker: str, pid: int, task: str, input: str) -> None:
        """Note that a worker has started a task."""
        now = time.monotonic()
        known = self.workers.setdefault(worker, WorkerCounts(pid, task, input, now))
        known.task, known.input, known.task_started = task, input, now

    def end_task(self, worker: str) -> None:
        """Note that a worker has finished its task."""
        known = self.workers[worker]
        taken = TaskTime(known.task, known.input, time.monotonic() - known.task_started)
        known.seconds += taken.seconds
        known.task = ""
        if taken.seconds > self.slowest.seconds:
            self.slowest = taken


class Rates(NamedTuple):
    """Bytes of inputs, bytes of text, and tokens per second."""

    input: float = 0.0
    text: float = 0.0
    tokens: float = 0.0


class Pace:
    """The rates of the last seconds of work; where nothing was reported in them, since the last progress before."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int, int]] = deque()

    def measure(self, counts: Counts, now: float) -> Rates:
        """Take note of the progress, and return the rates up to now. Start-up and earlier attempts do not count."""
        if counts.work_started is None:
            return Rates()
        if not self._marks:
            self._marks.append((counts.work_started, counts.resumed_bytes, 0, 0))
        reached = (counts.done_bytes, counts.work.num_bytes, counts.work.num_tokens)
        if reached != self._marks[-1][1:]:
            self._marks.append((now, *reached))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self.SECONDS and self._marks[1][1:] != reached:
            self._marks.popleft()
        since, *before = self._marks[0]
        seconds = max(now - since, 1e-3)
        return Rates(*(max(0.0, (after - first) / seconds) for after, first in zip(reached, before, strict=True)))
