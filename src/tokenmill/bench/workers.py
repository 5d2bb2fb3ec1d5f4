"""`bench workers`: what each further worker process is worth, on the user's documents and this machine."""

from __future__ import annotations

from tokenmill.bench.documents import MOST_BYTES, Corpus, Source, workplace
from tokenmill.bench.figures import Figure
from tokenmill.bench.measuring import Answer, Effort
from tokenmill.bench.milling import copies_for, make_mill, weigh_mill
from tokenmill.bench.racing import Finisher, judge_speed, make_speeds, race
from tokenmill.bench.reporting import Report, Row, describe_input
from tokenmill.errors import UsageError
from tokenmill.machine import usable_cores

__all__ = ["bench_workers", "worker_counts"]

LEAST_SECONDS = 4.0
SECONDS_PER_WORKER = 0.5
"""One core is kept busy for as long as all workers together, so that the last run is not over at once."""
FEW = 8


def bench_workers(source: Source, effort: Effort, max_workers: int | None = None) -> Report:
    """Tokenize the same documents with 1 to N workers."""
    counts = worker_counts(usable_cores() if max_workers is None else max_workers)
    with workplace(source) as place:
        effort.tell("reading documents")
        corpus = place.collect(effort.max_bytes or MOST_BYTES, 0.0)
        copies = copies_for(place, corpus, max(LEAST_SECONDS, SECONDS_PER_WORKER * counts[-1]))
        contenders = [make_mill(_name(count), place, corpus, copies=copies, workers=count) for count in counts]
        report = Report("workers", describe_input(place, corpus))
        finishers = race(contenders, weigh_mill, report, effort)
        alone = next((finisher.answers for finisher in finishers if finisher.name == _name(1)), None)
        report.rows += [_make_row(finisher, corpus, alone) for finisher in finishers]
        judge_speed(report)
        _explain(report, copies)
    return report


def worker_counts(most: int) -> list[int]:
    """All numbers up to eight; beyond, powers of two and the last."""
    if most < 1:
        raise UsageError(f"--max-workers {most} must be at least 1")
    if most <= FEW:
        return list(range(1, most + 1))
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def _name(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _make_row(finisher: Finisher[int], corpus: Corpus, alone: list[Answer] | None) -> Row:
    answers = finisher.answers
    count = answers[0]["workers"]
    figures = {
        **make_speeds(answers, corpus),
        "start_seconds": Figure.of([answer["start_seconds"] for answer in answers]),
    }
    if alone is not None:
        # Within a turn, because what slows the machine down for a minute slows both of them down.
        speedups = [one["seconds"] / many["seconds"] for one, many in zip(alone, answers, strict=True)]
        figures["speedup"] = Figure.of(speedups)
        figures["efficiency"] = Figure.of([speedup / count for speedup in speedups])
    facts = {"workers": count, "peak_memory_bytes": finisher.memory, "copies": answers[0]["copies"]}
    return Row(finisher.name, figures, facts)


def _explain(report: Report, copies: int) -> None:
    if report.rows:
        start = report.rows[-1].figures["start_seconds"].median
        report.notes.append(
            f"plain JSON lines, the documents {copies} time{'s' if copies > 1 else ''} over; start-up and parity gate "
            f"({start:.1f} s) go before and are not counted"
        )
    cores = usable_cores()
    if report.rows and report.rows[-1].facts["workers"] > cores:
        report.notes.append(f"there are {cores} cores for these workers: more of them cannot help")
