"""Measurements with their spread, and which differences between them are real.

Two contenders differ if their runs do not overlap and the ratio of their medians is larger than the ratio of the
fastest to the slowest run of either, and than 1.02. With three runs of two equal contenders, this calls one faster in
4 of 100 cases (10 if only the ranges must not overlap); with five runs in 0.2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

__all__ = ["Measurement", "differ", "judge", "measure"]

LEAST_RATIO = 1.02


class Measurement(msgspec.Struct, frozen=True):
    """One quantity, measured several times."""

    median: float
    low: float
    high: float
    runs: list[float]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Measurement:
        """Summarize some runs."""
        return cls(statistics.median(runs), min(runs), max(runs), list(runs))

    @property
    def spread(self) -> float:
        """The ratio of the fastest run to the slowest."""
        return self.high / self.low if self.low > 0 else math.inf


def measure(answers: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, Measurement]:
    """Summarize some quantities of all answers."""
    return {key: Measurement.of([answer[key] for answer in answers]) for key in keys}


def differ(one: Measurement, other: Measurement) -> bool:
    """Return whether two contenders differ by more than noise."""
    above, below = (one, other) if one.median >= other.median else (other, one)
    least = max(above.spread, below.spread, LEAST_RATIO)
    return above.low > below.high and above.median > least * below.median


def judge(speeds: Mapping[str, Measurement]) -> list[str]:
    """Say which contenders are faster than which others, the fastest first, and which cannot be told apart."""
    if len(speeds) < 2:
        return []
    if any(len(speed.runs) < 2 for speed in speeds.values()):
        return ["measured once, so no contender is called faster; pass --repeat 3 or more"]
    groups = _group(speeds)
    verdicts = []
    for better, worse in pairwise(groups):
        slower = speeds[worse[0]].median
        ratio = speeds[better[0]].median / slower if slower else math.inf
        digits = 0 if ratio >= 20 else 1 if ratio >= 1.2 else 2
        verdicts.append(f"{better[0]} is {ratio:.{digits}f}x {worse[0]}")
    equal = (group for group in groups if len(group) > 1)
    return verdicts + [f"{', '.join(group[:-1])} and {group[-1]} cannot be told apart" for group in equal]


def _group(speeds: Mapping[str, Measurement]) -> list[list[str]]:
    """Contenders by speed; those that cannot be told from the fastest of a group belong to it."""
    groups: list[list[str]] = []
    for name in sorted(speeds, key=lambda name: -speeds[name].median):
        if groups and not differ(speeds[groups[-1][0]], speeds[name]):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups
