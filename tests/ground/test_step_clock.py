"""The step clock: parts add up to the step, warm-up is left out, and waiting for data is blamed on a stage."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.errors import UsageError
from tokenmill.step_clock import PARTS, WARMUP_STEPS, StepClock


class Time:
    """A clock that moves only when a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("tokenmill.step_clock.perf_counter", lambda: self.now)

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


class Source:
    """Batches that take some time, and name the bottleneck."""

    bottleneck = "tokenizing; run `tokenmill tokenize` first"

    def __init__(self, moment: Time, milliseconds: float) -> None:
        self._moment, self._milliseconds = moment, milliseconds

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self._moment.pass_ms(self._milliseconds)
            yield number


def run_steps(clock: StepClock, batches: Any, num_steps: int, moment: Time, *, compute: float = 6.0) -> list[int]:
    """Run steps of one batch: 1 ms copying, some computing, 2 waiting, 0.5 Python; return those with a table."""
    told = []
    for number, _ in zip(range(1, num_steps + 1), batches, strict=False):
        with clock.part("copy"):
            moment.pass_ms(1)
        moment.pass_ms(0.5)
        with clock.part("compute"):
            moment.pass_ms(compute)
        with clock.part("sync"):
            moment.pass_ms(2)
        if clock.end_step():
            told.append(number)
    return told


def test_the_parts_of_a_step_add_up_to_it(moment: Time) -> None:
    clock = StepClock(every=7, tokens_per_step=1000)
    told = run_steps(clock, clock.data(Source(moment, 0.5)), 30, moment)
    shares = clock.shares()
    assert told == [7, 14, 21, 28]
    assert list(shares) == list(PARTS)
    assert shares == pytest.approx({"data": 0.05, "copy": 0.1, "compute": 0.6, "sync": 0.2, "python": 0.05})
    assert clock.tokens_per_second() == pytest.approx(100_000)
    assert clock.num_steps == 30


def test_real_time_goes_where_it_is_spent() -> None:
    def slow() -> Iterator[int]:
        while True:
            time.sleep(0.002)
            yield 1

    clock = StepClock()
    for _ in zip(range(WARMUP_STEPS + 20), clock.data(slow()), strict=False):
        with clock.part("compute"):
            time.sleep(0.004)
        clock.end_step()
    shares = clock.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute"] > shares["data"] > 0.1 > shares["copy"] + shares["sync"]


def test_the_first_steps_are_left_out_and_the_table_says_so(moment: Time) -> None:
    clock = StepClock(every=50)
    batches = clock.data(Source(moment, 0))
    run_steps(clock, batches, WARMUP_STEPS, moment, compute=5000)
    assert "steps 1 to 10 of this run; too few to leave any out as warm-up" in clock.table()
    assert clock.shares()["compute"] > 0.99
    run_steps(clock, batches, 5, moment, compute=6.5)
    assert "steps 11 to 15 of this run; the first 10 are left out as warm-up" in clock.table()
    assert clock.shares()["compute"] == pytest.approx(0.65)


def test_a_recent_table_is_of_the_steps_since_the_last_one(moment: Time) -> None:
    clock = StepClock(every=20)
    batches = clock.data(Source(moment, 0))
    assert run_steps(clock, batches, 40, moment, compute=6.5) == [20, 40]
    assert run_steps(clock, batches, 20, moment, compute=96.5) == [20]
    assert clock.shares(recent=True)["compute"] == pytest.approx(0.965)
    assert "steps 41 to 60" in clock.table(recent=True)
    assert 0.65 < clock.shares()["compute"] < 0.965
    assert "steps 11 to 60" in clock.table()


def test_the_table_lines_up_in_80_columns(moment: Time) -> None:
    clock = StepClock(tokens_per_step=10**9)
    run_steps(clock, clock.data(Source(moment, 400)), 300, moment, compute=99_999)
    lines = clock.table().splitlines()
    assert [line.split()[0] for line in lines[:7]] == ["part", *PARTS, "step"]
    assert max(map(len, lines)) <= 80
    assert {line.index("%") for line in lines[1:7]} == {26}
    assert lines[1].split()[1:3] == ["400.00", "0.4%"] and lines[6].endswith("tokens/s")


