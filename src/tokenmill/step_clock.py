"""The step clock: where the time of a training step goes, and what to blame when a step waits for data.

It reads only the host's clock, so it never makes a device wait. On CUDA, where the host only launches work, it also
records events in the device's queue to learn how long the device took; it reads them once they have
passed and never waits for them. A step costs the host about 4 microseconds.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any, TypeVar

from tokenmill.arguments import one_of, whole_number
from tokenmill.errors import UsageError

__all__ = ["PARTS", "StepClock"]

PARTS = {
    "data": "waiting for the next batch",
    "copy": "copying it to the device",
    "compute": "forward, backward, optimizer",
    "sync": "waiting for the device",
    "python": "everything else in the loop",
}
"""The parts of a step; their times add up to the time of the step."""
ON_DEVICE = ("copy", "compute")
OUTSIDE = "outside"
WARMUP_STEPS = 10
"""Warm-up steps are left out: they compile, allocate and fill caches."""
WORTH_BLAMING = 0.01
PEAK_TERAFLOPS = {"A100": 312, "H100 80GB HBM3": 989, "H100 PCIe": 756, "H200": 989, "NVIDIA B200": 2250, "L40S": 362}
"""The makers' figures for dense bfloat16 matrices, by a part of the device's name."""

Item = TypeVar("Item")


class StepClock:
    """Times the parts of steps, and says when a table is due: after `every` so many steps.

        clock = StepClock(every=50, tokens_per_step=batch_size * seq_len, device=device)
        for batch in clock.data(loader):
            with clock.part("copy"): ...
            with clock.part("compute"): ...
            if clock.end_step():
                print(clock.table(recent=True))
        print(clock.table())

    A step may take several batches and enter a part several times. Time outside all parts counts as Python's. On a CUDA
    `device` of torch, the clock also measures copying and computing on the device, because the host does not wait for
    them. `flops_per_step` are those of this device; they give its MFU.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        tokens_per_step: int | None = None,
        flops_per_step: float | None = None,
        device: Any = None,
    ) -> None:
        self._every = whole_number(every, "every", 1)
        self._tokens_per_step = None if tokens_per_step is None else whole_number(tokens_per_step, "tokens_per_step", 0)
        self._flops_per_step, self._device = flops_per_step, device
        torch: Any = sys.modules.get("torch")
        self._cuda = torch.cuda if torch is not None and str(device).partition(":")[0] == "cuda" else None
        self._times = None if self._cuda is None else _DeviceTimes(self._cuda)
        self._parts = {name: _Part(self, name) for name in (*PARTS, OUTSIDE) if name != "python"}
        self._running: str | None = None
        self._seconds = dict.fromkeys(self._parts, 0.0)
        self._began: float | None = None
        self._num_steps = 0
        self._warmup, self._all, self._recent = _Sums(1), _Sums(WARMUP_STEPS + 1), _Sums(WARMUP_STEPS + 1)
        self._find_bottleneck: Callable[[], str | None] = lambda: None
        _cpu_percent()  # The next call returns the use since this one.

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return self._num_steps

    def data(self, batches: Iterable[Item], *, bottleneck: Callable[[], str | None] | None = None) -> Iterator[Item]:
        """Iterate over the batches of a loader, and count the time that each takes to arrive as waiting for data.

        `bottleneck` tells what to blame, if the loader has no property of this name.
        """
        self._find_bottleneck = bottleneck or (lambda: getattr(batches, "bottleneck", None))
        iterator = iter(batches)
        while True:
            with self._parts["data"]:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def part(self, name: str) -> _Part:
        """Return a context manager for one part of a step: data, copy, compute or sync."""
        part = self._parts.get(name)
        return part if part is not None else self._parts[one_of(name, self._parts, "part")]

    def outside(self) -> _Part:
        """Return a context manager for work that belongs to no step, such as validation and checkpoints."""
        return self._parts[OUTSIDE]

    def end_step(self) -> bool:
        """End the step; return whether a table is due."""
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
        if self._times is not None:
            self._times.end_step(self._num_steps, (self._all, self._recent))
        self._seconds = dict.fromkeys(self._parts, 0.0)
        self._began = now
        return self._num_steps % self._every == 0

    def shares(self, *, recent: bool = False) -> dict[str, float]:
        """Return the share of each part, from 0 to 1; of the steps since the last table if `recent`."""
        sums = self._choose(recent)
        return {name: sums.seconds[name] / sums.total if sums.total else 0.0 for name in PARTS}

    def tokens_per_second(self, *, recent: bool = False) -> float:
        """Return the speed; of the steps since the last table if `recent`."""
        return (self._tokens_per_step or 0) * self._choose(recent).steps_per_second

    def status(self) -> str:
        """Describe the speed since the last table in one line: tokens/s, MFU, use of device, its memory and host.

        MFU needs `flops_per_step` and a device whose peak is known; the device's utilization needs nvidia-ml-py.
        """
        parts = [f"{self.tokens_per_second(recent=True):,.0f} tokens/s"] if self._tokens_per_step else []
        if self._flops_per_step is not None and (peak := self.peak_flops) is not None:
            parts.append(f"MFU {self._flops_per_step * self._choose(True).steps_per_second / peak:.1%}")
        if self._cuda is not None:
            with contextlib.suppress(ImportError, RuntimeError):
                parts.append(f"device {self._cuda.utilization(self._device)}%")
            parts.append(f"{self._cuda.max_memory_allocated(self._device) / 1e9:.1f} GB")
        return "  ".join([*parts, f"cpu {_cpu_percent():.0f}%"])

    @property
    def peak_flops(self) -> float | None:
        """The peak FLOP/s of the device, or None if it is unknown."""
        name = "" if self._cuda is None else self._cuda.get_device_name(self._device)
        return next((1e12 * peak for known, peak in PEAK_TERAFLOPS.items() if known in name), None)

    def blame(self, *, recent: bool = False) -> str:
        """Say how much of their time steps wait for data and, if that is much, what to do about it.

        Waiting costs nothing while the device is busy.
        """
        sums = self._choose(recent)
        share = self.shares(recent=recent)["data"]
        if sums.num_on_device:
            busy = sum(sums.device_seconds.values()) / sums.num_on_device * sums.steps_per_second
            share = min(share, max(0.0, 1 - busy))
        waits = f"waits for data {share:.1%}" if share < 0.1 else f"waits for data {share:.0%}"
        bottleneck = None if share < WORTH_BLAMING else self._find_bottleneck()
        return waits if bottleneck is None else f"{waits}: {bottleneck}"

    def table(self, *, recent: bool = False) -> str:
        """Show the parts of a mean step in at most 80 columns; of the steps since the last table if `recent`."""
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
        steps = f"steps {sums.first:,} to {sums.first + sums.num_steps - 1:,} of this run"
        left_out = f"the first {WARMUP_STEPS} are left out" if sums is not self._warmup else "too few to leave any out"
        lines += [f"{steps}; {left_out} as warm-up", self.blame(recent=recent)]
        return "\n".join(line.rstrip() for line in lines)

    def _choose(self, recent: bool) -> _Sums:
        """Choose the steps to report on; a run that is shorter than the warm-up has only that."""
        sums = self._recent if recent else self._all
        return sums if sums.num_steps else self._warmup


