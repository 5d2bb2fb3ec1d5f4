"""Measuring contenders fairly: a fresh process for each run, in turns, memory apart from time.

Machines are noisy and get slower or faster while one looks. So everybody runs once per turn, and a
slow minute hits all of them. Looking at the memory of a process tree stops it for milliseconds; the
first run of a contender is therefore its warm-up, in which memory is watched and time is not.
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
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from tokenmill.errors import TokenmillError
from tokenmill.machine import available_memory, tree_memory
from tokenmill.progress import format_bytes

__all__ = [
    "Answer",
    "Contender",
    "Effort",
    "Failure",
    "Stopwatch",
    "Tell",
    "Turns",
    "ask",
    "stopwatch",
    "take_turns",
    "tree_cpu_seconds",
    "watch",
]

Answer = dict[str, Any]
Tell = Callable[[str], None]
"""Says what is being done, for whoever waits."""

WATCH_SECONDS = 0.02
MEMORY_SHARE = 0.7
"""Of the memory that is free; a contender that takes more is ended, or the machine would be."""
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Frameworks talk when they are imported; batches are measured on the CPU, which every machine has."""


class Failure(TokenmillError):
    """A contender that did not come to its end."""


@dataclass(frozen=True)
class Contender:
    """Somebody to be measured: a function `module:name` and its settings."""

    name: str
    target: str
    settings: dict[str, Any] = field(default_factory=dict)

    def with_settings(self, **settings: Any) -> Contender:
        """The same one, with other settings."""
        return Contender(self.name, self.target, {**self.settings, **settings})


@dataclass(frozen=True)
class Effort:
    """How much is measured, and who is told what is going on."""

    max_bytes: int | None = None
    """Of the data; as much as takes about a minute, if None."""
    repeat: int = 3
    tell: Tell = lambda _text: None


@dataclass
class Turns:
    """The answers of every contender, one for each turn, and why some of them are missing."""

    answers: dict[str, list[Answer]]
    failures: dict[str, str]


def ask(contender: Contender) -> Answer:
    """Run a contender in a fresh process; its answer."""
    with _started(contender) as (process, output, errors):
        process.wait()
        return _read_answer(contender, process, output, errors)


def watch(contender: Contender) -> tuple[Answer, int]:
    """Run a contender and look at it all the time; its answer, and the peak memory of its process tree."""
    limit = int(available_memory() * MEMORY_SHARE)
    peak = 0
    with _started(contender) as (process, output, errors):
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):
                peak = max(peak, tree_memory(tree))
            if peak > limit:
                raise Failure(f"was stopped when it held {format_bytes(peak)} of memory")
            time.sleep(WATCH_SECONDS)
        return _read_answer(contender, process, output, errors), peak


def take_turns(contenders: Sequence[Contender], effort: Effort) -> Turns:
    """Run everybody once per turn; who fails takes no further part."""
    turns = Turns({contender.name: [] for contender in contenders}, {})
    for turn in range(1, effort.repeat + 1):
        for contender in contenders:
            if contender.name in turns.failures:
                continue
            effort.tell(f"turn {turn} of {effort.repeat}: {contender.name}")
            try:
                turns.answers[contender.name].append(ask(contender))
            except Failure as failure:
                turns.failures[contender.name] = str(failure)
    turns.answers = {name: answers for name, answers in turns.answers.items() if name not in turns.failures}
    return turns


@dataclass
class Stopwatch:
    """What a piece of work took."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Time of the clock, and of the processors for this process and all that it has started."""
    taken = Stopwatch()
    cpu = tree_cpu_seconds()
    started = time.perf_counter()
    yield taken
    taken.seconds = time.perf_counter() - started
    taken.cpu_seconds = tree_cpu_seconds() - cpu


def tree_cpu_seconds() -> float:
    """What this process and its descendants have used; those that ended count with the parent that waited for them."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def _started(contender: Contender) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """A process in a session of its own, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "tokenmill.bench.run_one", contender.target, json.dumps(contender.settings)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = None
        try:
            with _signals_wait():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env={**os.environ, **QUIET},
                    start_new_session=True,
                )
            yield process, output, errors
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let a signal wait until a process that is being started is known, and can be ended."""
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


def _read_answer(
    contender: Contender, process: subprocess.Popen[bytes], output: IO[bytes], errors: IO[bytes]
) -> Answer:
    output.seek(0)
    lines = output.read().splitlines()
    if process.returncode == 0 and lines:
        answer: Answer = json.loads(lines[-1])
        if "failed" in answer:
            raise Failure(str(answer["failed"]))
        return answer
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    if process.returncode < 0:
        raise Failure(f"was ended by {signal.Signals(-process.returncode).name}")
    raise Failure(said[-1] if said else f"ended with exit code {process.returncode}")
