"""Which call runs next, and what to do when something happens to one: all cores stay busy until the plan is done.

Each task is a call, the largest first; so is the parity gate, and so is reading a stream, a large input that can only
be read front to back. The executor decides where calls run and retries those that are lost. Two things depend on it:

- Where its processes share our disk, one call reads a stream and hands on the text of each task in a spool file;
  elsewhere several calls read the stream, and each tokenizes a part of its tasks.
- Where they do, tasks run beside the parity gate. They wait on disk under temporary names, and are published here when
  it has passed. Elsewhere tasks start after the gate.

The gate and every task send texts with their ids, which `ParityCheck` compares with the reference in this process.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.errors import DataError, TokenmillError
from tokenmill.executors.base import Answer, Call, CallEvent, Executor, Lost, Note, Started
from tokenmill.pipeline.counts import Counts
from tokenmill.pipeline.journal.journal import Journal, TaskEntry
from tokenmill.pipeline.journal.resume import RunState
from tokenmill.pipeline.parity import Compared, ParityCheck, SampledText
from tokenmill.pipeline.plan.budget import Budget, Room
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.plan.tasks import Stream, Task
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.task.gate_sample import GateSample
from tokenmill.pipeline.task.output import publish_task
from tokenmill.pipeline.task.streams import create_spool, first_doubtful, reclaim_files, release_file
from tokenmill.pipeline.workers.gate import Gate
from tokenmill.pipeline.workers.item import NOTHING, Item
from tokenmill.pipeline.workers.messages import (
    CutStream,
    Failed,
    Report,
    RunGate,
    RunStream,
    RunTask,
    decode_answer,
    decode_note,
    encode,
)
from tokenmill.pipeline.workers.worker import RUN_CALL, share_job

__all__ = ["Scheduler"]

WAIT_SECONDS = 0.2
OBSERVE_SECONDS = 0.1
OBSERVE_SHARE = 0.05
"""A snapshot looks at every process, so it is taken at intervals and for at most this share of the time."""
GATE_WAIT_SECONDS = 0.01
"""While the gate, or the end of the run, waits for the reference."""
GATE = "the parity gate"
MOST_PARTS = 8
"""The most parts of a stream. Each part reads all of it, which takes a fifth of the time of tokenizing it."""
SEEN_SECONDS = 60.0
"""How long shared storage may take to show the files of another machine."""


@dataclass(eq=False)
class Scheduler:
    """Runs the tasks of a plan that are not done yet."""

    executor: Executor
    job: Job
    state: RunState
    journal: Journal
    request: Request
    budget: Budget
    gate: Gate
    parity_check: ParityCheck | None
    """None if the engine is the reference."""
    observe: Callable[[Counts], None]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._shares_disk = self.executor.shares_disk
        self._plan = self.state.part
        self._context = b""
        self._call_memory = self.budget.memory_bytes // self.budget.num_workers
        self._starts_early = not self.budget.gate_first and self._shares_disk and self.journal.mirror is None
        most = None if self.request.workers == "auto" else self.budget.num_workers
        self._room = None if self._shares_disk else Room(self.executor, self._call_memory, most, self.say)
        self.counts = self.state.counts()
        self._pending: list[tuple[tuple[int, ...], str, Item]] = []
        self._cuts: deque[Item] = deque()
        self._known_cuts: set[str] = set()
        self._streams: deque[Stream] = deque()
        self._damaged: list[tuple[Stream, list[int]]] = []
        """Streams that must be read again, with the numbers of their tasks."""
        self._items: dict[str, Item] = {}
        """Calls that the executor has."""
        self._num_readers = 0
        self._num_parts: Counter[int] = Counter()
        """For each stream, the calls that still read it; one of them may have to take back what it published."""
        self._next_snapshot = 0.0
        self._is_gate_open = False
        self._gate_sample: GateSample | None = None
        self._early: list[SampledText] = []
        """Documents of tasks that were found to differ before the gate was."""
        self._unpublished: list[tuple[TaskEntry, str]] = []
        self._latest: dict[str, Item] = {}
        """The call that each process started last."""
        self._entered: list[str] = []

    def run(self) -> None:
        """Finish the plan; return when every task is in the journal."""
        self._context = share_job(self.job)
        self._count_rejects(0)
        self._enqueue(*self.state.remaining())
        self._submit(Item(GATE, "", RunGate(self.gate.with_awkward)))
        while self._has_work() or (self.parity_check is not None and self.parity_check.num_open):
            self._read_damaged_again()
            self._fill()
            waits_for_reference = self._gate_sample is not None or not self._has_work()
            for event in self.executor.wait(GATE_WAIT_SECONDS if waits_for_reference else WAIT_SECONDS):
                self._on_event(event)
            for compared in self.parity_check.take() if self.parity_check is not None else ():
                self._on_compared(compared)
            if self._room is not None:
                self._room.check(self._items, is_busy=any(item.worker for item in self._items.values()))
            if self._is_gate_open and (now := time.monotonic()) > self._next_snapshot:
                self.observe(self.counts)
                self._next_snapshot = now + max(OBSERVE_SECONDS, (time.monotonic() - now) / OBSERVE_SHARE)
        if not self._shares_disk:
            self._wait_for_entries()
        self.observe(self.counts)

    def _has_work(self) -> bool:
        return bool(self._items or self._pending or self._cuts or self._streams or self._damaged)

    # Which call is next.

    def _enqueue(self, tasks: list[Task], streams: list[Stream]) -> None:
        plan = self._plan
        for stream in streams:
            self.journal.reopen_stream(stream.input)
        work: list[tuple[int, Task | Stream, Item]] = []
        for task in tasks:
            item = Item(task.name, plan.inputs[task.input].name, RunTask(task, False), task.bytes)
            work.append((plan.weigh(task), task, item))
        if self._shares_disk:
            self._streams.extend(streams)
            if streams:
                create_spool(self.journal.spool, self.budget.num_workers + 2)
        else:
            total = sum(weight for weight, _, _ in work) + sum(map(plan.weigh, streams))
            for stream in streams:
                work += self._divide(stream, total)
        for weight, piece, item in work:
            place = plan.place(piece)
            heapq.heappush(self._pending, (place if plan.order else (-weight, *place), item.name, item))

    def _divide(self, stream: Stream, total: int) -> list[tuple[int, Task | Stream, Item]]:
        """Divide a stream into as many parts as its share of the work is of the machines, so that none waits for it."""
        file, weight = self._plan.inputs[stream.input], self._plan.weigh(stream)
        share = round(weight * self.budget.num_workers / max(1, total))
        num_parts = max(1, min(MOST_PARTS, share, math.ceil(weight / self.job.settings.task_bytes)))
        self._num_parts[stream.input] = num_parts
        parts: list[tuple[int, Task | Stream, Item]] = []
        for part in range(num_parts):
            size = file.bytes * (part + 1) // num_parts - file.bytes * part // num_parts
            item = Item(f"{stream.name} part {part}", file.name, RunStream(stream, part, num_parts), size)
            parts.append((weight // num_parts, stream, item))
        return parts

    def _fill(self) -> None:
        """Submit as many calls as the executor should have, and start reading streams if processes would be idle."""
        if not self._is_gate_open and not self._starts_early:
            return
        limit = self.budget.num_workers if self._room is None else self._room.limit()
        # Readers of streams run beside the tasks.
        while len(self._items) - self._num_readers < limit and (self._cuts or self._pending):
            self._submit(self._next_item())
        is_idle = not self._cuts and not self._pending and len(self._items) - self._num_readers < limit
        if self._streams and (not self._num_readers or (is_idle and self._num_readers < limit)):
            stream = self._streams.popleft()
            self._num_readers += 1
            self._submit(Item(f"stream {stream.name}", self._plan.inputs[stream.input].name, CutStream(stream)))

    def _read_damaged_again(self) -> None:
        """Forget the tasks that may have text of a damaged frame, and read the stream again up to that frame.

        This waits until no task of the stream is being tokenized, or waits for the gate.
        """
        for stream, numbers in list(self._damaged):
            orders = [item.order for item in (*self._cuts, *self._items.values())]
            busy = {order.task.input for order in orders if isinstance(order, RunTask)}
            if stream.input in busy | {record.input for record, _ in self._unpublished}:
                continue
            assert stream.damage is not None
            first = first_doubtful(numbers, stream.damage, self.job.settings.task_bytes)
            for number in numbers:
                record = self.journal.record(stream.task_name(number)) if number >= first else None
                if record is not None:
                    self.journal.forget(record)
                    self._known_cuts.discard(record.name)
                    self.counts.num_tasks_done -= 1
                    self.counts.num_rejects -= sum(record.rejects.values())
            reclaim_files(self.journal.spool, stream.name, ())
            self._damaged.remove((stream, numbers))
            self._streams.append(stream)

    def _next_item(self) -> Item:
        """Take spooled text first, because it holds a file, unless a reader of the store waits for another task."""
        if self._cuts and self._pending and self._plan.order:
            cut = self._cuts[0].order
            assert isinstance(cut, RunTask)
            if self._pending[0][0] < self._plan.place(cut.task):
                return heapq.heappop(self._pending)[2]
        return self._cuts.popleft() if self._cuts else heapq.heappop(self._pending)[2]

    def _submit(self, item: Item) -> None:
        if isinstance(item.order, RunTask):
            item.order = RunTask(item.order.task, publish=self._is_gate_open)
        is_last = isinstance(item.order, CutStream)
        self._items[item.name] = item
        self.executor.submit(Call(item.name, RUN_CALL, self._context, encode(item.order), self._call_memory, is_last))

    # What happens to calls.

    def _on_event(self, event: CallEvent) -> None:
        item = self._items[event.call.name]
        if isinstance(event, Started):
            self._on_start(item, event)
        elif isinstance(event, Note):
            message = decode_note(event.data)
            if isinstance(message, Report):
                self._count(item, message)
            else:
                self._add_cut(message.task)
        elif isinstance(event, Answer):
            self._on_answer(item, event.data)
        else:
            self._on_loss(item, event)

    def _on_start(self, item: Item, event: Started) -> None:
        if event.lost is not None:
            self._take_back(item)
            self.counts.num_retried += 1
            self.say(f"{item.description} {event.lost}; trying it again")
        item.worker = event.place.name or str(event.place)
        if isinstance(item.order, (RunTask, RunStream)):
            self._latest[item.worker] = item
            self.counts.start_task(item.worker, event.place.pid, item.name, item.input)

    def _take_back(self, item: Item) -> None:
        """Uncount what a lost attempt had not published, and forget its process."""
        self.counts.workers.pop(item.worker or "", None)
        if isinstance(item.order, RunTask):
            self.counts.done_bytes -= item.credit
            self.counts.num_rejects -= item.report.work.num_rejects
            item.credit = 0
        elif isinstance(item.order, CutStream):
            orders = [other.order for other in (*self._cuts, *self._items.values())]
            in_use = {order.task.spool for order in orders if isinstance(order, RunTask)}
            reclaim_files(self.journal.spool, item.order.stream.name, in_use)
        item.num_tasks += item.report.num_tasks
        item.worker, item.report = None, NOTHING

    def _add_cut(self, task: Task) -> None:
        """Queue a task of a stream, unless an earlier reader of the stream has already delivered it."""
        assert task.spool is not None
        if task.name in self._known_cuts:
            release_file(Path(task.spool))
            return
        self._known_cuts.add(task.name)
        name = self._plan.inputs[task.input].name
        self._cuts.append(Item(task.name, name, RunTask(task, publish=False), task.bytes))

    def _count(self, item: Item, report: Report) -> None:
        """Count what is new in a report; a call never counts for more than its size."""
        counts, before = self.counts, item.report
        work = report.work.since(before.work)
        counts.add_work(work)
        counts.num_recycled += report.num_recycled - before.num_recycled
        counts.num_tasks_done += report.num_tasks - before.num_tasks
        credit = min(report.disk_bytes - before.disk_bytes, item.disk_bytes - item.credit)
        item.credit += credit
        counts.done_bytes += credit
        item.report = report
        known = counts.workers.get(item.worker or "")
        if known is not None and self._latest.get(item.worker or "") is item:
            known.num_bytes += work.num_bytes
            known.task = report.task or known.task
            known.memory_bytes = 0 if self._shares_disk else report.memory_bytes
        self._count_rejects(work.num_rejects)

    def _count_rejects(self, count: int) -> None:
        self.counts.num_rejects += count
        most = self.request.max_errors
        if most is not None and self.counts.num_rejects > most:
            raise TokenmillError(
                f"{self.counts.num_rejects} records could not be tokenized, more than --max-errors {most}; "
                "see the reasons with --on-error fail, or raise the limit and run the same command again"
            )

    def _on_answer(self, item: Item, data: bytes) -> None:
        message = decode_answer(data)
        if isinstance(message, Failed):
            error = message.to_error()
            if isinstance(error, DataError):
                # Name the file by its path on this machine.
                error = type(error)(error.path.removeprefix(f"{Path.cwd()}/"), error.reason, error.place)
            raise error
        del self._items[item.name]
        if isinstance(message, GateSample):
            if self.parity_check is None:
                self._open_gate(message, Compared(GATE))
            else:
                self._gate_sample = message
                self.parity_check.submit(GATE, [*message.awkward, *message.texts])
            return
        for record in message.records:
            if self.parity_check is not None and record.sample:
                self.parity_check.submit(record.name, record.sample)
        self._count(item, message.report)
        self.counts.done_bytes += item.disk_bytes - item.credit
        if item.worker is not None and self._latest.get(item.worker) is item:
            # Otherwise the process has already started its next call.
            self.counts.end_task(item.worker)
        if message.mark is not None:
            self._publish(message.records[0], message.mark)
        elif not self._shares_disk:
            for record in message.records:
                self.journal.receive(record)
                self._entered.append(record.name)
        if isinstance(item.order, RunTask):
            if item.order.task.spool is not None:
                release_file(Path(item.order.task.spool))
        elif isinstance(item.order, (CutStream, RunStream)):
            self._num_readers -= isinstance(item.order, CutStream)
            number = item.order.stream.input
            self._num_parts[number] -= isinstance(item.order, RunStream)
            if message.damage is not None:
                stream = msgspec.structs.replace(item.order.stream, damage=message.damage)
                self._damaged.append((stream, message.numbers))
                return
            if not self._num_parts[number]:
                self.journal.end_stream(number, message.numbers, self._plan.inputs[number].stamp)

    def _on_compared(self, compared: Compared) -> None:
        """Open the gate, or raise if a document of a task has other ids than the reference gives it."""
        if compared.name == GATE:
            assert self._gate_sample is not None
            self._open_gate(self._gate_sample, compared)
        elif self._is_gate_open and compared.differing:
            raise self.gate.refuse(compared)
        else:
            # Nothing is published yet, so the gate can still choose the reference for everything.
            self._early += compared.differing

    def _open_gate(self, sample: GateSample, compared: Compared) -> None:
        """Publish what was made beside the gate; it raises if the engine differs from its reference."""
        compared.differing += self._early
        self.gate.passed(sample, compared)
        self._gate_sample, self._is_gate_open = None, True
        for record, mark in self._unpublished:
            self._publish(record, mark)
        self._unpublished = []

    def _publish(self, record: TaskEntry, mark: str) -> None:
        """Publish a task that was started beside the gate, now or when the gate has passed."""
        if not self._is_gate_open:
            self._unpublished.append((record, mark))
            return
        publish_task(self.journal, record, mark)
        self.counts.num_tasks_done += 1

    def _on_loss(self, item: Item, event: Lost) -> None:
        """Resume a stream that made progress between two losses; otherwise raise, as the call may kill its process."""
        self._take_back(item)
        if isinstance(item.order, RunStream) and item.num_tasks:
            item.num_tasks = 0
            self.say(f"{item.description} {event.how}; resuming after its last finished task")
            self._submit(item)
            return
        raise TokenmillError(
            f"{item.description} {event.how}; {event.remedy} and run the same command again to continue"
        )

    def _wait_for_entries(self) -> None:
        """Wait until this machine sees the entries that other machines wrote to the journal."""
        if self.journal.mirror is not None:
            # Calls that were lost may have entered tasks, too.
            self.journal.mirror.pull(self.journal.store)
            return
        deadline = time.monotonic() + SEEN_SECONDS
        while not set(self._entered) <= set(self.journal.names()) and time.monotonic() < deadline:
            time.sleep(0.5)
