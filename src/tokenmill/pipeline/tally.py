"""How far a run has come: what is counted while tasks are done, whoever does them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from tokenmill.errors import TokenmillError
from tokenmill.pipeline.journal import TaskRecord
from tokenmill.pipeline.plan import Plan, Stream, Task
from tokenmill.pipeline.stages import Stages

__all__ = ["Tally", "TaskTime", "WorkerTally"]


class WorkerTally(msgspec.Struct):
    """What one worker is at, and what it has done so far."""

    pid: int
    task: str
    input: str
    task_started: float
    seconds: float = 0.0
    """That it has worked, without the task it is at."""
    num_bytes: int = 0


class TaskTime(msgspec.Struct, frozen=True):
    """How long a task took."""

    task: str
    input: str
    seconds: float


class Tally(msgspec.Struct):
    """What progress bars and `status` show."""

    total_bytes: int
    """Size of the inputs on disk."""
    max_errors: int | None = None
    started: float | None = None
    """When the first task was begun, on the monotonic clock."""
    done_bytes: int = 0
    resumed_bytes: int = 0
    """Of these, what earlier attempts had finished."""
    work: Stages = msgspec.field(default_factory=Stages)
    num_workers: int = 0
    num_feeders: int = 0
    num_tasks_done: int = 0
    num_recycled: int = 0
    num_retried: int = 0
    num_rejects: int = 0
    """Those of earlier attempts included."""
    memory_bytes: int | None = None
    """What all processes take, where they are on several machines."""
    workers: dict[str, WorkerTally] = msgspec.field(default_factory=dict)
    """By name; those that have a task."""
    slowest: TaskTime | None = None
    """Of the tasks that are done."""

    @classmethod
    def of(cls, plan: Plan, max_errors: int | None) -> Tally:
        """That of a plan of which nothing is done."""
        streamed = sum(plan.inputs[stream.input].bytes for stream in plan.streams)
        return cls(sum(task.bytes for task in plan.tasks) + streamed, max_errors)

    def resume(
        self, plan: Plan, done: Mapping[str, TaskRecord], ended_streams: Mapping[int, list[int]]
    ) -> tuple[list[Task], list[Stream]]:
        """Count what earlier attempts did of a plan, and give what they left."""
        tasks = [task for task in plan.tasks if task.name not in done]
        streams = [stream for stream in plan.streams if not _is_done(stream, done, ended_streams)]
        left = sum(task.bytes for task in tasks) + sum(plan.inputs[stream.input].bytes for stream in streams)
        self.done_bytes = self.resumed_bytes = self.total_bytes - left
        self.num_tasks_done = len(done)
        self.count_rejects(sum(sum(record.rejects.values()) for record in done.values()))
        return tasks, sorted(streams, key=plan.place)

    def begin(self, name: str, pid: int, task: str, input: str) -> None:
        """A worker has taken a task."""
        now = time.monotonic()
        self.started = self.started or now
        known = self.workers.setdefault(name, WorkerTally(pid, task, input, now))
        known.task, known.input, known.task_started = task, input, now

    def end(self, name: str) -> None:
        """A worker has finished its task."""
        known = self.workers[name]
        taken = TaskTime(known.task, known.input, time.monotonic() - known.task_started)
        known.seconds += taken.seconds
        known.task = ""
        if self.slowest is None or taken.seconds > self.slowest.seconds:
            self.slowest = taken

    def count_rejects(self, count: int) -> None:
        """Stop when there are more than the user allows."""
        self.num_rejects += count
        if self.max_errors is not None and self.num_rejects > self.max_errors:
            raise TokenmillError(
                f"{self.num_rejects} records could not be tokenized, more than --max-errors {self.max_errors}; "
                "see the reasons with --on-error fail, or raise the limit and run the same command again"
            )


def _is_done(stream: Stream, done: Mapping[str, TaskRecord], ended_streams: Mapping[int, list[int]]) -> bool:
    numbers = ended_streams.get(stream.input)
    return numbers is not None and all(stream.task_name(number) in done for number in numbers)
