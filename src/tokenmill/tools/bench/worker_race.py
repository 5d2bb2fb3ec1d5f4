"""`bench workers`: how much each further worker process gains, on the user's documents and this machine."""

from __future__ import annotations

import math

from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.machine import usable_cores
from tokenmill.tools.bench.bench_report import BenchReport, BenchResult
from tokenmill.tools.bench.contenders import Effort, Finisher
from tokenmill.tools.bench.corpus import BenchInput, Corpus, workplace
from tokenmill.tools.bench.measurement import Measurement, measure
from tokenmill.tools.bench.whole_run import count_copies, make_run

__all__ = ["bench_workers", "worker_counts"]

LEAST_SECONDS = 4.0
SECONDS_PER_WORKER = 0.5
"""One core gets as much work as all workers together, so that the last run is not over at once."""
FEW = 8


def bench_workers(source: BenchInput, effort: Effort, max_workers: int | None = None) -> BenchReport:
    """Tokenize the same documents with 1 to N workers."""
    counts = worker_counts(usable_cores() if max_workers is None else max_workers)
    # As many documents as there are, up to the usual limit: the copies decide how long a run takes.
    with workplace(source, effort, math.inf) as place:
        copies = count_copies(place, max(LEAST_SECONDS, SECONDS_PER_WORKER * counts[-1]))
        contenders = [make_run(plural(count, "worker"), place, copies=copies, workers=count) for count in counts]
        report = BenchReport("workers", place.describe())
        report.race(contenders, effort, lambda finisher: _make_result(finisher, place.corpus))
    _compare_with_one(report.rows)
    _explain(report, copies)
    return report


def worker_counts(most: int) -> list[int]:
    """All numbers up to eight; beyond, powers of two and the last."""
    if most < 1:
        raise UsageError(f"--max-workers {most} must be at least 1")
    if most <= FEW:
        return list(range(1, most + 1))
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def _make_result(finisher: Finisher, corpus: Corpus) -> BenchResult:
    answers = finisher.answers
    figures = {**corpus.speeds(answers), **measure(answers, "start_seconds")}
    facts = {"workers": answers[0]["workers"], "peak_memory_bytes": finisher.peaks[-1], "copies": answers[0]["copies"]}
    return BenchResult(finisher.contender.name, figures, facts)


def _compare_with_one(rows: list[BenchResult]) -> None:
    """Add speedup and efficiency to all rows, if a single worker was measured."""
    if not rows or rows[0].facts["workers"] != 1:
        return
    alone = rows[0].figures["seconds"].runs
    for row in rows:
        # Compared within a turn, because anything that slows down the machine for a minute slows down both.
        speedups = [one / many for one, many in zip(alone, row.figures["seconds"].runs, strict=True)]
        row.figures["speedup"] = Measurement.of(speedups)
        row.figures["efficiency"] = Measurement.of([speedup / row.facts["workers"] for speedup in speedups])


def _explain(report: BenchReport, copies: int) -> None:
    if not report.rows:
        return
    start = report.rows[-1].figures["start_seconds"].median
    report.notes.append(
        f"plain JSON lines, the documents {plural(copies, 'time')} over; the start-up and the parity gate before it "
        f"({start:.1f} s) are not counted"
    )
    cores = usable_cores()
    if report.rows[-1].facts["workers"] > cores:
        report.notes.append(f"there are {cores} cores for these workers: more of them cannot help")
