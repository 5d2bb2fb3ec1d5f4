"""Several datasets as one, in given shares, by closed form: row k of a mixture is found without replay.

A binary tree over the sources splits rows between two halves in the ratio A : T - A. After k rows, the left half
has had `(k * A + phase) // T` of them. Every source stays within three rows of its share at every k (in a balanced
tree with a phase of T/2, within 1.3). The same formula says how many rows a source has given, so weights may change
at any row without losing or repeating one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tokenmill.arguments import one_of, show, whole_number
from tokenmill.dataset.rows import Integers, PackedRows, ResolvedRows, Rows, as_rows, as_seed
from tokenmill.dataset.shuffle import distinct, make_key
from tokenmill.errors import UsageError
from tokenmill.formatting import plural

__all__ = ["MixedRows", "mix"]

OnExhausted = Literal["repeat", "stop", "renormalize"]
LARGEST_TOTAL = 1 << 31
"""Weights are integers with about this sum at most: its square fits 64 bits, and shares are exact to 10^-9."""
NEVER = 1 << 62


def mix(
    sources: Sequence[tuple[Rows, float]],
    *,
    seed: int = 0,
    max_epochs: float | Sequence[float | None] | None = None,
    on_exhausted: OnExhausted = "repeat",
    stages: Mapping[int, Sequence[float]] | None = None,
) -> MixedRows:
    """Interleave the rows of several datasets so that each gives its share of the tokens.

    Weights are token fractions, of any sum. `max_epochs` bounds how often the rows of a source are used, for all
    sources or for each; at the bound the mixture stops, or continues without the source (`renormalize`).
    `stages` changes the weights from a row number on: `{100_000: [0.2, 0.8]}`.
    """
    return MixedRows(sources, seed=seed, max_epochs=max_epochs, on_exhausted=on_exhausted, stages=stages or {})


class MixedRows(Rows):
    """A mixture: a list of stages, each with integer weights and the number of rows that sources gave before it."""

    def __init__(
        self,
        sources: Sequence[tuple[Rows, float]],
        *,
        seed: int,
        max_epochs: float | Sequence[float | None] | None,
        on_exhausted: OnExhausted,
        stages: Mapping[int, Sequence[float]],
    ) -> None:
        pairs = _as_pairs(sources)
        self._sources = [as_rows(rows, "mix") for rows, _ in pairs]
        self._seed = as_seed(seed)
        self._on_exhausted = on_exhausted
        self._weights = {0: [float(_as_number(weight, "a weight")) for _, weight in pairs], **_as_stages(stages)}
        self._max_epochs = _spread(max_epochs, len(self._sources))
        self._check()
        self.is_remote = any(rows.is_remote for rows in self._sources)
        self.has_stages = len(stages) > 0 or any(rows.has_stages for rows in self._sources)
        self.seq_len, self.layout = self._sources[0].seq_len, self._sources[0].layout
        self.align = self._sources[0].align
        bounds = [rows.max_documents for rows in self._sources]
        self.max_documents = None if None in bounds else max(bound for bound in bounds if bound is not None)
        self.num_rows = sum(rows.num_rows for rows in self._sources)
        self._stages = self._make_stages()
        self._starts = [stage.start for stage in self._stages]
        last = self._stages[-1]
        self.limit = last.start if not any(last.weights) else None
        if self.limit is not None:
            self.num_rows = min(self.num_rows, self.limit)
        given = self.counts(self.num_rows)
        self.num_tokens = sum(
            count * rows.num_tokens // rows.num_rows for count, rows in zip(given, self._sources, strict=True)
        )

    def _check(self) -> None:
        if not self._sources:
            raise UsageError("a mixture needs at least one source")
        lengths = sorted({rows.seq_len for rows in self._sources})
        if len(lengths) > 1:
            raise UsageError(f"the sources of a mixture have rows of {lengths} tokens; pack them with one seq_len")
        aligns = sorted({rows.align for rows in self._sources})
        if len(aligns) > 1:
            raise UsageError(f"the sources of a mixture align documents to {aligns} tokens; pack them with one align")
        if len({rows.layout for rows in self._sources}) > 1:
            raise UsageError("a mixture has rows of one kind: pairs, prompts and packed documents do not mix")
        self._check_tokenizers()
        one_of(self._on_exhausted, get_args(OnExhausted), "on_exhausted")
        for epochs in self._max_epochs:
            if epochs is not None and not 0 < epochs < float("inf"):
                raise UsageError(f"max_epochs {epochs!r} must be above 0, or None for no bound")
            if epochs is not None and not any(int(Fraction(str(epochs)) * rows.num_rows) for rows in self._sources):
                raise UsageError(f"max_epochs {epochs!r} is less than one row of any source")
            if epochs is not None and self._on_exhausted == "repeat":
                raise UsageError(
                    f"max_epochs {epochs!r} does not say what comes after it: pass on_exhausted='stop' or 'renormalize'"
                )
        for row, weights in self._weights.items():
            if row < 0:
                raise UsageError(f"a stage cannot begin at row {row}; rows are counted from 0")
            if len(weights) != len(self._sources):
                raise UsageError(f"the stage at row {row} has {len(weights)} weights for {len(self._sources)} sources")
            if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
                raise UsageError(f"weights {weights} must be numbers of at least 0, and not all 0")

    def _check_tokenizers(self) -> None:
        """Raise if two stores were made with different tokenizers: the same id would be another text in each."""
        made: dict[str, str] = {}
        for rows in self._sources:
            for leaf in rows.leaves():
                if leaf.documents.tokenizer is not None:
                    name, sha256 = leaf.documents.tokenizer
                    made.setdefault(sha256, f"{leaf.documents.name} was tokenized with {name} ({sha256[:6]})")
        if len(made) > 1:
            first, other, *_ = made.values()
            raise UsageError(f"{first}, and {other}; mix stores of one tokenizer")

    def _make_stages(self) -> list[_Stage]:
        """Make the given stages, and one more whenever a source is exhausted."""
        bounds = [self._bound(number) for number in range(len(self._sources))]
        changes = sorted(self._weights)
        stages: list[_Stage] = []
        start, given = 0, [0] * len(self._sources)
        owed = [Fraction(0)] * len(self._sources)
        alive = [True] * len(self._sources)
        while True:
            asked = self._weights[changes[bisect_right(changes, start) - 1]]
            weights = self._row_weights([weight * lives for weight, lives in zip(asked, alive, strict=True)])
            stage = _Stage(start, weights, given, make_key(self._seed, 2), owed)
            stages.append(stage)
            upcoming = next((row for row in changes if row > start), NEVER)
            end, exhausted = stage.first_over(bounds, upcoming)
            if end >= NEVER or not any(weights):
                return stages
            owed = stage.owed_at(end)
            start, given = end, stage.counts(end)
            if exhausted is None:
                continue
            if self._on_exhausted == "stop":
                stages.append(_Stage(start, [0] * len(bounds), given, 0, owed))
                return stages
            alive[exhausted] = False

    def _bound(self, number: int) -> int:
        epochs = self._max_epochs[number]
        rows = self._sources[number]
        bound = NEVER if epochs is None else int(Fraction(str(epochs)) * rows.num_rows)
        return bound if rows.limit is None else min(bound, rows.limit)

    def _row_weights(self, fractions: Sequence[float]) -> list[int]:
        """Return integers in the ratio of rows: a token share divided by the tokens in a row of the source."""
        if not any(fractions):
            return [0] * len(fractions)
        shares = [
            Fraction(str(fraction)) * rows.num_rows / rows.num_tokens
            for fraction, rows in zip(fractions, self._sources, strict=True)
        ]
        total = sum(shares)
        shares = [share / total for share in shares]
        scale = min(LARGEST_TOTAL, lcm(*(share.denominator for share in shares)))
        return [max(1, round(share * scale)) if share else 0 for share in shares]

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Resolve the rows of each source in the source."""
        number = np.searchsorted(np.array(self._starts), index, "right") - 1
        found = []
        for stage in distinct(number):
            mine = np.flatnonzero(number == stage)
            for source, at, inner in self._stages[stage].assign(index[mine], mine):
                found += [resolved.among(at) for resolved in self._sources[source].resolve(inner)]
        return found

    def counts(self, num_rows: int) -> list[int]:
        """Count the rows of each source among the first `num_rows`."""
        return self._stages[bisect_right(self._starts, num_rows) - 1].counts(num_rows)

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Find the row in every source, and the row of the mixture at which the source gives it."""
        stop = stop if self.limit is None else min(stop, self.limit)
        found = []
        for source, rows in enumerate(self._sources):
            for number in rows.where(leaf, row, self.counts(stop)[source]):
                found.append(self._row_of(source, number, stop))
        return sorted(found)

    def _row_of(self, source: int, number: int, stop: int) -> int:
        """Find the row of the mixture that is row `number` of a source: after it, the source has given more rows."""
        return bisect_right(range(stop - 1), number, key=lambda row: self.counts(row + 1)[source])

    def fractions(self, num_rows: int | None = None) -> list[float]:
        """Return the token shares of the sources among the first rows, by default those of one epoch."""
        counts = self.counts(self.num_rows if num_rows is None else num_rows)
        tokens = [n * rows.num_tokens / rows.num_rows for n, rows in zip(counts, self._sources, strict=True)]
        return [some / sum(tokens) for some in tokens]

    def describe(self) -> dict[str, Any]:
        """Describe the sources, their weights by stage, and what ends a source."""
        return {
            "kind": "mix",
            "seed": self._seed,
            "on_exhausted": self._on_exhausted,
            "max_epochs": self._max_epochs,
            "stages": {str(row): weights for row, weights in self._weights.items()},
            "sources": [rows.describe() for rows in self._sources],
        }

    def title(self) -> str:
        """Return one line for the tree."""
        changes = "".join(f", at row {row:,}: {weights}" for row, weights in self._weights.items() if row)
        ends = f", ends after {plural(self.limit, 'row')}" if self.limit is not None else ""
        return (
            f"mix, seed {self._seed}: {plural(self.num_rows, 'row')}, {plural(self.num_tokens, 'token')}{changes}{ends}"
        )

    def parts(self) -> list[tuple[str, Rows]]:
        """Return the sources, each labelled with its share of the tokens."""
        return [(f"{share:.2%} ", rows) for share, rows in zip(self.fractions(), self._sources, strict=True)]


class _Node(NamedTuple):
    """A split of rows between two halves of the sources; a half of one source is its number."""

    left_weight: int
    total: int
    phase: int
    left: _Node | int
    right: _Node | int


class _Stage:
    """Weights from row `start` on.

    Before it, sources gave `given` rows, `owed` fewer than their exact shares. The phases make up for this, so that
    rounding errors do not add up from stage to stage.
    """

    def __init__(self, start: int, weights: list[int], given: list[int], key: int, owed: list[Fraction]) -> None:
        self.start = start
        self.weights = weights
        self.given = given
        self._owed = owed
        ordered = sorted((number for number, weight in enumerate(weights) if weight), key=lambda n: (-weights[n], n))
        self._tree = _make_tree(ordered, weights, key, owed) if ordered else None

    def assign(self, index: Integers, at: Integers) -> list[tuple[int, Integers, Integers]]:
        """Return each source that has some of the rows, their places `at`, and their numbers in the source."""
        found: list[tuple[int, Integers, Integers]] = []
        if self._tree is not None:
            self._descend(self._tree, index - self.start, at, found)
        return found

    def _descend(
        self, node: _Node | int, index: Integers, at: Integers, found: list[tuple[int, Integers, Integers]]
    ) -> None:
        if not len(index):
            return
        if isinstance(node, int):
            found.append((node, at, index + self.given[node]))
            return
        periods, places = np.divmod(index, node.total)
        shares, rest = np.divmod(places * node.left_weight + node.phase, node.total)
        before = periods * node.left_weight + shares
        is_left = rest + node.left_weight >= node.total
        self._descend(node.left, before[is_left], at[is_left], found)
        self._descend(node.right, (index - before)[~is_left], at[~is_left], found)

    def counts(self, row: int) -> list[int]:
        """Count the rows that each source has given before a row of this stage."""
        counts = list(self.given)
        if self._tree is not None:
            _count(self._tree, row - self.start, counts)
        return counts

    def owed_at(self, row: int) -> list[Fraction]:
        """Return the exact shares up to a row of this stage, less the rows that were given."""
        total, count = sum(self.weights), row - self.start
        now = zip(self._owed, self.weights, self.counts(row), self.given, strict=True)
        return [owed + Fraction(weight * count, total) - (after - before) for owed, weight, after, before in now]

    def first_over(self, bounds: list[int], end: int) -> tuple[int, int | None]:
        """Find the first row at which a source would exceed its bound, and the source; `end` if there is none."""
        first, which = end, None
        for number, bound in enumerate(bounds):
            if not self.weights[number] or bound >= NEVER:
                continue
            high = min(first, self.start + (bound - self.given[number] + 4) * sum(self.weights))
            last = self._last_within(number, bound, high)
            if last < first:
                first, which = last, number
        return first, which

    def _last_within(self, source: int, bound: int, high: int) -> int:
        """Find the largest row count up to `high` at which a source is within its bound."""
        rows = range(self.start + 1, high + 1)
        return self.start + bisect_right(rows, bound, key=lambda row: self.counts(row)[source])


def _make_tree(ordered: list[int], weights: list[int], key: int, owed: list[Fraction]) -> _Node | int:
    """Split the sources, in order of descending weight, where the halves weigh most equally.

    The phase of a fork comes from the seed, moved by what its left half is owed beyond its share of the debt of both.
    """
    if len(ordered) == 1:
        return ordered[0]
    total = sum(weights[number] for number in ordered)
    sums = np.cumsum([weights[number] for number in ordered])[:-1]
    cut = int(np.argmin(np.abs(2 * sums - total))) + 1
    left_weight = int(sums[cut - 1])
    left, right = ordered[:cut], ordered[cut:]
    owed_left, owed_right = (sum((owed[number] for number in half), Fraction(0)) for half in (left, right))
    moved = make_key(key, *ordered) % total + owed_left * total - left_weight * (owed_left + owed_right)
    return _Node(
        left_weight,
        total,
        min(max(int(moved), 0), total - 1),
        _make_tree(left, weights, key, owed),
        _make_tree(right, weights, key, owed),
    )


def _count(node: _Node | int, num_rows: int, counts: list[int]) -> None:
    if isinstance(node, int):
        counts[node] += num_rows
        return
    left = (num_rows * node.left_weight + node.phase) // node.total
    _count(node.left, left, counts)
    _count(node.right, num_rows - left, counts)


def _spread(max_epochs: Any, num_sources: int) -> list[float | None]:
    if max_epochs is None or isinstance(max_epochs, (Real, str)):
        return [None if max_epochs is None else _as_number(max_epochs, "max_epochs")] * num_sources
    try:
        several = list(max_epochs)
    except TypeError:
        raise UsageError(f"max_epochs {show(max_epochs)} is neither a number nor one for each source") from None
    if len(several) != num_sources:
        raise UsageError(f"max_epochs has {len(several)} numbers for {num_sources} sources")
    return [None if epochs is None else _as_number(epochs, "max_epochs") for epochs in several]


def _as_pairs(sources: Any) -> list[tuple[Any, Any]]:
    """Check that sources come with weights."""
    try:
        pairs = [tuple(source) if isinstance(source, (tuple, list)) else (source,) for source in sources]
    except TypeError:
        pairs = [()]
    if isinstance(sources, (str, Mapping)) or any(len(pair) != 2 for pair in pairs):
        raise UsageError("the sources of a mixture are rows with their weights: mix([(web, 0.7), (code, 0.3)])")
    return [(rows, weight) for rows, weight in pairs]


def _as_stages(stages: Any) -> dict[int, list[float]]:
    try:
        found = {whole_number(row, "the row of a stage"): list(weights) for row, weights in stages.items()}
    except (AttributeError, TypeError):
        raise UsageError(
            f"stages {show(stages)} are not weights by row number, such as {{100_000: [0.2, 0.8]}}"
        ) from None
    return {row: [float(_as_number(weight, "a weight")) for weight in found[row]] for row in sorted(found)}


def _as_number(value: Any, what: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{what} {show(value)} is not a number")
    return int(value) if isinstance(value, Integral) else float(value)
