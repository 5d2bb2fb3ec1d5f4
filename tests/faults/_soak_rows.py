"""The loader half of the soak: a process steps rows, and is killed and resumed from the last state that it wrote.

Token p of the store is the number p, so a row names itself. Each epoch of the shuffled rows must have every row once:
their numbers are added up and compared with the sum of all. After each resume, the first batch must be the one that a
loader which was never disturbed gives at this place. Batch size and number of ranks change with every resume.

    python tests/faults/_soak_rows.py FOLDER SEED        one such process, until it is killed or the rows are done
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

import tokenmill as tm
from tests.support.stores import make_store

SEQ_LEN = 16
NUM_ROWS = 1 << 20
STRETCH = 1 << 23
"""Rows between two resumes within one process, each with a loader of its own."""
KINDS = ("shuffle", "best-fit", "mix")


def make_rows_store(folder: Path) -> Path:
    """A store whose token p is p; one more than the rows need, because the last one has a target."""
    lengths = np.random.default_rng(0).integers(1, 600, 100_000)
    ends = np.minimum(np.cumsum(lengths), NUM_ROWS * SEQ_LEN + 1)
    starts = np.concatenate([[0], ends[:-1]])
    documents = [range(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True) if end > start]
    return make_store(folder, [list(document) for document in documents], num_shards=7, dtype="int32")


def make_rows(store: Path, kind: str) -> tm.Rows:
    """The rows of one kind; only those of `shuffle` have every token once in every epoch."""
    opened = tm.open(store)
    if kind == "best-fit":
        return tm.shuffle(tm.pack(opened, seq_len=SEQ_LEN, method="best-fit"), seed=2)
    plain = tm.shuffle(tm.pack(opened, seq_len=SEQ_LEN), seed=1)
    if kind == "shuffle":
        return plain
    other = tm.shuffle(tm.pack(opened, seq_len=SEQ_LEN, method="pad"), seed=3)
    return tm.mix([(plain, 0.7), (other, 0.3)], seed=4)


class Stepper:
    """Steps rows of three kinds in turn, and keeps its state across kills in one file."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path = folder / "rows.json"
        self._rng = random.Random(seed)
        self._rows = {kind: make_rows(folder / "store", kind) for kind in KINDS}
        self._truth = {kind: tm.Loader(rows, batch_size=64, dtype=np.int32) for kind, rows in self._rows.items()}
        self._all = sum(range(NUM_ROWS))
        assert len(self._rows["shuffle"]) == NUM_ROWS
        self.kept: dict[str, Any] = {
            "rows": 0, "resumes": 0, "epochs": 0, "sampled": 0, "findings": [], "states": {}, "sums": {}, "wanted": 0
        }  # fmt: skip
        if self._path.exists():
            self.kept.update(json.loads(self._path.read_text()))

    def step_all(self) -> None:
        """Continue until the wanted number of rows is done."""
        self._log("start")
        while self.kept["rows"] < self.kept["wanted"] and not self.kept["findings"]:
            # Spend most of the time on the rows that are all counted.
            self._step(self._rng.choices(KINDS, (8, 1, 1))[0])
            self._log("stretch")

    def _step(self, kind: str) -> None:
        world_size, batch_size = self._rng.choice((1, 2, 4)), self._rng.choice((256, 1024, 4096, 8192))
        state, sum_so_far = self.kept["states"].get(kind), self.kept["sums"].get(kind, 0)
        loaders = [
            tm.Loader(
                self._rows[kind], batch_size=batch_size, rank=rank, world_size=world_size, dtype=np.int32,
                prefetch=self._rng.choice((0, 0, 2)),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        first = loaders[0].state_dict()["next_row"]
        row = first
        for batches in zip(*loaders, strict=True):
            if row == first:
                self._compare(kind, row, np.concatenate([batch.inputs for batch in batches]))
            for batch in batches:
                row += len(batch.inputs)
                sum_so_far += int(batch.inputs[:, 0].sum(dtype=np.int64)) if kind == "shuffle" else 0
            if kind == "shuffle" and row % NUM_ROWS == 0:
                if sum_so_far != self._all * SEQ_LEN:
                    self.kept["findings"].append(f"rows of the epoch before row {row} sum up to {sum_so_far}")
                sum_so_far = 0
                self.kept["epochs"] += 1
            if row - first >= STRETCH and row % NUM_ROWS == 0:
                break
        self.kept["rows"] += row - first
        self.kept["resumes"] += 1
        self.kept["states"][kind] = json.loads(json.dumps(loaders[-1].state_dict()))
        self.kept["sums"][kind] = sum_so_far
        self._write()

    def _compare(self, kind: str, row: int, found: Any) -> None:
        """Compare some rows of a batch with those of a loader that only ever seeks."""
        truth = self._truth[kind]
        for _ in range(4):
            at = self._rng.randrange(len(found) - 64)
            truth.seek(row + at)
            wanted = next(iter(truth)).inputs
            self.kept["sampled"] += 64
            if not np.array_equal(found[at : at + 64], wanted):
                self.kept["findings"].append(f"{kind}: rows {row + at} to {row + at + 64} differ after a resume")

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.kept))
        new.replace(self._path)

    def _log(self, event: str) -> None:
        """Add a line with the time, memory and descriptors of this process."""
        gc.collect()
        fields = Path("/proc/self/status").read_text().split("\n")
        memory = next(line.split()[1] for line in fields if line.startswith("RssAnon"))
        line = [
            event,
            os.getpid(),
            round(time.time(), 1),
            self.kept["rows"],
            int(memory),
            len(os.listdir("/proc/self/fd")),
        ]
        with self._path.with_suffix(".log").open("a") as log:
            log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    Stepper(Path(sys.argv[1]), int(sys.argv[2])).step_all()
