"""Measure the time and memory of choosing documents of a large store.

    python benchmarks/choose.py --documents 100M --save

The store has shards of a million documents with the kept fields `lang` and `score`. They are links to one shard, whose
tokens are a sparse file, so the store takes little disk space. Each choice is made in a fresh process; imports are not
counted. The memory is the growth of anonymous memory: of the process at its most, and what is left after the choice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PER_SHARD = 1_000_000
MEAN_TOKENS = 700

CHOOSE = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
import pyarrow.dataset, pyarrow.parquet
import tokenmill as tm
tm.where, tm.allow, tm.sample, tm.pack, tm.Loader

def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

store = tm.open(sys.argv[1])
numbers = np.sort(np.random.default_rng(0).permutation(len(store.split()))[: len(store.split()) // 10])
before = most = anonymous()
is_done = threading.Event()

def watch():
    global most
    while not is_done.wait(0.01):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
started, busy = time.perf_counter(), time.process_time()
chosen = eval(sys.argv[2])
seconds, busy = time.perf_counter() - started, time.process_time() - busy
is_done.set()
watcher.join()
left = anonymous() - before
found = {"chosen": len(chosen), "seconds": seconds, "busy": busy, "most": most - before, "left": left}
started = time.perf_counter()
next(iter(tm.Loader(tm.shuffle(tm.pack(chosen, seq_len=2048)), batch_size=8)))
found["first"] = time.perf_counter() - started
print(json.dumps(found))
"""

CHOICES = {
    "where(store, \"score > 0.5 and lang == 'en'\")": "tm.where(store, \"score > 0.5 and lang == 'en'\")",
    "where(store, 'num_tokens > 2000')": "tm.where(store, 'num_tokens > 2000')",
    "allow(store, numbers), a tenth": "tm.allow(store, numbers)",
    "sample(store, 0.1)": "tm.sample(store, 0.1)",
    "sample(store, 0.01)": "tm.sample(store, 0.01)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="100M", help="such as 10M; whole millions")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/choose.md")
    arguments = parser.parse_args()
    num_shards = int(arguments.documents.removesuffix("M"))
    lines = [
        "# Choosing documents: measured",
        "",
        f"{num_shards} million documents in {num_shards} shards, {MEAN_TOKENS} tokens on average.",
        f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}.",
        f"Command: `python benchmarks/choose.py --documents {arguments.documents}`; one run.",
        "",
        "`memory`: of the choice, and at most while it is made. `first`: from packing with concat to the first",
        "shuffled batch of 8 x 2,048.",
        "",
        "|  | documents | seconds | of CPU time | memory, MB | at most, MB | first, s |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", num_shards)
        for name, expression in CHOICES.items():
            command = [sys.executable, "-c", CHOOSE, str(store), expression]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            cells = [
                f"{found['chosen']:,}",
                f"{found['seconds']:.1f}",
                f"{found['busy']:.1f}",
                f"{found['left'] / 1e6:.0f}",
            ]
            cells += [f"{found['most'] / 1e6:.0f}", f"{found['first']:.2f}"]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.save:
        (HERE / "results" / "choose.md").write_text(report)


def make_store(folder: Path, num_shards: int) -> Path:
    """Make one shard, and links to it."""
    sys.path.insert(0, str(ROOT))
    from tests.support.stores import seal_store
    from tokenmill.store.manifest import ShardInfo, SplitInfo
    from tokenmill.store.shard import ShardWriter, publish_shard

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, PER_SHARD), 1, 10**6).astype(np.int32)
    flags = {"dtype": "uint16", "keep_keys": ["lang", "score"], "run": "x"}
    writer = ShardWriter(folder, "train/shard-00000-0000", **flags)
    langs = np.array(["en", "de", "fr", "es", "zh"])[rng.integers(0, 5, PER_SHARD)].tolist()
    scores = [f"{score:.6f}" for score in rng.random(PER_SHARD)]
    for first in range(0, PER_SHARD, PER_SHARD // 10):
        some = slice(first, first + PER_SHARD // 10)
        # The file of tokens is replaced by a sparse one below.
        writer.append(
            np.zeros(int(lengths[some].sum()), np.uint16),
            lengths[some],
            inputs=np.zeros(PER_SHARD // 10, np.int32),
            positions=np.arange(first, first + PER_SHARD // 10),
            kept=list(zip(langs[some], scores[some], strict=True)),
        )
    info = writer.finish()
    publish_shard(folder, info, "x")
    tokens = folder / f"{info.name}.bin"
    size = tokens.stat().st_size
    tokens.unlink()
    with tokens.open("wb") as file:
        file.truncate(size)
    shards = [info]
    for number in range(1, num_shards):
        name = f"train/shard-{number:05d}-0000"
        for suffix in info.files:
            os.link(folder / f"{info.name}{suffix}", folder / f"{name}{suffix}")
        shards.append(ShardInfo(name, info.num_documents, info.num_tokens, info.files))
    counts = info.num_documents * num_shards, info.num_tokens * num_shards
    return seal_store(folder, {"train": SplitInfo(*counts, shards)})


if __name__ == "__main__":
    main()
