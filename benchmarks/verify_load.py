"""Measure what `verify="background"` costs a loader, in short turns within one process.

    python benchmarks/verify_load.py [--tokens 1000000000] [--pairs 300] [--milliseconds 200] [--save]

One loader steps batches all the time, and the thread that checks files runs in every other turn: of each pair of turns,
in a random one. A machine that others use is then as slow for one turn of a pair as for the other, and the medians of
some hundred pairs show differences of less than a percent. Files are checked again and again, as if the store had no
end; a machine that has checked a store pays nothing. The page that `--save` writes explains the columns.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from load import make_corpus

import tokenmill as tm
from tokenmill.machine import processor_name
from tokenmill.store import background_check

SHAPES = ((2048, 8), (512, 32), (4096, 64))
COLUMNS = """
`wall` is the time of a batch with the check, as a multiple of that without; it needs an idle machine. `cpu` is the same
in CPU time of the thread that steps batches, plus `check`, the share of a core that the check takes. `read` is the
megabytes that it checks in a second. In brackets stands the interval that holds the median with 95% confidence."""


class Turn(NamedTuple):
    """Seconds per batch, and what the check did meanwhile."""

    wall: float
    stepping: float
    check: float
    """The share of one core that the check took."""
    read: float


class EndlessCheck:
    """The thread that checks files: it forgets what it has checked, and its time passes only while it is on."""

    def __init__(self) -> None:
        self._is_on, self._changed = False, threading.Condition()
        self.num_bytes, self.cpu_seconds = 0, 0.0
        rest = background_check._Pace.rest

        def count_and_rest(pace: Any, piece: memoryview) -> None:
            self.num_bytes += len(piece)
            self.cpu_seconds = time.thread_time()
            rest(pace, piece)

        background_check._Pace.rest = count_and_rest  # type: ignore[method-assign]
        background_check._Memory.has = lambda *_: False  # type: ignore[method-assign]
        background_check.time = SimpleNamespace(  # type: ignore[assignment]
            monotonic=time.monotonic, thread_time=time.thread_time, sleep=self._sleep
        )

    def _sleep(self, seconds: float) -> None:
        """Sleep through a part of the turns in which the check is on; else each of these would begin with a read."""
        with self._changed:
            while seconds > 0:
                since, was_on = time.monotonic(), self._is_on
                self._changed.wait(seconds if was_on else None)
                seconds -= time.monotonic() - since if was_on else 0

    def switch(self, is_on: bool) -> None:
        """Let the thread go on, or stop it at its next rest."""
        with self._changed:
            self._is_on = is_on
            self._changed.notify_all()

    def feed(self, loader: Any) -> None:
        """Keep the thread busy with the files that the loader has opened."""
        if not loader._check._num_pending:
            for leaf in loader.rows.leaves():
                for file in leaf.documents.table.files._here.touched.values():
                    loader._check.touch(file)


def run_turn(batches: Iterator[Any], check: EndlessCheck, seconds: float) -> Turn:
    """Step batches for some time."""
    cpu, num_bytes = check.cpu_seconds, check.num_bytes
    began, stepping, count, wall = time.perf_counter(), time.thread_time(), 0, 0.0
    while wall < seconds:
        next(batches)
        count += 1
        wall = time.perf_counter() - began
    stepping = time.thread_time() - stepping
    share, speed = (check.cpu_seconds - cpu) / wall, (check.num_bytes - num_bytes) / wall
    return Turn(wall / count, stepping / count, share, speed)


def run_pairs(loader: Any, num_pairs: int, seconds: float, check: EndlessCheck) -> list[dict[bool, Turn]]:
    """Return pairs of turns, without and with the check."""
    batches = iter(loader)
    check.switch(True)
    for _ in range(200):
        next(batches)
    pairs = []
    for _ in range(num_pairs):
        pair = {}
        for is_on in random.sample((False, True), 2):
            check.feed(loader)
            check.switch(is_on)
            next(batches)
            pair[is_on] = run_turn(batches, check, seconds)
        pairs.append(pair)
    return pairs


def with_interval(values: list[float]) -> str:
    """Format the median, and the interval that holds it with 95% confidence."""
    values, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = (values[max(0, round((len(values) - 1) / 2 + sign * half))] for sign in (-1, 1))
    return f"{statistics.median(values):.4f} [{low:.4f}, {high:.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="size of the store")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of turns of each shape")
    parser.add_argument("--milliseconds", type=int, default=200, help="length of a turn")
    parser.add_argument("--folder", help="where to keep the store; by default it is made anew")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/verify_load.md")
    arguments = parser.parse_args()
    lines = ["| rows | wall | cpu | check | read |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        os.environ["TOKENMILL_CACHE"] = f"{folder}/cache"
        store = make_corpus(Path(arguments.folder or folder), arguments.tokens) / "store"
        check = EndlessCheck()
        print("\n".join(lines), flush=True)
        for shape in SHAPES:
            loader = tm.load(store, *shape, framework="torch", verify="background")
            pairs = run_pairs(loader, arguments.pairs, arguments.milliseconds / 1000, check)
            share, read = (statistics.mean(pair[True][field] for pair in pairs) for field in (2, 3))
            wall, cpu = (
                with_interval([pair[True][field] / pair[False][field] + extra for pair in pairs])
                for field, extra in ((0, 0), (1, share))
            )
            lines.append(f"| {shape[1]} x {shape[0]} | {wall} | {cpu} | {share:.4f} | {read / 1e6:.0f} |")
            print(lines[-1], flush=True)
    if arguments.save:
        (Path(__file__).parent / "results" / "verify_load.md").write_text(render(arguments, lines))


def render(arguments: argparse.Namespace, lines: list[str]) -> str:
    """The page of results."""
    about = (
        f"{processor_name()}, {os.cpu_count()} cores, Python {platform.python_version()}; {os.getloadavg()[2]:.1f} "
        "processes wanted to run on average."
    )
    given = f"--pairs {arguments.pairs} --milliseconds {arguments.milliseconds}"
    command = f"Command: `python benchmarks/verify_load.py --tokens {arguments.tokens} {given} --save`."
    return "\n".join(['# What `verify="background"` costs a loader', "", about, command, COLUMNS, "", *lines, ""])


if __name__ == "__main__":
    main()
