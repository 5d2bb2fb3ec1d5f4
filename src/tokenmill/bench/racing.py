"""A benchmark of contenders that encode the same documents: who is measured, in which order, and what is said of it.

Everybody warms up while memory is watched, then they take turns. Who does not come to an end is named with the
reason, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenmill.bench.documents import Corpus
from tokenmill.bench.figures import Figure, judge
from tokenmill.bench.measuring import Answer, Contender, Effort, Failure, take_turns
from tokenmill.bench.reporting import Report

__all__ = ["Finisher", "judge_speed", "make_speeds", "race"]

Memory = TypeVar("Memory")


@dataclass(frozen=True)
class Finisher(Generic[Memory]):
    """A contender that was measured in every turn."""

    name: str
    answers: list[Answer]
    memory: Memory


def race(
    contenders: Sequence[Contender], weigh: Callable[[Contender], Memory], report: Report, effort: Effort
) -> list[Finisher[Memory]]:
    """Weigh everybody, which is their warm-up, and let them take turns; the report names those that failed."""
    memory = {}
    for contender in contenders:
        effort.tell(f"warm-up and memory: {contender.name}")
        try:
            memory[contender.name] = weigh(contender)
        except Failure as failure:
            report.leave_out({contender.name: str(failure)})
    turns = take_turns([one for one in contenders if one.name in memory], effort)
    report.leave_out(turns.failures)
    return [Finisher(name, answers, memory[name]) for name, answers in turns.answers.items()]


def make_speeds(answers: Sequence[Answer], corpus: Corpus) -> dict[str, Figure]:
    """How fast the documents were encoded; some contenders get them several times over."""
    copies = answers[0].get("copies", 1)

    def per_second(amount: float) -> Figure:
        return Figure.of([amount / answer["seconds"] for answer in answers])

    return {
        "mb_per_second": per_second(corpus.num_bytes * copies / 1e6),
        "documents_per_second": per_second(corpus.num_documents * copies),
        "tokens_per_second": per_second(answers[0]["num_tokens"]),
        "seconds": Figure.of([answer["seconds"] for answer in answers]),
        "cpu_seconds": Figure.of([answer["cpu_seconds"] for answer in answers]),
    }


def judge_speed(report: Report) -> None:
    """Say who is faster than whom."""
    report.verdicts += judge({row.name: row.figures["mb_per_second"] for row in report.rows})
