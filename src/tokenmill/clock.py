"""The step clock: where the time of a training step goes, and what to blame when a step waits for data.

It reads the host's clock and nothing else, so it never makes a device wait. Where the host only starts the work, as on
CUDA, events in the device's own queue say how long the device took; they are read when they have
happened and never waited for. A step costs the host about 4 microseconds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tokenmill.arguments import one_of, whole_number
from tokenmill.errors import UsageError

__all__ = ["PARTS", "StepClock"]

PARTS = {
    "data": "waiting for the next batch",
    "copy": "handing it to the device",
    "compute": "forward, backward, optimizer",
    "sync": "waiting for the device",
    "python": "everything else in the loop",
}
"""What the time of a step is spent on: together they are the whole step."""
ON_DEVICE = ("copy", "compute")
OUTSIDE = "outside"
WARMUP_STEPS = 10
"""Steps that are left out, because they compile, allocate and fill caches."""
WORTH_BLAMING = 0.01

Item = TypeVar("Item")


class StepClock:
    """Times the parts of steps; `every` so many of them it is time for a table.

        clock = StepClock(every=50, tokens_per_step=batch_size * seq_len, device=device)
        for batch in clock.data(loader):
            with clock.part("copy"): ...
            with clock.part("compute"): ...
            if clock.end_step():
                print(clock.table(recent=True))
        print(clock.table())

    A step may take several batches, and a part may come several times in it. What is in no part is Python's. On a CUDA
    `device` of torch, copying and computing are measured there as well, because the host does not wait for them.
    """

    def __init__(self, *, every: int = 50, tokens_per_step: int | None = None, device: Any = None) -> None:
        self._every = whole_number(every, "every", 1)
        self._tokens_per_step = None if tokens_per_step is None else whole_number(tokens_per_step, "tokens_per_step", 0)
        make_event = _find_events(device)
        self._device = None if make_event is None else _DeviceTimes(make_event)
        self._parts = {name: _Part(self, name) for name in (*PARTS, OUTSIDE) if name != "python"}
        self._running: str | None = None
        self._seconds = dict.fromkeys(self._parts, 0.0)
        self._began: float | None = None
        self._num_steps = 0
        self._warmup, self._all, self._recent = _Sums(1), _Sums(WARMUP_STEPS + 1), _Sums(WARMUP_STEPS + 1)
        self._source: Any = None

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return self._num_steps

    def data(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The batches of a loader; as long as one takes to come, the step waits for data."""
        self._source = batches
        iterator = iter(batches)
        while True:
            with self._parts["data"]:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def part(self, name: str) -> _Part:
        """A context manager for one part of a step: data, copy, compute or sync."""
        part = self._parts.get(name)
        return part if part is not None else self._parts[one_of(name, self._parts, "part")]

    def outside(self) -> _Part:
        """A context manager for what belongs to no step, such as validation and checkpoints."""
        return self._parts[OUTSIDE]

    def end_step(self) -> bool:
        """End the step; true when it is time for a table."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        seconds = self._seconds
        seconds["python"] = max(0.0, now - self._began - sum(seconds.values()))
        if self._num_steps % self._every == 0:
            self._recent = _Sums(max(self._num_steps, WARMUP_STEPS) + 1)
        self._num_steps += 1
        for sums in (self._warmup,) if self._num_steps <= WARMUP_STEPS else (self._all, self._recent):
            sums.add(seconds)
        if self._device is not None:
            self._device.end_step(self._num_steps)
            self._device.read((self._all, self._recent))
        self._seconds = dict.fromkeys(self._parts, 0.0)
        self._began = now
        return self._num_steps % self._every == 0

    def shares(self, *, recent: bool = False) -> dict[str, float]:
        """The part of the time that each part takes, from 0 to 1; of the steps since the last table if `recent`."""
        sums = self._choose(recent)
        return {name: sums.seconds[name] / sums.total if sums.total else 0.0 for name in PARTS}

    def tokens_per_second(self, *, recent: bool = False) -> float:
        """The speed; of the steps since the last table if `recent`."""
        sums = self._choose(recent)
        return (self._tokens_per_step or 0) * sums.num_steps / sums.total if sums.total else 0.0

    def blame(self, *, recent: bool = False) -> str:
        """How much of the time steps wait for data and, when that is much, what to do about it."""
        share = self._share_waiting(recent)
        said = f"waits for data {share:.1%}" if share < 0.1 else f"waits for data {share:.0%}"
        bottleneck = getattr(self._source, "bottleneck", None)
        return said if share < WORTH_BLAMING or bottleneck is None else f"{said}: {bottleneck}"

    def table(self, *, recent: bool = False) -> str:
        """The parts of a mean step, in at most 80 columns; of the steps since the last table if `recent`."""
        sums = self._choose(recent)
        if not sums.num_steps:
            return "no step has ended, so there is nothing to show"
        wide = 11 if sums.num_on_device else 0
        lines = [f"{'part':<9}{'ms/step':>10}{'share':>8}{'on device' if wide else '':>{wide}}"]
        for name, share in self.shares(recent=recent).items():
            lines.append(
                f"{name:<9}{sums.mean(name):>10.2f}{share:>8.1%}{sums.show_device(name):>{wide}}   {PARTS[name]}"
            )
        speed = f"{self.tokens_per_second(recent=recent):,.0f} tokens/s" if self._tokens_per_step else ""
        lines.append(f"{'step':<9}{1e3 * sums.total / sums.num_steps:>10.2f}{1:>8.1%}{'':>{wide}}   {speed}")
        return "\n".join([*(line.rstrip() for line in lines), self._name_steps(sums), self.blame(recent=recent)])

    def _choose(self, recent: bool) -> _Sums:
        """What the figures are of; a run that is shorter than the warm-up has only that."""
        sums = self._recent if recent else self._all
        return sums if sums.num_steps else self._warmup

    def _share_waiting(self, recent: bool) -> float:
        """Of the host's waiting, only what left the device idle: while it is busy, waiting costs nothing."""
        sums = self._choose(recent)
        waiting = self.shares(recent=recent)["data"]
        if not sums.num_on_device or not sums.total:
            return waiting
        busy = sum(sums.device_seconds.values()) / sums.num_on_device / (sums.total / sums.num_steps)
        return min(waiting, max(0.0, 1 - busy))

    def _name_steps(self, sums: _Sums) -> str:
        steps = f"steps {sums.first:,} to {sums.first + sums.num_steps - 1:,}"
        left_out = f"the first {WARMUP_STEPS} are left out" if sums is not self._warmup else "too few to leave any out"
        return f"{steps} of this run; {left_out} as warm-up"


