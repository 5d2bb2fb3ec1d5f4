"""Measure the time to the first batch: of a trillion tokens, and of ten million documents packed by best fit.

    python benchmarks/scale.py --save

The store consists of sparse files, so it takes no disk space. A fresh process opens it under `ulimit -n 1024`; the
clock starts after the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRILLION = 10**12

FIRST_BATCH = """
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import tokenmill as tm
tm.open, tm.pack, tm.shuffle, tm.Loader

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

before, started = resident(), time.perf_counter()
loader = iter(tm.Loader(tm.shuffle(tm.pack(tm.open(sys.argv[1]), seq_len=2048)), batch_size=8))
x, y = next(loader)
print(json.dumps([time.perf_counter() - started, resident() - before]))
"""

BEST_FIT = """
import json, sys, time
import numpy as np
from tokenmill.dataset.pack import pack
from tokenmill.store.documents import Documents
from tokenmill.store.table import ShardTable
lengths = np.clip(np.random.default_rng(0).lognormal(6.05, 1.0, 10_000_000), 1, 10**6).astype(np.int64)
ends = np.cumsum(lengths)
table = ShardTable(["nowhere"], [len(lengths)], [int(ends[-1])], np.dtype("<u2"), {0: (ends - lengths) * 2})
documents = Documents(table, "lengths", "0")
started = time.perf_counter()
rows = pack(documents, seq_len=int(sys.argv[1]), method="best-fit")
rows.spans(np.arange(0, len(rows), len(rows) // 8)[:8])
print(json.dumps([time.perf_counter() - started, rows.report.padding]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scale.md")
    arguments = parser.parse_args()
    lines = [
        "# The first batch",
        "",
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Command: `python benchmarks/scale.py`.",
        f"Median of {arguments.repeat} fresh processes; imports are not counted.",
        "",
        "| 10^12 tokens in | seconds to the first shuffled (8, 2048) batch | memory, MB |",
        "|---|---|---|",
    ]
    for num_shards in (2_000, 20_000):
        with tempfile.TemporaryDirectory() as folder:
            store = make_store(Path(folder) / "store", num_shards)
            seconds, memory = repeat(arguments.repeat, FIRST_BATCH, str(store))
        lines.append(f"| {num_shards:,} shards | {seconds:.3f} | {memory / 1e6:.0f} |")
    lines += ["", "| best fit over 10,000,000 documents | seconds to the first rows | padding |", "|---|---|---|"]
    for seq_len in (2048, 8192, 32768):
        seconds, padding = repeat(arguments.repeat, BEST_FIT, str(seq_len))
        lines.append(f"| rows of {seq_len:,} | {seconds:.2f} | {padding:.4%} |")
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.save:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "scale.md").write_text(report)


def make_store(folder: Path, num_shards: int) -> Path:
    sys.path.insert(0, str(ROOT))
    from tests.support.stores import sparse_store

    return sparse_store(folder, num_shards, TRILLION // num_shards)


def repeat(count: int, program: str, argument: str) -> tuple[float, float]:
    """Return the medians of the two numbers that a program prints."""
    found = []
    for _ in range(count):
        done = subprocess.run([sys.executable, "-c", program, argument], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    first, second = zip(*found, strict=True)
    return statistics.median(first), statistics.median(second)


if __name__ == "__main__":
    main()
