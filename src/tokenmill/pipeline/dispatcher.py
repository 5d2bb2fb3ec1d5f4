"""Who does what on a cluster: every task, and every part of a stream, is a call, the largest first.

The cluster decides where a call runs and runs it again when it is lost; what is done is in the journal, which
calls write themselves. So nothing is kept here that a run which is killed could lose. Nothing is published
before the parity gate has passed, which is a call too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.errors import DataError, TokenmillError
from tokenmill.executors.base import Answer, Begun, Call, CallEvent, Cluster, Loss, Note, Place
from tokenmill.pipeline.budget import Budget
from tokenmill.pipeline.calls import ANSWER, Finished, Order, Report, RunStream, decode_answer, decode_report
from tokenmill.pipeline.journal import Journal, TaskRecord
from tokenmill.pipeline.messages import Failed, GateResult, RunGate, RunTask
from tokenmill.pipeline.plan import Plan, Stream, Task
from tokenmill.pipeline.posting import post_job
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.tally import Tally
from tokenmill.pipeline.task import Job
from tokenmill.progress import format_bytes

__all__ = ["Dispatcher"]

WAIT_SECONDS = 0.2
MOST_PARTS = 8
"""Of a stream: each part reads all of it, which takes a fifth of the time that tokenizing all of it does."""
LEAST_IN_FLIGHT = 8
"""A cluster that grows with what is asked of it has to be asked."""
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
GIVE_UP_SECONDS = 600.0
SEEN_SECONDS = 60.0
"""How long shared storage may take to show what another machine has written."""
NOTHING = Report("", 0, 0, Stages(), 0, 0)


class _Item:
    """A call as the run sees it: what it is for, and how much of it is counted already."""

    def __init__(self, name: str, input: str, work: RunGate | RunTask | RunStream, *, disk_bytes: int = 0) -> None:
        self.name = name
        self.input = input
        self.work = work
        self.disk_bytes = disk_bytes
        self.credit = 0
        self.place: Place | None = None
        self.report = NOTHING
        self.num_tasks_lost = 0
        """What it had published when it was lost, and had to be submitted again."""
        self.num_tasks = 0

    @property
    def what(self) -> str:
        if isinstance(self.work, RunGate):
            return self.name
        verb = "reading" if isinstance(self.work, RunStream) else f"task {self.name} of"
        return f"{verb} {self.input}"


class Dispatcher:
    """Runs the tasks of a plan that are not done yet on the machines of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        plan: Plan,
        journal: Journal,
        *,
        budget: Budget,
        most_in_flight: int | None,
        gate_passed: Callable[[GateResult], None],
        max_errors: int | None = None,
        observe: Callable[[Tally], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._job = msgspec.structs.replace(job, store=str(Path(job.store).absolute()))
        self._place = job.mirror or self._job.store
        self._plan = plan
        self._journal = journal
        self._budget = budget
        self._most_in_flight = most_in_flight
        self._gate_passed = gate_passed
        self._observe = observe
        self._say = say
        self.tally = Tally.of(plan, max_errors)
        self._digest = ""
        self._pending: deque[_Item] = deque()
        self._items: dict[str, _Item] = {}
        self._at: dict[Place, _Item] = {}
        """What each process was last heard to begin."""
        self._memory: dict[Place, int] = {}
        self._records: list[str] = []
        self._room = 0
        self._asked = -ASK_SECONDS
        self._waiting_since: float | None = None
        self._has_complained = False

    def run(self, done: dict[str, TaskRecord], ended_streams: dict[int, list[int]]) -> None:
        """Finish the plan, given what earlier attempts did; returns when every task is in the journal."""
        tasks, streams = self.tally.resume(self._plan, done, ended_streams)
        self._digest = post_job(self._job, self._place)
        self._submit(_Item("the parity gate", "", RunGate()))
        self._work_off()
        self._pending.extend(self._make_items(tasks, streams))
        self._work_off()
        self._wait_for_entries()

    def _work_off(self) -> None:
        """Go on until nothing is left."""
        while self._pending or self._items:
            room = self._limit() - len(self._items)
            for _ in range(min(room, len(self._pending))):
                self._submit(self._pending.popleft())
            for event in self._cluster.wait(WAIT_SECONDS):
                self._hear(event)
            self._look_for_room()
            if self.tally.started is not None:
                self._observe(self.tally)

    def _make_items(self, tasks: list[Task], streams: list[Stream]) -> list[_Item]:
        """Calls for what is left, the largest first."""
        weighed: list[tuple[int, tuple[int, ...], _Item]] = []
        for task in tasks:
            name = self._plan.inputs[task.input].name
            item = _Item(task.name, name, RunTask(task, hold=False), disk_bytes=task.bytes)
            weighed.append((self._weigh(task), self._plan.place(task), item))
        total = sum(map(self._weigh, tasks)) + sum(map(self._weigh, streams))
        for stream in streams:
            weighed += self._divide(stream, total)
        weighed.sort(key=lambda entry: entry[1] if self._plan.order else (-entry[0], *entry[1]))
        return [item for _, _, item in weighed]

    def _divide(self, stream: Stream, total: int) -> list[tuple[int, tuple[int, ...], _Item]]:
        """As many parts as its share of the work is of the machines', so that its end is not waited for."""
        file, weight = self._plan.inputs[stream.input], self._weigh(stream)
        share = round(weight * self._budget.num_workers / max(1, total))
        num_tasks = math.ceil(weight / self._job.settings.task_bytes)
        num_parts = max(1, min(MOST_PARTS, share, num_tasks))
        parts = []
        for part in range(num_parts):
            size = file.bytes * (part + 1) // num_parts - file.bytes * part // num_parts
            work = RunStream(stream, part, num_parts)
            item = _Item(f"{stream.name} part {part}", file.name, work, disk_bytes=size)
            parts.append((weight // num_parts, self._plan.place(stream), item))
        return parts

    def _weigh(self, work: Task | Stream) -> int:
        """About how much text there is to tokenize."""
        if isinstance(work, Stream):
            return self._plan.inputs[work.input].text_bytes
        files = [self._plan.inputs[span.input] for span in work.spans]
        return work.bytes * sum(file.text_bytes for file in files) // max(1, sum(file.bytes for file in files))

    def _limit(self) -> int:
        """How many calls are with the cluster at once: some more than it has room for, so that it never waits."""
        if self._most_in_flight is not None:
            return self._most_in_flight
        return max(LEAST_IN_FLIGHT, 2 * self._capacity())

    def _capacity(self) -> int:
        """For how many calls there is room, asked now and then: machines come and go."""
        if time.monotonic() - self._asked > ASK_SECONDS:
            self._room = self._cluster.capacity(self._call_memory).num_calls
            self._asked = time.monotonic()
        return self._room

    @property
    def _call_memory(self) -> int:
        return self._budget.memory_bytes // self._budget.num_workers

    def _submit(self, item: _Item) -> None:
        payload = msgspec.msgpack.encode(Order(self._place, self._digest, item.work))
        is_gate = isinstance(item.work, RunGate)
        self._items[item.name] = item
        self._cluster.submit(Call(item.name, ANSWER, payload, self._call_memory, is_last=is_gate))

    def _hear(self, event: CallEvent) -> None:
        item = self._items[event.call.name]
        if isinstance(event, Begun):
            self._begin(item, event)
        elif isinstance(event, Note):
            self._count(item, decode_report(event.data))
        elif isinstance(event, Answer):
            self._end(item, event.data)
        else:
            self._mourn(item, event)

    def _begin(self, item: _Item, event: Begun) -> None:
        if event.lost is not None:
            self._leave(item)
            self.tally.num_retried += 1
            self._say(f"{item.what} was lost with {event.lost}; trying it again in {event.place}")
        item.place = event.place
        if not isinstance(item.work, RunGate):
            self._at[event.place] = item
            self.tally.begin(str(event.place), event.place.pid, item.name, item.input)
            self._look_around()

    def _leave(self, item: _Item) -> None:
        """Take back what a lost attempt had not published, and forget the process."""
        if item.place is not None:
            self.tally.workers.pop(str(item.place), None)
            self._memory.pop(item.place, None)
        if isinstance(item.work, RunTask):
            self.tally.done_bytes -= item.credit
            self.tally.num_rejects -= item.report.work.num_rejects
            item.credit = 0
        item.num_tasks += item.report.num_tasks
        item.place, item.report = None, NOTHING

    def _count(self, item: _Item, report: Report) -> None:
        """Reports are of all that an attempt has done; a call never counts for more than its size."""
        work = report.work.since(item.report.work)
        self.tally.work.add(work)
        self.tally.num_recycled += report.num_recycled - item.report.num_recycled
        self.tally.num_tasks_done += report.num_tasks - item.report.num_tasks
        credit = min(report.disk_bytes - item.report.disk_bytes, item.disk_bytes - item.credit)
        item.credit += credit
        self.tally.done_bytes += credit
        item.report = report
        if item.place is not None:
            self._memory[item.place] = report.memory_bytes
        known = self.tally.workers.get(str(item.place))
        if known is not None:
            known.num_bytes += work.num_bytes
            known.task = report.task or known.task
        self._look_around()
        self.tally.count_rejects(work.num_rejects)

    def _look_around(self) -> None:
        """What all processes do and take, as far as they have told."""
        self.tally.num_workers = sum(item.place is not None for item in self._items.values())
        self.tally.memory_bytes = sum(self._memory.values())

    def _end(self, item: _Item, data: bytes) -> None:
        message = decode_answer(data)
        if isinstance(message, Failed):
            raise _nearer(message.to_error())
        if isinstance(message, GateResult):
            self._gate_passed(message)
        else:
            self._finish(item, message)
        del self._items[item.name]
        self._look_around()

    def _finish(self, item: _Item, message: Finished) -> None:
        self._count(item, message.report)
        self.tally.done_bytes += item.disk_bytes - item.credit
        if item.place is not None and self._at.get(item.place) is item:
            # Else the process has begun the next call already.
            self.tally.end(str(item.place))
        for record in message.records:
            self._journal.receive(record)
        self._records += [record.name for record in message.records]
        if isinstance(item.work, RunStream):
            number = item.work.stream.input
            self._journal.end_stream(number, message.numbers, self._plan.inputs[number].stamp)

    def _mourn(self, item: _Item, event: Loss) -> None:
        """A stream that moves on between two losses goes on; anything else may kill whatever it runs on."""
        self._leave(item)
        if isinstance(item.work, RunStream) and item.num_tasks > item.num_tasks_lost:
            item.num_tasks_lost = item.num_tasks
            self._say(f"{item.what} {event.how}; going on where it was")
            self._submit(item)
            return
        raise TokenmillError(f"{item.what} {event.how}; {event.remedy} and run the same command again to continue")

    def _look_for_room(self) -> None:
        """Say so when the cluster has no room for a single call, and end when that does not change."""
        now = time.monotonic()
        if not self._items or any(item.place is not None for item in self._items.values()):
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or now
        waited = now - self._waiting_since
        if waited < PATIENCE_SECONDS or (self._has_complained and waited < GIVE_UP_SECONDS):
            return
        if self._capacity() == 0 and waited >= GIVE_UP_SECONDS:
            raise TokenmillError(f"no machine of the cluster has room for a task: {self._wanted()}")
        if not self._has_complained:
            self._has_complained = True
            self._say(f"waiting for a machine of the cluster with room for a task: {self._wanted()}")

    def _wanted(self) -> str:
        return f"its CPUs and {format_bytes(self._call_memory)} of memory; ask for less, or add machines"

    def _wait_for_entries(self) -> None:
        """What other machines have entered in the journal may show up here a little later."""
        if self._journal.mirror is not None:
            # Also what calls had entered that were lost since.
            self._journal.mirror.pull(self._journal.store)
            return
        deadline = time.monotonic() + SEEN_SECONDS
        while not set(self._records) <= set(self._journal.names()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self._observe(self.tally)


def _nearer(error: TokenmillError) -> TokenmillError:
    """The same with the path as a user of this machine finds it."""
    if isinstance(error, DataError):
        return DataError(error.path.removeprefix(f"{Path.cwd()}/"), error.reason, error.place)
    return error
