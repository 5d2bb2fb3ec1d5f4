"""tokenmill itself as a contender: a whole run, from files to a finished store.

A run takes a few seconds to start, to load the tokenizer and to hold the parity gate, whatever the size of the
input, and a few megabytes are done in much less. So the clock starts with the first task, the gate is held
before it and not beside it, and documents are given several times over until there is enough to do.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tokenmill.bench.documents import Corpus, Workplace
from tokenmill.bench.measuring import Answer, Contender, tree_cpu_seconds, watch
from tokenmill.engines import choose
from tokenmill.executors.local import start_executor
from tokenmill.pipeline.budget import make_budget
from tokenmill.pipeline.preparing import prepare
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import carry_out
from tokenmill.progress import Display, Preparation, Silence, Snapshot
from tokenmill.store.manifest import read_manifest

__all__ = ["copies_for", "make_mill", "mill", "weigh_mill"]

MOST_COPIES = 1000


def copies_for(place: Workplace, corpus: Corpus, core_seconds: float) -> int:
    """How often the documents are needed to keep one core busy for some seconds."""
    engine = choose(place.tokenizer).engine
    return max(1, min(MOST_COPIES, math.ceil(place.speed(engine, corpus) * core_seconds / corpus.num_bytes)))


def make_mill(name: str, place: Workplace, corpus: Corpus, *, copies: int, workers: int) -> Contender:
    """A contender that tokenizes the documents so many times."""
    settings = {
        "documents": corpus.path,
        "tokenizer": str(place.tokenizer_folder),
        "folder": str(place.folder / "mill"),
        "copies": copies,
        "workers": workers,
        "gate_first": True,
    }
    return Contender(name, "tokenmill.bench.milling:mill", settings)


def mill(documents: str, tokenizer: str, folder: str, copies: int, workers: int, gate_first: bool) -> Answer:
    """Tokenize all copies of the documents; what it took from the first task to the finished store.

    Without `gate_first` everything is as a user's run has it, for a look at memory.
    """
    work = Path(folder)
    shutil.rmtree(work, ignore_errors=True)
    _lay_out(Path(documents), work / "in", copies)
    flags = {"inputs": [str(work / "in")], "out": str(work / "out"), "tokenizer": tokenizer, "workers": workers}
    clock = _Clock()
    try:
        _run(Request.from_flags({**flags, "eos": False, "bos": False}), clock, gate_first=gate_first)
        seconds, cpu_seconds = clock.taken()
        manifest = read_manifest(work / "out")
    finally:
        shutil.rmtree(work)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "start_seconds": clock.start_seconds,
        "num_documents": manifest.num_documents,
        "num_tokens": manifest.num_tokens,
        "copies": copies,
        "workers": workers,
    }


def weigh_mill(contender: Contender) -> int:
    """Peak memory of a run as a user has it, with the gate beside the first tasks."""
    return watch(contender.with_settings(gate_first=False))[1]


class _Clock(Silence):
    """A display that shows nothing and notes when the first task began."""

    def __init__(self) -> None:
        self._started = self._began = time.perf_counter()
        self._cpu_seconds: float | None = None

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """The first moment is shown as soon as tasks have begun."""
        if self._cpu_seconds is None:
            self._began = time.perf_counter() - snapshot.seconds
            self._cpu_seconds = tree_cpu_seconds()

    @property
    def start_seconds(self) -> float:
        """What went before the first task."""
        return self._began - self._started

    def taken(self) -> tuple[float, float]:
        """Seconds of the clock and of the processors since then."""
        return time.perf_counter() - self._began, tree_cpu_seconds() - (self._cpu_seconds or 0.0)


def _run(request: Request, display: Display, *, gate_first: bool) -> None:
    """A whole run; with `gate_first` as one that has no memory to spare: first the gate, then the tasks."""
    with closing(start_executor()) as executor:
        prepared = prepare(request)
        budget = make_budget(request, len(prepared.tokenizer.files[prepared.tokenizer.main_file]))
        budget = replace(budget, gate_beside_tasks=budget.gate_beside_tasks and not gate_first)
        carry_out(prepared, display, executor, budget=budget)


def _lay_out(documents: Path, folder: Path, copies: int) -> None:
    folder.mkdir(parents=True)
    for number in range(copies):
        (folder / f"{number:04d}.jsonl").symlink_to(documents)
