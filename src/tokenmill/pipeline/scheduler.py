"""Who does what, when: hands tasks to workers, largest first, and keeps every core busy.

Plain files and Parquet are tasks from the start. A large compressed input is read by a
*feeder*, which decompresses it into *slots*, files of one task each that workers take over; so
one compressed file occupies all cores, and memory and disk in between are bounded by the
number of slots. A worker that dies is named and its task is tried once more.

The parity gate is held beside the first tasks where memory allows; workers hold these back, finished
but without names, until it has passed, and wait: what is not published yet would be lost with a kill.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from tokenmill.errors import TokenmillError
from tokenmill.executors.base import Death, Executor, Worker
from tokenmill.pipeline.journal import Journal, TaskRecord
from tokenmill.pipeline.messages import (
    WORKER,
    Cut,
    Done,
    Failed,
    FeedStream,
    FromWorker,
    GateResult,
    Held,
    MayPublish,
    NeedSlot,
    Progress,
    RunGate,
    RunTask,
    Slot,
    StreamEnded,
    decode_from_worker,
    encode,
)
from tokenmill.pipeline.plan import Plan, Stream, Task
from tokenmill.pipeline.tally import Tally
from tokenmill.pipeline.task import Job

__all__ = ["Scheduler"]

WAIT_SECONDS = 0.2
SERVE = f"{WORKER}:serve"


class Scheduler:
    """Runs the tasks of a plan that are not done yet on an executor's workers."""

    def __init__(
        self,
        executor: Executor,
        job: Job,
        plan: Plan,
        journal: Journal,
        *,
        num_workers: int,
        gate_passed: Callable[[GateResult], None],
        gate_beside_tasks: bool = False,
        max_errors: int | None = None,
        pins: Sequence[int] = (),
        observe: Callable[[Tally], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._executor = executor
        self._job = job
        self._payload = msgspec.msgpack.encode(msgspec.structs.replace(job, profile=None))
        self._pins = list(pins)
        self._plan = plan
        self._journal = journal
        self._num_workers = num_workers
        self._gate: Worker | None = None
        self._gate_passed = gate_passed
        self._gate_beside_tasks = gate_beside_tasks
        self._held: dict[Worker, Task] = {}
        self._observe = observe
        self._say = say
        self.tally = Tally.of(plan, max_errors)
        self._pending: list[tuple[tuple[int, ...], str, Task]] = []
        self._spooled: deque[Task] = deque()
        self._streams: deque[Stream] = deque()
        self._idle: list[Worker] = []
        self._running: dict[Worker, Task] = {}
        self._feeding: dict[Worker, Stream] = {}
        self._held_slot: dict[Worker, str] = {}
        self._hungry: deque[Worker] = deque()
        self._free_slots = [str(journal.slot(i)) for i in range(num_workers + 2)]
        self._attempts: dict[str, int] = {}
        self._done: dict[str, TaskRecord] = {}
        self._partial: dict[Worker, int] = {}
        self._num_launched = self._num_workers_launched = 0

    def run(self, done: dict[str, TaskRecord], ended_streams: dict[int, list[int]]) -> None:
        """Finish the plan, given what earlier attempts did; returns when every task is in the journal."""
        self._take_stock(done, ended_streams)
        self._start_gate()
        while self._unfinished():
            if self._gate is None or self._gate_beside_tasks:
                self._employ()
            for event in self._executor.wait(WAIT_SECONDS):
                if isinstance(event, Death):
                    self._bury(event.worker, event.how)
                else:
                    self._hear(event.worker, decode_from_worker(event.data))
            if self._gate is None:
                self._observe(self.tally)
        self._observe(self.tally)

    def _start_gate(self) -> None:
        """Hold the parity gate in a process of its own, whose memory goes with it."""
        self._gate = self._executor.launch("the parity gate", SERVE, self._payload)
        self._gate.send(encode(RunGate()))

    def _open_gate(self, result: GateResult) -> None:
        """Let workers publish, unless the run has something against it."""
        self._gate_passed(result)
        if self._gate is not None:
            self._gate.kill()
            self._gate = None
        for worker in {**self._held, **self._running}:
            worker.send(encode(MayPublish()))

    def _take_stock(self, done: dict[str, TaskRecord], ended_streams: dict[int, list[int]]) -> None:
        self._done = dict(done)
        tasks, streams = self.tally.resume(self._plan, done, ended_streams)
        for task in tasks:
            self._put(task)
        self._streams.extend(streams)

    def _unfinished(self) -> bool:
        waiting = self._gate or self._pending or self._spooled or self._streams
        return bool(waiting or self._running or self._held or self._feeding)

    def _employ(self) -> None:
        """Give every idle worker a task, and start feeders while workers would starve."""
        while len(self._running) + len(self._held) < self._num_workers and (self._spooled or self._pending):
            self._assign(self._idle.pop() if self._idle else self._launch("worker"))
        starving = not self._spooled and not self._pending and len(self._running) < self._num_workers
        if self._streams and (not self._feeding or (starving and len(self._feeding) < self._num_workers)):
            self._feed(self._launch("feeder"), self._streams.popleft())
        while self._hungry and self._free_slots:
            self._grant(self._hungry.popleft())
        self.tally.num_workers, self.tally.num_feeders = len(self._running), len(self._feeding)

    def _launch(self, role: str) -> Worker:
        self._num_launched += 1
        if role != "worker":
            return self._executor.launch(f"{role} {self._num_launched}", SERVE, self._payload)
        self._num_workers_launched += 1
        is_first = self._num_workers_launched == 1
        payload = msgspec.msgpack.encode(self._job) if is_first else self._payload
        worker = self._executor.launch(f"{role} {self._num_launched}", SERVE, payload)
        if self._pins:
            with suppress(OSError):
                os.sched_setaffinity(worker.pid, {self._pins[(self._num_workers_launched - 1) % len(self._pins)]})
        return worker

    def _assign(self, worker: Worker) -> None:
        task = self._next_task()
        self._running[worker] = task
        self._partial[worker] = 0
        self.tally.begin(worker.name, worker.pid, task.name, self._plan.inputs[task.input].name)
        worker.send(encode(RunTask(task, hold=self._gate is not None)))

    def _next_task(self) -> Task:
        """Spooled text first, because it holds a slot, unless somebody waits for another task."""
        if self._spooled and self._pending and self._plan.order:
            first = self._pending[0][0] < self._plan.place(self._spooled[0])
            return heapq.heappop(self._pending)[2] if first else self._spooled.popleft()
        return self._spooled.popleft() if self._spooled else heapq.heappop(self._pending)[2]

    def _feed(self, worker: Worker, stream: Stream) -> None:
        self._feeding[worker] = stream
        finished = [record.number for record in self._done.values() if record.input == stream.input]
        tasks = (*self._running.values(), *self._held.values(), *self._spooled)
        under_way = [task.number for task in tasks if task.input == stream.input]
        worker.send(encode(FeedStream(stream, finished + under_way)))

    def _grant(self, worker: Worker) -> None:
        slot = self._free_slots.pop()
        self._held_slot[worker] = slot
        worker.send(encode(Slot(slot)))

    def _hear(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Progress):
            self._count(worker, message)
        elif isinstance(message, GateResult):
            self._open_gate(message)
        elif isinstance(message, Held):
            self._hold(worker)
        elif isinstance(message, Done):
            self._finish(worker, message.record)
        elif isinstance(message, NeedSlot):
            self._hungry.append(worker)
        elif isinstance(message, Cut):
            self._held_slot.pop(worker)
            self._spooled.append(message.task)
        elif isinstance(message, StreamEnded):
            file = self._plan.inputs[message.stream.input]
            self._journal.end_stream(message.stream.input, message.numbers, file.stamp)
            del self._feeding[worker]
            self._next_stream(worker)
        elif isinstance(message, Failed):
            raise message.to_error()

    def _next_stream(self, worker: Worker) -> None:
        if self._streams:
            self._feed(worker, self._streams.popleft())
        else:
            # Kept as an idle worker it could grow a cache beside those of the workers, outside the budget.
            worker.kill()

    def _count(self, worker: Worker, message: Progress) -> None:
        """Progress is counted in input bytes on disk; a task never counts for more than its size."""
        self.tally.work.add(message.stages)
        self.tally.num_recycled += message.num_recycled
        self.tally.count_rejects(message.stages.num_rejects)
        task = self._running.get(worker)
        if task is None:
            return
        size = message.stages.num_bytes
        self.tally.workers[worker.name].num_bytes += size
        if task.spool is not None:
            span = task.spans[0]
            size = size * task.bytes // max(1, (span.stop or 0) - span.start)
        credit = min(size, task.bytes - self._partial[worker])
        self._partial[worker] += credit
        self.tally.done_bytes += credit

    def _hold(self, worker: Worker) -> None:
        """The task is done but for its name; it keeps its slot, in case the worker dies."""
        self._held[worker] = self._end_task(worker)

    def _finish(self, worker: Worker, record: TaskRecord) -> None:
        task = self._held.pop(worker) if worker in self._held else self._end_task(worker)
        self._done[record.name] = record
        self.tally.num_tasks_done += 1
        if task.spool is not None:
            self._free_slots.append(task.spool)
        self._idle.append(worker)

    def _end_task(self, worker: Worker) -> Task:
        task = self._running.pop(worker)
        self.tally.end(worker.name)
        self.tally.done_bytes += task.bytes - self._partial.pop(worker)
        return task

    def _bury(self, worker: Worker, how: str) -> None:
        """Name a dead worker and give its work to another, once."""
        self.tally.workers.pop(worker.name, None)
        if worker in self._idle:
            self._idle.remove(worker)
        if worker in self._hungry:
            self._hungry.remove(worker)
        if worker in self._held:
            task = self._held.pop(worker)
            self.tally.done_bytes -= task.bytes
            self._retry(worker, how, f"task {task.name} of {self._plan.inputs[task.input].name}", task.name)
            self._put_back(task)
        if worker is self._gate:
            self._retry(worker, how, "comparing the engine with its reference", "gate")
            self._start_gate()
        elif worker in self._feeding:
            stream = self._feeding.pop(worker)
            if worker in self._held_slot:
                self._free_slots.append(self._held_slot.pop(worker))
            self._retry(worker, how, f"reading {self._plan.inputs[stream.input].name}", f"stream {stream.input}")
            self._streams.appendleft(stream)
        elif worker in self._running:
            task = self._running.pop(worker)
            self.tally.done_bytes -= self._partial.pop(worker)
            self._retry(worker, how, f"task {task.name} of {self._plan.inputs[task.input].name}", task.name)
            self._put_back(task)

    def _put_back(self, task: Task) -> None:
        if task.spool is not None:
            self._spooled.appendleft(task)
        else:
            self._put(task)

    def _put(self, task: Task) -> None:
        heapq.heappush(self._pending, (self._plan.place(task), task.name, task))

    def _retry(self, worker: Worker, how: str, what: str, key: str) -> None:
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] > 1:
            raise TokenmillError(
                f"{worker.name} (process {worker.pid}) {how} at {what}, which had already killed a worker before; "
                "give it more memory (--memory, fewer --workers) and run the same command again"
            )
        self.tally.num_retried += 1
        self._say(f"{worker.name} (process {worker.pid}) {how} at {what}; trying it again")
        time.sleep(0.05)
