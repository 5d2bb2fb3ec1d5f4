"""Measure what the driver of a cluster spends on an event, with more and more calls under way.

    python benchmarks/driver.py --save

The scheduler runs a real plan on a simulated cluster: every slot has a call, and calls send notes one by one, in turn.
For Ray itself, all calls but a few ask for more memory than there is, so they wait, and two cores are enough; the few
answer at once, one after another.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # `tokenize` here must not hide that of the standard library

import argparse
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenmill as tm
from tokenmill.executors.base import Answer, Call, CallEvent, Capacity, Note, Place, Started, resolve
from tokenmill.executors.ray import RayExecutor
from tokenmill.pipeline.workers.messages import Report, encode
from tokenmill.pipeline.workers.scheduler import GATE

HERE = Path(__file__).resolve().parent
TARGET = "called_by_driver:answer"
PROGRAM = "def answer(post, context, payload):\n    return payload\n"


class Enough(Exception):
    """Ends a run when enough events were counted."""


class Slots:
    """A cluster in this process: the gate is run, and every other call starts, and then sends notes for ever."""

    shares_disk, memory_per_call, may_grow = False, None, False

    def __init__(self, num_slots: int, num_events: int) -> None:
        self.num_slots, self.num_left = num_slots, num_events
        self.running: deque[Any] = deque()
        self.coming: deque[Any] = deque()
        self.note = encode(Report(disk_bytes=1))
        self.seconds = 0.0

    def join(self, num_calls: int | None) -> None: ...

    def pin(self, cpus: Sequence[int]) -> None: ...

    def warm(self, target: str, payload: bytes) -> None: ...

    def close(self) -> None: ...

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        return Capacity(self.num_slots, 4 << 30)

    def submit(self, call: Call) -> None:
        self.coming.append(call)

    def wait(self, timeout: float) -> list[CallEvent]:
        if self.coming:
            call = self.coming.popleft()
            if call.name == GATE:
                return [Answer(call, resolve(call.target)(lambda _: None, call.context, call.payload))]
            self.running.append(call)
            return [Started(call, Place("machine", len(self.running), f"process {len(self.running)}"))]
        if len(self.running) < self.num_slots:
            return []
        self.seconds = self.seconds or time.thread_time()
        if not self.num_left:
            self.seconds = time.thread_time() - self.seconds
            raise Enough
        self.num_left -= 1
        self.running.rotate()
        return [Note(self.running[0], self.note)]


def measure_scheduler(num_slots: int, num_events: int) -> float:
    """Return the microseconds of CPU time that the scheduler takes for a note."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        text.write_text('{"text": "a short document"}\n' * (60 * num_slots))
        slots = Slots(num_slots, num_events)
        try:
            settings = {"task_bytes": 1024, "workers": num_slots, "display": "quiet"}
            tm.tokenize(text, Path(folder) / "store", tokenizer="bytes", executor=slots, **settings)
        except Enough:
            pass
    return slots.seconds / num_events * 1e6


def measure_ray(num_waiting: int, num_answers: int) -> tuple[float, float]:
    """Return the microseconds of CPU time for an answer, of the process and of its main thread."""
    executor = RayExecutor()
    executor.join(2)
    try:
        # More memory than there is: Ray queues these calls and never starts them.
        for number in range(num_waiting):
            executor.submit(Call(f"waiting-{number}", TARGET, b"", b"", memory_bytes=1 << 50))
        submitted = num_ended = 0
        process = thread = 0.0
        while num_ended < num_answers + 20:
            if num_ended == 20 and not process:
                process, thread = time.process_time(), time.thread_time()
            if submitted < num_answers + 20 and submitted - num_ended < 4:
                executor.submit(Call(f"call-{submitted}", TARGET, b"", b"x", memory_bytes=1))
                submitted += 1
                continue
            num_ended += sum(isinstance(event, Answer) for event in executor.wait(1.0))
            if num_ended >= 20 and not process:
                num_answers, process, thread = num_answers + num_ended - 20, time.process_time(), time.thread_time()
        used = time.process_time() - process, time.thread_time() - thread
    finally:
        executor.close()
    return used[0] / num_answers * 1e6, used[1] / num_answers * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[64, 1000, 2000, 10_000])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="write results/driver.md")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp()
    (Path(folder) / "called_by_driver.py").write_text(PROGRAM)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    lines = [
        "# The driver of a Ray cluster",
        "",
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Command: `python benchmarks/driver.py`.",
        "",
        "Microseconds of CPU time. `note` is what the scheduler takes for one; `answer` is what all threads of the",
        "driver take for one with Ray, and `main` the part of the thread that runs tokenmill.",
        "",
        "| calls under way | note | answer | main |",
        "|---|---|---|---|",
    ]
    for count in arguments.calls:
        note = measure_scheduler(count, 20_000)
        process, thread = measure_ray(count, arguments.answers)
        lines.append(f"| {count:,} | {note:,.0f} | {process:,.0f} | {thread:,.0f} |")
        print(lines[-1], flush=True)
    if arguments.save:
        (HERE / "results" / "driver.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
