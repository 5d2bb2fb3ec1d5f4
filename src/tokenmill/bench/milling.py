"""tokenmill itself as a contender: a whole run, from files to a finished store.

A run takes a few seconds to start, to load the tokenizer and to hold the parity gate, whatever the size of the
input, and a few megabytes are done in much less. So the clock starts with the first task, the gate is held
before it and not beside it, and documents are given several times over until there is enough to do.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill.bench.documents import Corpus, Workplace
from tokenmill.bench.measuring import Answer, Contender, tree_cpu_seconds
from tokenmill.engines import choose
from tokenmill.progress import Silence, Snapshot

__all__ = ["copies_for", "make_mill", "mill"]

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
    from tokenmill.pipeline import run

    work = Path(folder)
    shutil.rmtree(work, ignore_errors=True)
    _lay_out(Path(documents), work / "in", copies)
    if gate_first:
        _hold_gate_first(run)
    clock = _Clock()
    try:
        store = run.tokenize(
            str(work / "in"), work / "out", tokenizer=tokenizer, display=clock, workers=workers, eos=False, bos=False
        )
        seconds, cpu_seconds = clock.taken()
        num_documents, num_tokens = store.num_documents, store.num_tokens
    finally:
        shutil.rmtree(work)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "start_seconds": clock.start_seconds,
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "copies": copies,
    }


class _Clock(Silence):
    """A display that shows nothing and notes when the first task began."""

    def __init__(self) -> None:
        self._started = self._began = time.perf_counter()
        self._cpu_seconds: float | None = None

    def update(self, snapshot: Snapshot) -> None:
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


def _hold_gate_first(run: Any) -> None:
    """Let this process plan runs as those without memory to spare are planned: first the gate, then the tasks."""
    make_budget = run.make_budget
    run.make_budget = lambda *given: replace(make_budget(*given), gate_beside_tasks=False)


def _lay_out(documents: Path, folder: Path, copies: int) -> None:
    folder.mkdir(parents=True)
    for number in range(copies):
        (folder / f"{number:04d}.jsonl").symlink_to(documents)