def test_waiting_for_data_is_blamed_on_what_the_loader_names(moment: Time) -> None:
    clock = StepClock()
    run_steps(clock, clock.data(Source(moment, 0.028)), 30, moment)
    assert clock.blame() == "waits for data 0.3%"
    clock = StepClock()
    run_steps(clock, clock.data(Source(moment, 6.6)), 30, moment)
    assert clock.blame() == "waits for data 41%: tokenizing; run `tokenmill tokenize` first"
    assert clock.table().endswith(clock.blame())
    clock = StepClock()
    run_steps(clock, clock.data(iter(Source(moment, 0.5))), 30, moment)
    assert clock.blame() == "waits for data 5.0%"


def test_a_step_may_take_several_batches_and_come_back_to_a_part(moment: Time) -> None:
    clock = StepClock()
    batches = clock.data(Source(moment, 1))
    for _ in range(20):
        for _ in range(3):
            next(batches)
            with clock.part("compute"):
                moment.pass_ms(9)
        clock.end_step()
    assert clock.shares()["data"] == pytest.approx(0.1)


def test_work_outside_belongs_to_no_step(moment: Time) -> None:
    clock = StepClock(tokens_per_step=100)
    batches = clock.data(Source(moment, 0.5))
    for _ in range(3):
        run_steps(clock, batches, 10, moment)
        with clock.outside():
            moment.pass_ms(60_000)
    assert clock.tokens_per_second() == pytest.approx(10_000)
    assert clock.shares()["python"] == pytest.approx(0.05)


def test_the_data_may_end(moment: Time) -> None:
    clock = StepClock()
    assert list(clock.data([1, 2, 3])) == [1, 2, 3]
    assert clock.table() == "no step has ended, so there is nothing to show"
    assert clock.blame() == "waits for data 0.0%"


def test_wrong_arguments_are_one_sentence() -> None:
    clock = StepClock()
    with pytest.raises(UsageError, match="part 'gpu' is unknown; expected data, copy, compute, sync"):
        clock.part("gpu")
    with (
        pytest.raises(UsageError, match="part 'copy' began inside part 'compute'; end that one first"),
        clock.part("compute"),
        clock.part("copy"),
    ):
        pass
    with clock.part("copy"):
        pass
    with pytest.raises(UsageError, match="every 0 must be a whole number, at least 1"):
        StepClock(every=0)


def test_an_error_in_a_part_ends_the_part(moment: Time) -> None:
    clock = StepClock()
    with pytest.raises(ValueError, match="bad"), clock.part("compute"):
        raise ValueError("bad")
    with clock.part("compute"):
        pass


class Event:
    """A CUDA event of a device that lags behind the host; it offers no way to wait."""

    device_now = 0.0
    reached = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1

    def record(self) -> None:
        self.at = type(self).device_now

    def query(self) -> bool:
        return self.at <= type(self).reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "the device has not reached this event"
        return end.at - self.at


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    torch = pytest.importorskip("torch")
    kind = type("Event", (Event,), {})
    monkeypatch.setattr(torch.cuda, "Event", kind)
    return kind


def run_on_device(
    clock: StepClock, batches: Any, moment: Time, event: type[Event], read: Callable[[int], bool]
) -> None:
    """Run steps that the host launches in 1 ms and the device computes in 9; the host waits for it at some steps."""
    for number, _ in zip(range(1, 41), batches, strict=False):
        with clock.part("compute"):
            moment.pass_ms(1)
            event.device_now += 9
        if read(number):
            with clock.part("sync"):
                event.reached = event.device_now
                moment.now = max(moment.now, 1000 + event.device_now / 1e3)
        clock.end_step()


def test_on_cuda_computing_is_measured_by_events_that_are_never_waited_for(moment: Time, event: type[Event]) -> None:
    clock = StepClock(every=100, device="cuda:0")
    run_on_device(clock, clock.data(Source(moment, 0)), moment, event, lambda number: number % 10 == 0)
    lines = clock.table().splitlines()
    assert lines[0].endswith("on device")
    assert lines[3].split()[:4] == ["compute", "1.00", "11.1%", "9.00"]
    assert lines[4].split()[:2] == ["sync", "8.00"]
    assert event.made <= 2 * 11, "events are used again"


