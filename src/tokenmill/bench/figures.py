"""Figures with their spread, and what may be said about them.

A difference is called one when the runs of both do not overlap and the ratio of their medians is larger than
the ratio of the fastest to the slowest run of either, and than 1.02. Of two contenders that are equal, three runs
each, this calls one faster in 4 of 100 cases (10 if ranges only must not overlap); with five runs in 0.2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

__all__ = ["Figure", "differ", "judge"]

LEAST_RATIO = 1.02


class Figure(msgspec.Struct, frozen=True):
    """One quantity, measured several times."""

    median: float
    low: float
    high: float
    runs: list[float]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Figure:
        """The figure of some runs."""
        return cls(statistics.median(runs), min(runs), max(runs), list(runs))

    @property
    def spread(self) -> float:
        """The fastest run to the slowest."""
        return self.high / self.low if self.low > 0 else math.inf


def differ(one: Figure, other: Figure) -> bool:
    """Whether two contenders can be told apart."""
    above, below = (one, other) if one.median >= other.median else (other, one)
    least = max(above.spread, below.spread, LEAST_RATIO)
    return above.low > below.high and above.median > least * below.median


def judge(figures: Mapping[str, Figure], what: str = "faster") -> list[str]:
    """Who is ahead of whom and by how much, best first; who cannot be told apart is said so.

    A group is everybody who cannot be told from the best of it.
    """
    if len(figures) < 2:
        return []
    if any(len(figure.runs) < 2 for figure in figures.values()):
        return [f"measured once, so nobody is called {what}; pass --repeat 3 or more"]
    groups = _group(figures)
    verdicts = []
    for better, worse in pairwise(groups):
        ratio = figures[better[0]].median / figures[worse[0]].median if figures[worse[0]].median else float("inf")
        verdicts.append(f"{better[0]} is {_times(ratio)} {worse[0]}")
    return verdicts + [f"{_list(group)} cannot be told apart" for group in groups if len(group) > 1]


def _group(figures: Mapping[str, Figure]) -> list[list[str]]:
    groups: list[list[str]] = []
    for name in sorted(figures, key=lambda name: -figures[name].median):
        if groups and not differ(figures[groups[-1][0]], figures[name]):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 1.2 else f"{ratio:.2f}x"


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
