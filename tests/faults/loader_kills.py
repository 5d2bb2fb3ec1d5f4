"""Kill ranks and workers of torch loaders at random instants; resume from their states with other world sizes.

    python tests/faults/loader_kills.py [ROWS]

Every rank records the rows of each batch and its state after it, like a trainer that saves a checkpoint in each step.
After a kill, all ranks resume from the last step that all of them recorded. The rows of all steps, in order, must be
those of one undisturbed loader.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

sys.path.insert(0, str(Path(__file__).parents[2]))
import tokenmill as tm
from tests.faults import _shim, kills
from tests.faults._tally import Tally

NUM_ROWS = 400_000
SEQ_LEN, STEPS = 32, 400
FORK = multiprocessing.get_context("fork")


def hashes(inputs: Any) -> list[int]:
    return [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in inputs]


def make_loader(store: Path, batch_size: int, **settings: Any) -> Any:
    return tm.load(store, SEQ_LEN, batch_size, framework="torch", seed=3, **settings)


def run_rank(store: Path, state: dict[str, Any] | None, settings: dict[str, Any], notes: Path) -> None:
    """Run one rank, which records each batch and the state after it."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    loader = make_loader(store, **settings)
    if state is not None:
        loader.load_state_dict(state)
    with notes.open("w") as file:
        for _, batch in zip(range(STEPS), loader, strict=False):
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch.inputs
            file.write(json.dumps([hashes(inputs), loader.state_dict()]) + "\n")
            file.flush()


def read_notes(path: Path) -> list[tuple[list[int], dict[str, Any]]]:
    """The complete lines; a kill may have cut off the last."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


class Training:
    """One endless training whose next row is known."""

    def __init__(self, folder: Path, store: Path, tally: Tally, rng: random.Random) -> None:
        self._folder, self._store, self._tally, self._rng = folder, store, tally, rng
        self._state: dict[str, Any] | None = None
        self._reference = iter(make_loader(store, 1000))
        self._known: list[int] = []
        self.num_rows = 0

    def one_round(self) -> None:
        """Start ranks, kill some of their processes, and check the steps that all ranks noted."""
        rng, world_size = self._rng, self._rng.randint(1, 4)
        settings = {
            "batch_size": rng.choice((4, 8, 32)),
            "world_size": world_size,
            "num_workers": rng.choice((0, 0, 2)),
        }
        notes = [self._folder / f"{rank}.jsonl" for rank in range(world_size)]
        for path in notes:
            path.unlink(missing_ok=True)
        ranks = [
            FORK.Process(target=run_rank, args=(self._store, self._state, {**settings, "rank": rank}, notes[rank]))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        finding = self._kill_some(ranks)
        found = [read_notes(path) for path in notes]
        num_steps = min(map(len, found))
        for step in range(num_steps):
            rows = [row for rank in found for row in rank[step][0]]
            finding = finding or self._compare(rows)
        if num_steps:
            states = [rank[num_steps - 1][1] for rank in found]
            if any(state["next_row"] != self.num_rows for state in states):
                finding = finding or f"states at {[state['next_row'] for state in states]}, rows at {self.num_rows}"
            self._state = rng.choice(states)
        self._tally.note("rows", sum(len(rows) for rank in found for rows, _ in rank[:num_steps]))
        self._tally.case(f"{settings} at row {self.num_rows}", finding)

    def _compare(self, rows: list[int]) -> str:
        """Check that a step has the next rows of the undisturbed loader, on any rank."""
        while len(self._known) < len(rows):
            batch = next(self._reference)
            self._known += hashes(batch[0] if isinstance(batch, (tuple, list)) else batch.inputs)
        expected, self._known = self._known[: len(rows)], self._known[len(rows) :]
        self.num_rows += len(rows)
        return "" if sorted(rows) == sorted(expected) else f"other rows before row {self.num_rows}"

    def _kill_some(self, ranks: list[Any]) -> str:
        """Kill a rank, one of its workers, or all ranks; the others end after their steps."""
        time.sleep(self._rng.uniform(0.05, 1.0))
        kind = self._rng.choice(("rank", "worker", "all"))
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            chosen = psutil.Process(self._rng.choice(ranks).pid)
            targets = {"rank": [chosen], "worker": chosen.children()[:1], "all": ranks}[kind]
            for target in targets:
                os.kill(target.pid, signal.SIGKILL)
                self._tally.note(f"killed ({kind})")
        hanging = False
        for process in ranks:
            process.join(_shim.SECONDS)
            if process.is_alive():
                hanging = True
                process.kill()
        return f"a rank does not end after a kill of {kind}" if hanging else ""


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROWS
    tally, rng = Tally("loader_kills"), random.Random(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        inputs = kills.make_corpus(folder / "corpus")
        assert _shim.run(kills.command(inputs, folder / "store", "bytes")).code == 0
        training = Training(folder, folder / "store", tally, rng)
        while training.num_rows < num_rows and tally.num_findings < 5:
            training.one_round()
    tally.end()


if __name__ == "__main__":
    main()