def test_steps_that_the_device_has_not_finished_are_not_counted(moment: Time, event: type[Event]) -> None:
    clock = StepClock(every=100, device="cuda")
    run_on_device(clock, clock.data(Source(moment, 0)), moment, event, lambda number: number == 20)
    assert clock.table().splitlines()[3].split()[3] == "9.00"
    clock = StepClock(every=100, device="cuda")
    event.reached = -1.0
    run_on_device(clock, clock.data(Source(moment, 0)), moment, event, lambda number: False)
    assert "on device" not in clock.table()


def test_waiting_for_data_while_the_device_is_busy_costs_nothing(moment: Time, event: type[Event]) -> None:
    clock = StepClock(every=100, device="cuda")
    run_on_device(clock, clock.data(Source(moment, 5)), moment, event, lambda number: number % 5 == 0)
    assert clock.shares()["data"] == pytest.approx(5 / 9, rel=0.01)
    assert clock.blame() == "waits for data 0.0%"


def test_the_status_has_the_speed_and_the_use_of_the_machine(moment: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(tokens_per_step=1000, flops_per_step=3.12e12)
    run_steps(clock, clock.data(Source(moment, 0.5)), 30, moment)
    assert re.fullmatch(r"100,000 tokens/s  cpu \d+%", clock.status())
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 31_200_000_000)
    clock._cuda = torch.cuda
    assert clock.status().startswith("100,000 tokens/s  MFU 100.0%  device 97%  31.2 GB  cpu ")


def test_known_devices_have_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    names = {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": None,
        "NVIDIA H200": 989,
        "NVIDIA B200": 2250,
        "NVIDIA GB200": None,
        "NVIDIA L40S": 362,
        "NVIDIA L40": None,
        "NVIDIA RTX A4000": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert StepClock(device="cuda").peak_flops == (None if peak is None else peak * 1e12), name
    assert StepClock(device="cpu").peak_flops is None


def test_a_loop_can_name_the_bottleneck_itself(moment: Time) -> None:
    clock = StepClock()
    run_steps(clock, clock.data(iter(Source(moment, 6.6)), bottleneck=lambda: "Grain's workers"), 30, moment)
    assert clock.blame() == "waits for data 41%: Grain's workers"


def test_the_clock_costs_a_step_less_than_10_microseconds() -> None:
    def run(clock: StepClock, num_steps: int) -> float:
        started = time.perf_counter()
        for _ in zip(range(num_steps), clock.data(itertools.repeat(1)), strict=False):
            with clock.part("copy"):
                pass
            with clock.part("compute"):
                pass
            with clock.part("sync"):
                pass
            clock.end_step()
        return (time.perf_counter() - started) / num_steps

    clock = StepClock()
    assert min(run(clock, 200) for _ in range(50)) < 10e-6


def test_the_clock_imports_no_framework() -> None:
    import subprocess

    program = "import sys, tokenmill.step_clock; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "jax", "numpy", "rich"} & set(done.stdout.split())


def test_a_loader_names_its_bottleneck(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(200))), seq_len=16)
    loader = tm.Loader(rows, batch_size=2)
    next(iter(loader))
    assert loader.bottleneck == "filling batches; pass prefetch=2"
    assert tm.Loader(rows, batch_size=2, prefetch=2).bottleneck == "filling batches; leave it a free core"


def test_a_loader_that_waits_for_the_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = itertools.count(0, 1000)
    usage = lambda who: SimpleNamespace(ru_majflt=next(faults))  # noqa: E731
    monkeypatch.setattr("tokenmill.loaders._disk.resource.getrusage", usage)
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(200))), seq_len=16)
    for prefetch, todo in ((0, "pass prefetch=2"), (2, "move the store to a faster one")):
        loader = tm.Loader(rows, batch_size=2, prefetch=prefetch)
        next(iter(loader))
        assert loader.bottleneck == f"reading the disk; {todo}"


def test_a_loader_with_worker_processes_blames_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = make_store(tmp_path, make_documents(200))
    loader = tm.load(store, seq_len=16, batch_size=2, framework="torch", num_workers=2)
    assert loader.bottleneck == "2 worker processes; leave each a free core, or pass num_workers=0"
    assert tm.load(store, seq_len=16, batch_size=2, framework="torch").bottleneck.startswith("filling batches")
