"""tokenmill itself as a contender: a whole run, from files to a finished store.

Starting a run, loading the tokenizer and the parity gate take a few seconds for any size of input, much longer than a
few megabytes of text. So the clock starts with the first task, the gate runs before the tasks and not beside them, and
the run gets several copies of the documents, until there is enough to do.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tokenmill.display import Display, Preparation, Silence, Snapshot
from tokenmill.engines import choose
from tokenmill.executors import create
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.plan.budget import make_budget
from tokenmill.pipeline.plan.prepare import prepare
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import make_store
from tokenmill.store.manifest import read_manifest
from tokenmill.tools.bench.contenders import Answer, Contender, tree_cpu_seconds
from tokenmill.tools.bench.corpus import Workplace

__all__ = ["count_copies", "make_run", "run_tokenmill"]

MOST_COPIES = 1000
FILE_BYTES = 4_000_000
"""Small documents are copied into files of about this size, so that the run does not measure opening files."""


def count_copies(place: Workplace, core_seconds: float) -> int:
    """How many copies of the documents keep one core busy for some seconds."""
    speed = place.speed(choose(place.tokenizer).engine)
    return max(1, min(MOST_COPIES, math.ceil(speed * core_seconds / place.corpus.num_bytes)))


def make_run(name: str, place: Workplace, *, copies: int, workers: int, parts: Sequence[float] = (1.0,)) -> Contender:
    """A contender that tokenizes some copies of the documents. Memory is measured for these parts of the copies."""
    own = {"folder": str(place.folder / "run"), "copies": copies, "workers": workers, "gate_first": True}
    warm_ups = [{"gate_first": False, "copies": max(1, round(copies * part))} for part in parts]
    return Contender(name, f"{__name__}:run_tokenmill", {**place.settings, **own}, warm_ups)


def run_tokenmill(documents: str, tokenizer: str, folder: str, copies: int, workers: int, gate_first: bool) -> Answer:
    """Tokenize all copies of the documents, and measure from the first task to the finished store.

    Without `gate_first` the gate runs beside the first tasks, as for a user, so that memory can be measured.
    """
    work = Path(folder)
    shutil.rmtree(work, ignore_errors=True)
    _lay_out(Path(documents), work / "in", copies)
    flags = {"inputs": [str(work / "in")], "out": str(work / "out"), "tokenizer": tokenizer, "workers": workers}
    clock = _Clock()
    try:
        _run(Request.from_flags({**flags, "eos": False, "bos": False}), clock, gate_first=gate_first)
        taken = clock.read()
        manifest = read_manifest(work / "out")
    finally:
        shutil.rmtree(work)
    return {**taken, "num_tokens": manifest.num_tokens, "copies": copies, "workers": workers}


class _Clock(Silence):
    """A display that shows nothing and notes when the first task began."""

    def __init__(self) -> None:
        self._started = self._began = time.perf_counter()
        self._cpu_seconds: float | None = None

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Start the clock at the first snapshot, which comes as soon as tasks have begun."""
        if self._cpu_seconds is None:
            self._began = time.perf_counter() - getattr(snapshot, "work_seconds", snapshot.seconds)
            self._cpu_seconds = tree_cpu_seconds()

    def read(self) -> dict[str, float]:
        """Wall time and CPU time since the first task began, and the time before it."""
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": tree_cpu_seconds() - (self._cpu_seconds or 0.0),
            "start_seconds": self._began - self._started,
        }


def _run(request: Request, display: Display, *, gate_first: bool) -> None:
    """Run; with `gate_first` like a run that has no memory to spare, which starts its tasks after the gate."""
    with closing(create("local", PRELOAD)) as executor:
        prepared = prepare(request)
        budget = make_budget(request, len(prepared.tokenizer.files[prepared.tokenizer.main_file]))
        budget = replace(budget, gate_first=gate_first)
        make_store(prepared, display, executor, budget=budget)


def _lay_out(documents: Path, folder: Path, copies: int) -> None:
    """Make files that hold the documents `copies` times; large ones are links to the same file."""
    folder.mkdir(parents=True)
    data = documents.read_bytes()
    per_file = max(1, min(copies, FILE_BYTES // len(data)))
    repeated = folder.parent / "repeated.jsonl"
    repeated.write_bytes(data * per_file)
    num_files, rest = divmod(copies, per_file)
    for number in range(num_files):
        (folder / f"{number:04d}.jsonl").symlink_to(repeated)
    if rest:
        (folder / f"{num_files:04d}.jsonl").write_bytes(data * rest)