class _Part:
    """Adds the time between its entry and its exit to one part of the step."""

    __slots__ = ("_clock", "_name", "_started", "_times")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._times = clock._times if name in ON_DEVICE else None
        self._started = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        if clock._running is not None:
            raise UsageError(f"part {self._name!r} began inside part {clock._running!r}; end that one first")
        clock._running = self._name
        if self._times is not None:
            self._times.begin(self._name)
        self._started = perf_counter()
        if clock._began is None:
            clock._began = self._started

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        clock._seconds[self._name] += perf_counter() - self._started
        clock._running = None
        if self._times is not None:
            self._times.end()


class _Sums:
    """Summed seconds of the steps from `first` on."""

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

    @property
    def steps_per_second(self) -> float:
        """The speed, or 0 if no step has ended."""
        return self.num_steps / self.total if self.total else 0.0

    def add(self, seconds: dict[str, float]) -> None:
        """Add a step."""
        self.num_steps += 1
        for name in PARTS:
            self.seconds[name] += seconds[name]

    def mean(self, name: str) -> float:
        """Return the milliseconds of a part in a mean step."""
        return 1e3 * self.seconds[name] / self.num_steps

    def show_device(self, name: str) -> str:
        """Show the milliseconds that a part took on the device, if they are known."""
        if not self.num_on_device or name not in ON_DEVICE:
            return ""
        return f"{1e3 * self.device_seconds[name] / self.num_on_device:.2f}"


class _DeviceTimes:
    """Measures parts on the device by events around them, which are kept until the device has passed them.

    `cuda` is the module `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._spare: list[Any] = []
        self._step: list[tuple[str, Any, Any]] = []
        self._waiting: deque[tuple[int, list[tuple[str, Any, Any]]]] = deque()

    def begin(self, name: str) -> None:
        """Record an event where a part begins in the device's queue."""
        start, end = (self._spare.pop() if self._spare else self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._step.append((name, start, end))

    def end(self) -> None:
        """Record an event where the part ends."""
        self._step[-1][2].record()

    def end_step(self, number: int, kinds: Iterable[_Sums]) -> None:
        """Keep the events of a step, and add up the steps that the device has finished."""
        if self._step:
            self._waiting.append((number, self._step))
            self._step = []
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


def _cpu_percent() -> float:
    """Return how much of all cores was used since the last call."""
    import psutil

    return psutil.cpu_percent()
