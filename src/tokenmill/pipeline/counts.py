"""How much work was done, and where its time went: what progress bars and `tokenmill status` show."""

from __future__ import annotations

import time

import msgspec

__all__ = ["STAGES", "Counts", "Stages", "TaskTime", "WorkerCounts"]

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
    def shares(self) -> dict[str, float]:
        """The part of all time that each stage took."""
        total = sum(float(getattr(self, name)) for name in STAGES) or 1.0
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
    started: float | None = None
    """When the first task started, on the monotonic clock."""
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

    def start_task(self, worker: str, pid: int, task: str, input: str) -> None:
        """Note that a worker has started a task."""
        now = time.monotonic()
        self.started = self.started or now
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
