"""Measure what `verify="background"` costs a loader, in turns, as a ratio of medians.

    python benchmarks/verify_load.py [--tokens 1000000000] [--turns 15] [--seconds 4]

Each turn is a process of its own that steps batches for some seconds, with or without the check, in random order. Each
turn has a new cache directory, so files are checked all the time; a machine that has checked a store pays nothing.
`spread` is the interquartile range of the plain turns as a share of their median: a ratio that is nearer to 1 than a
third of it says nothing, as on a machine that others use.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

TURN = """
import sys, time
import tokenmill as tm
store, seq_len, batch_size, seconds, verify = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5] or None
batches = iter(tm.load(store, seq_len, batch_size, framework="torch", verify=verify))
for _ in range(50):
    next(batches)
started, count = time.perf_counter(), 0
while (passed := time.perf_counter() - started) < seconds:
    for _ in range(20):
        next(batches)
    count += 20
print(count * seq_len * batch_size / passed)
"""


def make_store(folder: Path, num_tokens: int) -> Path:
    """Make a store of random ids in documents of 700 tokens, as `load.py` does."""
    from load import make_corpus

    store: Path = make_corpus(folder, num_tokens) / "store"
    return store


def measure(store: Path, shape: tuple[int, int], seconds: int, verify: str) -> float:
    """Tokens per second of one process."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-cache-") as cache:
        command = [sys.executable, "-c", TURN, str(store), *map(str, shape), str(seconds), verify]
        environment = {**os.environ, "TOKENMILL_CACHE": cache}
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="size of the store")
    parser.add_argument("--turns", type=int, default=15, help="turns of each kind and shape")
    parser.add_argument("--seconds", type=int, default=4, help="seconds of a turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        store = make_store(Path(folder), arguments.tokens)
        print(
            f"{'rows':>10}  {'plain':>10}  {'checked':>10}  ratio  spread  (million tokens/s, {arguments.turns} turns)"
        )
        for shape in ((2048, 8), (512, 32), (4096, 64)):
            speeds: dict[str, list[float]] = {"": [], "background": []}
            for _ in range(arguments.turns):
                for verify in random.sample(sorted(speeds), 2):
                    speeds[verify].append(measure(store, shape, arguments.seconds, verify))
            plain, checked = (statistics.median(speeds[verify]) for verify in ("", "background"))
            low, _, high = statistics.quantiles(speeds[""], n=4)
            name = f"{shape[1]} x {shape[0]}"
            figures = (
                f"{plain / 1e6:>10.1f}  {checked / 1e6:>10.1f}  {checked / plain:.3f}  {(high - low) / plain:>6.3f}"
            )
            print(f"{name:>10}  {figures}", flush=True)


if __name__ == "__main__":
    main()
