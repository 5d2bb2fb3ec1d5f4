"""`bench workers`: what each further worker process is worth, on the user's documents and this machine."""

from __future__ import annotations

from tokenmill.bench.documents import Corpus, workplace
from tokenmill.bench.figures import Figure, judge
from tokenmill.bench.measuring import Answer, Failure, Tell, take_turns, watch
from tokenmill.bench.milling import copies_for, make_mill
from tokenmill.bench.reporting import Report, Row, describe_input
from tokenmill.errors import UsageError
from tokenmill.machine import usable_cores

__all__ = ["bench_workers", "worker_counts"]

LEAST_SECONDS = 4.0
SECONDS_PER_WORKER = 0.5
"""One core is kept busy for as long as all workers together, so that the last run is not over at once."""
FEW = 8


def bench_workers(
    inputs: list[str],
    tokenizer: str,
    *,
    text_key: str,
    max_bytes: int | None,
    repeat: int,
    max_workers: int | None,
    tell: Tell,
) -> Report:
    """Tokenize the same documents with 1 to N workers."""
    counts = worker_counts(max_workers or usable_cores())
    with workplace(inputs, tokenizer, text_key) as place:
        tell("reading documents")
        corpus = place.collect(max_bytes or 64_000_000, 0.0)
        seconds = max(LEAST_SECONDS, SECONDS_PER_WORKER * counts[-1])
        copies = copies_for(place, corpus, seconds)
        contenders = [make_mill(_name(count), place, corpus, copies=copies, workers=count) for count in counts]
        report = Report("workers", describe_input(place, corpus))
        memory = {}
        for contender in contenders:
            tell(f"warm-up and memory: {contender.name}")
            try:
                memory[contender.name] = watch(contender.with_settings(gate_first=False))[1]
            except Failure as failure:
                report.leave_out({contender.name: str(failure)})
        turns = take_turns([one for one in contenders if one.name in memory], repeat, tell)
        report.leave_out(turns.failures)
        for count in counts:
            if _name(count) in turns.answers:
                answers, base = turns.answers[_name(count)], turns.answers.get(_name(1))
                report.rows.append(_make_row(count, answers, base, corpus, memory[_name(count)]))
        report.verdicts += judge({row.name: row.figures["mb_per_second"] for row in report.rows})
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


def _make_row(count: int, answers: list[Answer], base: list[Answer] | None, corpus: Corpus, memory: int) -> Row:
    num_bytes = corpus.num_bytes * answers[0]["copies"]
    seconds = [answer["seconds"] for answer in answers]
    figures = {
        "mb_per_second": Figure.of([num_bytes / taken / 1e6 for taken in seconds]),
        "tokens_per_second": Figure.of([answers[0]["num_tokens"] / taken for taken in seconds]),
        "documents_per_second": Figure.of([answers[0]["num_documents"] / taken for taken in seconds]),
        "seconds": Figure.of(seconds),
        "cpu_seconds": Figure.of([answer["cpu_seconds"] for answer in answers]),
        "start_seconds": Figure.of([answer["start_seconds"] for answer in answers]),
    }
    if base is not None:
        # Within a turn, because what slows the machine down for a minute slows both of them down.
        speedups = [one["seconds"] / many["seconds"] for one, many in zip(base, answers, strict=True)]
        figures["speedup"] = Figure.of(speedups)
        figures["efficiency"] = Figure.of([speedup / count for speedup in speedups])
    return Row(_name(count), figures, {"workers": count, "peak_memory_bytes": memory, "copies": answers[0]["copies"]})


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
