"""Run contenders fairly: a fresh process for each run, in turns, and memory apart from time.

Machines are noisy and change their speed while a benchmark runs. Every contender runs once per turn, so that a slow
minute affects all of them. Reading the memory of a process tree stops it for milliseconds; so memory is measured in
warm-ups of a contender, in which time is not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from tokenmill.errors import TokenmillError
from tokenmill.formatting import format_bytes
from tokenmill.machine import available_memory, tree_memory

__all__ = [
    "Answer",
    "Contender",
    "Effort",
    "Failure",
    "Finisher",
    "peak_memory",
    "race",
    "run_once",
    "stopwatch",
    "sum_over_tree",
    "tree_cpu_seconds",
]

Answer = dict[str, Any]

WATCH_SECONDS = 0.02
MEMORY_SHARE = 0.7
"""The share of the free memory that a contender may take; it is killed before it exhausts the machine."""
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Silences the messages that frameworks print on import, and keeps batches on the CPU, which every machine has."""


class Failure(TokenmillError):
    """A contender did not finish."""


@dataclass(frozen=True)
class Contender:
    """A function `module:name` to be measured, and its settings."""

    name: str
    target: str
    settings: dict[str, Any] = field(default_factory=dict)
    warm_ups: Sequence[dict[str, Any]] = ()
    """Changed settings for each of the untimed runs that measure memory."""


@dataclass(frozen=True)
class Effort:
    """How much is measured, and a callback that shows what is being measured."""

    max_bytes: int | None = None
    """Of the data; if None, enough for about a minute."""
    repeat: int = 3
    on_stage: Callable[[str], None] = lambda _text: None


@dataclass(frozen=True)
class Finisher:
    """A contender that was measured in every turn."""

    contender: Contender
    peaks: list[int] = field(default_factory=list)
    """The peak memory of each warm-up, in bytes."""
    answers: list[Answer] = field(default_factory=list)
    """One for each turn."""

    def warm_up(self) -> None:
        """Measure its memory."""
        for settings in self.contender.warm_ups:
            self.peaks.append(peak_memory(replace(self.contender, settings={**self.contender.settings, **settings})))


def race(contenders: Sequence[Contender], effort: Effort, left_out: dict[str, str]) -> list[Finisher]:
    """Measure the memory of all contenders in their warm-ups, and then let them take turns.

    A contender that fails leaves the race. `left_out` gets the reason, and the others continue.
    """
    runners = [Finisher(contender) for contender in contenders]

    def run_all(stage: str, run: Callable[[Finisher], None]) -> None:
        for runner in runners:
            name = runner.contender.name
            if name not in left_out:
                effort.on_stage(f"{stage}: {name}")
                try:
                    run(runner)
                except Failure as failure:
                    left_out[name] = str(failure)

    if any(contender.warm_ups for contender in contenders):
        run_all("warm-up and memory", Finisher.warm_up)
    for turn in range(1, effort.repeat + 1):
        run_all(f"turn {turn} of {effort.repeat}", lambda runner: runner.answers.append(run_once(runner.contender)))
    return [runner for runner in runners if runner.contender.name not in left_out]


def run_once(contender: Contender) -> Answer:
    """Run a contender in a fresh process and return its answer."""
    return _run(contender, lambda process: process.wait())


def peak_memory(contender: Contender) -> int:
    """Run a contender, poll the memory of its process tree, and return the peak."""
    limit = int(available_memory() * MEMORY_SHARE)
    peak = 0

    def watch(process: subprocess.Popen[bytes]) -> None:
        nonlocal peak
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):
                peak = max(peak, tree_memory(tree))
            if peak > limit:
                raise Failure(f"was stopped when it held {format_bytes(peak)} of memory")
            time.sleep(WATCH_SECONDS)

    _run(contender, watch)
    return peak


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Measure wall time, and CPU time of this process and its descendants: `seconds` and `cpu_seconds`."""
    taken: dict[str, float] = {}
    cpu = tree_cpu_seconds()
    started = time.perf_counter()
    yield taken
    taken["seconds"] = time.perf_counter() - started
    taken["cpu_seconds"] = tree_cpu_seconds() - cpu


def tree_cpu_seconds() -> float:
    """CPU time of this process and its descendants; an ended process counts with the parent that waited for it."""
    # Of the process itself and of its ended children: user, system, user, system.
    return sum_over_tree(lambda process: sum(process.cpu_times()[:4]))


def sum_over_tree(read: Callable[[psutil.Process], float]) -> float:
    """Add up a figure of this process and its descendants."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error):
            total += read(process)
    return total


def _run(contender: Contender, watch: Callable[[subprocess.Popen[bytes]], object]) -> Answer:
    """Run a process in a session of its own, which is killed as soon as `watch` returns, and read the answer."""
    command = [sys.executable, "-m", "tokenmill.tools.bench.child", contender.target, json.dumps(contender.settings)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = None
        try:
            with _signals_deferred():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env={**os.environ, **QUIET},
                    start_new_session=True,
                )
            watch(process)
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process is not None
        output.seek(0)
        errors.seek(0)
        return _read_answer(process.returncode, output.read(), errors.read())


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals while a process is being started: until its number is known, it cannot be killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _frame: waiting.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)
        if waiting:
            signal.raise_signal(waiting[0])


def _read_answer(code: int, output: bytes, errors: bytes) -> Answer:
    lines = output.splitlines()
    if code == 0 and lines:
        answer: Answer = json.loads(lines[-1])
        if "failed" in answer:
            raise Failure(str(answer["failed"]))
        return answer
    if code < 0:
        raise Failure(f"was ended by {signal.Signals(-code).name}")
    said = errors.decode("utf-8", "replace").strip().splitlines()
    raise Failure(said[-1] if said else f"ended with exit code {code}")
