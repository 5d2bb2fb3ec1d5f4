"""The figures of a report as plain values: what `--json` writes and what the page shows are the same."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.pipeline.observer import RunInfo

__all__ = [
    "Checks",
    "DrawnRow",
    "DrawnSegment",
    "Example",
    "Figures",
    "Filling",
    "Grouping",
    "LengthBin",
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
    """Of the tokens that were looked at; None where there were none."""
    trained_share: float | None
    """Of the same tokens; None in a store that is not supervised."""
    file_bytes: int | None = None


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """Totals by input, where `key` is None, or by a kept field; those with the most tokens come first."""

    key: str | None
    is_language: bool
    num_values: int
    rows: list[Totals]
    others: Totals | None
    """The values that are not among the rows, together."""


class LengthBin(msgspec.Struct, frozen=True, kw_only=True):
    """Documents whose number of tokens is from `start` up to `stop`."""

    start: int
    stop: int
    num_documents: int
    num_tokens: int


class SplitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One split: its totals, how it lies on disk, and how long its documents are."""

    totals: Totals
    num_shards: int
    store_bytes: int
    mean_tokens: float
    median_tokens: float
    shortest_tokens: int
    longest_tokens: int
    bins: list[LengthBin]


class DrawnSegment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a document that is in a row."""

    document: int
    start: int
    num_tokens: int
    is_cut_before: bool
    is_cut_behind: bool


class DrawnRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a picture."""

    number: int
    segments: list[DrawnSegment]
    num_more_documents: int
    """Behind the last segment, where a row has too many to draw."""
    num_more_tokens: int


class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """How one packing fills rows; `problem` says why it cannot, and then there are no figures."""

    method: str
    long_documents: str
    problem: str | None = None
    num_rows: int = 0
    num_tokens: int = 0
    padding: float = 0.0
    num_cut_documents: int = 0
    """Documents that are in more than one row, or not in full."""
    num_lost_tokens: int = 0
    """Cut off, or left over at the end."""
    rows: list[DrawnRow] = []


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a token was seen."""

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
    """What was seen in the tokens that were looked at."""

    num_seen: int
    is_everything: bool
    vocab_size: int
    num_unused: int
    frequent: list[TokenCount]
    coverage: list[tuple[int, float]]
    """The share of all tokens seen that the most frequent ones make up, by how many those are."""
    runs: list[LongRun]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A document to look at, and what is odd about it."""

    split: str
    document: int
    num_tokens: int
    detail: str


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Something that may be wrong with documents, how many have it, and the worst of them."""

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
    num_mismatches: int
    num_rerouted: int
    num_files: int
    num_bytes: int
    problems: list[str]
    verified: list[tuple[str, str]] | None
    """What `verify` counted; None where it was not run."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report says of a store."""

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
    """Documents of the first split that are longer than a row."""
    long_token_share: float
    """The tokens of these."""
    fillings: list[Filling]
    tokens: TokenFigures
    suspicions: list[Suspicion]
    checks: Checks
    run: RunInfo | None
    """How the run went, as `run.json` has it."""
    settings: dict[str, Any]