class _Part:
    """Adds the time between its entry and its exit to one part of the step."""

    __slots__ = ("_clock", "_name", "_on_device", "_started")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._on_device = clock._device if name in ON_DEVICE else None
        self._started = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        if clock._running is not None:
            raise UsageError(f"part {self._name!r} began inside part {clock._running!r}; end that one first")
        clock._running = self._name
        if self._on_device is not None:
            self._on_device.begin(self._name)
        self._started = perf_counter()
        if clock._began is None:
            clock._began = self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clock = self._clock
        clock._seconds[self._name] += perf_counter() - self._started
        clock._running = None
        if self._on_device is not None:
            self._on_device.end()


class _Sums:
    """Seconds of steps from the `first` on, added up."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.num_steps = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_on_device = 0
        self.device_seconds = dict.fromkeys(ON_DEVICE, 0.0)

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def add(self, seconds: dict[str, float]) -> None:
        """Add a step."""
        self.num_steps += 1
        for name in PARTS:
            self.seconds[name] += seconds[name]

    def mean(self, name: str) -> float:
        """Milliseconds of a part in a step."""
        return 1e3 * self.seconds[name] / self.num_steps

    def show_device(self, name: str) -> str:
        """Milliseconds that a part took on the device, where that is known."""
        if not self.num_on_device or name not in ON_DEVICE:
            return ""
        return f"{1e3 * self.device_seconds[name] / self.num_on_device:.2f}"


class _Event(Protocol):
    """What torch's events can do."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


def _find_events(device: Any) -> Callable[[], _Event] | None:
    """How to make an event that knows its time, on a device that works behind the host's back."""
    torch = sys.modules.get("torch")
    if device is None or torch is None or str(device).partition(":")[0] != "cuda":
        return None
    return lambda: torch.cuda.Event(enable_timing=True)


class _DeviceTimes:
    """How long parts take on the device: events around them, kept until the device has passed them."""

    def __init__(self, make_event: Callable[[], _Event]) -> None:
        self._make_event = make_event
        self._spare: list[_Event] = []
        self._step: list[tuple[str, _Event, _Event]] = []
        self._waiting: deque[tuple[int, list[tuple[str, _Event, _Event]]]] = deque()

    def begin(self, name: str) -> None:
        """Mark where a part begins in the device's queue."""
        start, end = self._take(), self._take()
        start.record()
        self._step.append((name, start, end))

    def end(self) -> None:
        """Mark where it ends."""
        self._step[-1][2].record()

    def _take(self) -> _Event:
        return self._spare.pop() if self._spare else self._make_event()

    def end_step(self, number: int) -> None:
        """Remember the marks of a step."""
        if self._step:
            self._waiting.append((number, self._step))
            self._step = []

    def read(self, kinds: Iterable[_Sums]) -> None:
        """Add up the steps that the device is through with."""
        while self._waiting and self._waiting[0][1][-1][2].query():
            number, marks = self._waiting.popleft()
            chosen = [sums for sums in kinds if number >= sums.first]
            for sums in chosen:
                sums.num_on_device += 1
            for name, start, end in marks:
                seconds = start.elapsed_time(end) / 1e3
                for sums in chosen:
                    sums.device_seconds[name] += seconds
                self._spare += (start, end)
