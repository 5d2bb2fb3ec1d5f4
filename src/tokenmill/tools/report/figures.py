"""The figures of a report as plain values, which `--json` writes and the page shows."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.formatting import plural
from tokenmill.pipeline.journal.attempts import RunInfo
from tokenmill.tools.inspect.statistics import LengthCount

__all__ = [
    "Checks",
    "DrawnRow",
    "DrawnSegment",
    "Example",
    "Figures",
    "Filling",
    "Grouping",
    "LongRun",
    "SplitFigures",
    "Suspicion",
    "TokenCount",
    "TokenFigures",
    "Totals",
]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Documents and tokens of a split, an input or a value of a kept field."""

    name: str
    num_documents: int
    num_tokens: int
    bytes_per_token: float | None
    """Of the sampled tokens; None if there are none."""
    trained_share: float | None
    """Of the same tokens; None if the store is not supervised."""
    file_bytes: int | None = None


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """Totals by input, if `key` is None, or by a kept field; those with the most tokens come first."""

    key: str | None
    is_language: bool
    num_values: int
    rows: list[Totals]
    others: Totals | None
    """All values that are not among the rows."""


class SplitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One split: its totals, its size on disk, and how long its documents are."""

    totals: Totals
    num_shards: int
    store_bytes: int
    mean_tokens: float
    median_tokens: float
    shortest_tokens: int
    longest_tokens: int
    bins: list[LengthCount]


class DrawnSegment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a document that is in a row."""

    document: int
    start: int
    num_tokens: int
    is_cut_before: bool
    is_cut_behind: bool


class DrawnRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a drawing."""

    number: int
    segments: list[DrawnSegment]
    num_more_documents: int
    """After the last segment, if a row has too many to draw."""
    num_more_tokens: int


class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """How one packing fills rows. If it cannot, `problem` says why, and there are no figures."""

    method: str
    long_documents: str
    problem: str | None = None
    num_rows: int = 0
    num_tokens: int = 0
    padding: float = 0.0
    num_cut_documents: int = 0
    """Documents that are in more than one row or truncated."""
    num_lost_tokens: int = 0
    """Truncated, or left over at the end."""
    left_out: dict[str, int] = {}
    """Preference pairs without a row, by reason."""
    row_len: int = 0
    rows: list[DrawnRow] = []


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a token occurs in the sample."""

    id: int
    text: str
    count: int


class LongRun(msgspec.Struct, frozen=True, kw_only=True):
    """The longest run of a token, and where it is."""

    id: int
    text: str
    num_tokens: int
    split: str
    document: int


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the sampled tokens."""

    num_seen: int
    is_everything: bool
    vocab_size: int
    num_unused: int
    frequent: list[TokenCount]
    coverage: list[tuple[int, float]]
    """Pairs of a number of most frequent tokens and their share of the sample."""
    runs: list[LongRun]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A document to look at, and what is odd about it."""

    split: str
    document: int
    num_tokens: int
    detail: str


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """A possible defect of documents, how many have it, and the worst of them."""

    name: str
    meaning: str
    num_documents: int
    num_looked_at: int
    examples: list[Example]


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """How the ids and the files were checked."""

    engine: str
    reference: str | None
    num_compared: int
    num_compared_bytes: int
    num_awkward: int
    num_compared_later: int
    """Documents that were compared while the tasks ran."""
    num_mismatches: int
    num_rerouted: int
    num_files: int
    num_bytes: int
    problems: list[str]
    verified: list[tuple[str, str]] | None
    """What `verify` counted; None if it did not run."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a report."""

    store: str
    fingerprint: str
    tokenizer: str
    tokenizer_kind: str
    vocab_size: int
    dtype: str
    bos: str
    eos: str
    special_tokens: str
    store_bytes: int
    num_documents: int
    num_tokens: int
    num_documents_in: int
    rejects: dict[str, int]
    bytes_per_token: float | None
    is_supervised: bool
    splits: list[SplitFigures]
    groupings: list[Grouping]
    ungrouped: list[str]
    """Kept fields that have too many different values for a table."""
    seq_len: int
    long_document_share: float
    """The share of documents of the first split that are longer than a row."""
    long_token_share: float
    """The share of tokens that are in these documents."""
    fillings: list[Filling]
    tokens: TokenFigures
    suspicions: list[Suspicion]
    checks: Checks
    run: RunInfo | None
    """The history of the run, from `run.json`."""
    settings: dict[str, Any]

    def __repr__(self) -> str:
        totals = f"{plural(self.num_documents, 'document')}, {plural(self.num_tokens, 'token')}"
        problems = f", {plural(len(self.checks.problems), 'problem')}" if self.checks.problems else ""
        return f"Figures({self.store}: {totals}{problems})"
