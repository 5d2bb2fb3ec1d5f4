"""What a dataset of rows is: `Rows` for any tree of packings, shuffles and mixtures, `PackedRows` for its leaves.

A dataset answers one question: which tokens are in row i? A packing answers it with *spans* of a store. Shuffles,
mixtures and slices pass the question on with other row numbers (`resolve`), for thousands of rows at once. So a
tree of any depth costs only its index arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.arguments import MOST_ROWS, name_kind, show, whole_number
from tokenmill.dataset.packing_report import PackingReport
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource
from tokenmill.store.table import Integers

__all__ = [
    "PADDING",
    "DerivedRows",
    "Integers",
    "NoSuchRow",
    "PackedRows",
    "ResolvedRows",
    "Rows",
    "Segments",
    "Spans",
    "aligned",
    "as_documents",
    "as_rows",
    "as_seed",
    "join_segments",
    "refuse_special",
    "row_number",
    "unique_leaves",
]


MOST_KEPT_STARTS = 4_000_000
"""Up to this many documents, their first tokens are kept in memory, eight bytes each; beyond, the index is read."""


PADDING = -1
"""The document number of the padding after the last document of a row."""


class NoSuchRow(UsageError, IndexError):
    """A row number out of range. It is an IndexError, so that it ends a plain `for` over an object with indices."""


class Spans(NamedTuple):
    """The pieces of documents that make each row: row i is those from `ends[i - 1]` up to `ends[i]`, joined."""

    ends: Integers
    starts: Integers
    lengths: Integers


class Segments(NamedTuple):
    """The documents in rows: row i has those from `ends[i - 1]` up to `ends[i]`.

    `starts` are positions in the row. `is_end` says which documents have their last token in the segment.
    """

    ends: Integers
    starts: Integers
    lengths: Integers
    documents: Integers
    is_end: npt.NDArray[np.bool_]


def join_segments(parts: list[tuple[Integers, Segments]], num_rows: int) -> Segments:
    """Join the segments of several packings; each part comes with the places of its rows among `num_rows`.

    A row that is in no part has no segments.
    """
    if len(parts) == 1 and len(parts[0][0]) == num_rows:
        return parts[0][1]
    if not parts:
        none = np.zeros(0, np.int64)
        return Segments(np.zeros(num_rows, np.int64), none, none, none, np.zeros(0, bool))
    counts = [np.diff(segments.ends, prepend=0) for _, segments in parts]
    rows = np.concatenate([places.repeat(some) for (places, _), some in zip(parts, counts, strict=True)])
    order = np.argsort(rows, kind="stable")
    starts, lengths, documents, is_end = (
        np.concatenate([segments[field] for _, segments in parts])[order] for field in range(1, 5)
    )
    return Segments(np.cumsum(np.bincount(rows, minlength=num_rows)), starts, lengths, documents, is_end)


class ResolvedRows(NamedTuple):
    """Rows of one packing by number, and their places among the rows that were asked for.

    `at` is None if the packing has all of the rows, in order.
    """

    rows: PackedRows
    at: Integers | None
    numbers: Integers

    def among(self, at: Integers) -> ResolvedRows:
        """Return the same rows as a part of more rows, at these places."""
        return self._replace(at=at if self.at is None else at[self.at])


class Rows(ABC):
    """Rows of `seq_len` tokens by number; an index past the end is the next epoch."""

    seq_len: int
    num_rows: int
    """Rows of one epoch."""
    num_tokens: int
    """Tokens of one epoch, without padding."""
    limit: int | None = None
    """The number of rows in all epochs; None if they never end."""
    is_known: bool = True
    """Whether the number of rows in an epoch is known; it is not while the text is being tokenized."""
    bottleneck: str | None = None
    """What a trainer waits for if the loader is not to blame, and what to do about it."""
    is_remote: bool = False
    """Whether tokens have to be fetched from an object store."""
    has_stages: bool = False
    """Whether the rows contain a mixture whose weights change at some row."""
    window_ends: Integers | None = None
    """The row after each window of rows that should be read together; None if a shuffle may be global."""
    max_documents: int | None = None
    """The most documents that a row has; None if there is no bound."""
    align: int = 1
    """Documents begin at multiples of this many tokens in a row, with padding before them."""
    layout: str | None = None
    """The only layout of batches of these rows; None if they have the layouts of trainers."""

    @property
    def vocab_size(self) -> int | None:
        """How many token ids a model of these rows needs, or None if a store does not record it.

        Rows of raw text know it once their first row is there, so this waits for that one.
        """
        self.wait_for(1)
        sizes = [leaf.documents.vocab_size for leaf in self.leaves()]
        return None if None in sizes else max(size for size in sizes if size is not None)

    def wait_for(self, count: int) -> int:
        """Wait until the first `count` rows exist, or cannot; return how many rows there are."""
        return MOST_ROWS

    def rows_of_epochs(self, epochs: Fraction) -> int:
        """Count the rows of some epochs."""
        return int(epochs * self.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    @abstractmethod
    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Find the packing and the number of each row; each row is in exactly one item of the result."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe everything that decides which tokens are in a row, as plain JSON."""

    @abstractmethod
    def title(self) -> str:
        """Return one line for the tree."""

    def parts(self) -> list[tuple[str, Rows]]:
        """Return the datasets that this one is made of, each with a label for the tree."""
        return []

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for datasets with the same rows in the same order."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self.describe(), order="deterministic"))

    def leaves(self) -> list[PackedRows]:
        """Return the packings of the tree, in order."""
        return [leaf for _, part in self.parts() for leaf in part.leaves()]

    @property
    def sources(self) -> list[str]:
        """The names of the stores that rows come from, in the order of the tree; batches number them."""
        return [name for leaf in unique_leaves(self) for name, _ in leaf.documents.sources]

    @abstractmethod
    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Return all numbers below `stop` that a row of a packing has here, in order."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of one row as the store has them, without padding."""
        (resolved,) = self.resolve(np.array([row_number(index, self.limit)]))
        spans = resolved.rows.spans(resolved.numbers)
        documents = resolved.rows.documents
        pieces = [
            documents.read(start, start + length)
            for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)
        ]
        return np.concatenate(pieces)[: self.seq_len].astype(np.int64)

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        """Iterate over the rows of one epoch."""
        return (self[index] for index in range(self.num_rows))

    def __repr__(self) -> str:
        return "\n".join(self._tree("", ""))

    def _tree(self, label: str, indent: str) -> Iterator[str]:
        yield f"{indent}{label}{self.title()}  [{self.fingerprint[:8]}]"
        for part_label, part in self.parts():
            yield from part._tree(part_label, indent + "  ")


class DerivedRows(Rows):
    """The rows of another dataset, in another order or only some of them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.seq_len, self.num_rows, self.num_tokens = rows.seq_len, rows.num_rows, rows.num_tokens
        self.is_remote, self.has_stages, self.layout = rows.is_remote, rows.has_stages, rows.layout
        self.max_documents, self.align = rows.max_documents, rows.align

    def parts(self) -> list[tuple[str, Rows]]:
        """Return the other dataset."""
        return [("", self._rows)]


class PackedRows(Rows):
    """Rows that are cut out of documents; `settings` are what decides how, besides the method and the row length."""

    method: str
    has_lookahead: bool
    """Whether the span of a row has one token more than the row, the last target."""
    part_of: PackedRows | None = None
    """The packing of the tree that resolves some of its rows to rows of this one."""

    def __init__(
        self, documents: Documents, seq_len: int, *, max_documents: int | None = None, align: int = 1, **settings: Any
    ) -> None:
        self.documents, self.seq_len, self.max_documents, self.align = documents, seq_len, max_documents, align
        self.is_remote = documents.table.room_bytes is not None
        self.report = PackingReport()
        # A setting at its default is left out, so that rows have the fingerprint that they had before there was it.
        self._settings = settings
        if max_documents is not None:
            self._settings["max_documents"] = max_documents
        if align > 1:
            self._settings["align"] = align

    @abstractmethod
    def spans(self, index: Integers) -> Spans:
        """Find the tokens of rows; numbers past the end are those of the next epoch."""

    @abstractmethod
    def segments(self, index: Integers) -> Segments:
        """Find the documents of rows."""

    @abstractmethod
    def rows_of(self, document: int) -> list[int]:
        """Return the rows that hold tokens of a document, in order."""

    def _bounds(self, documents: Integers) -> tuple[Integers, Integers]:
        """Return the first token of each document and the one past its last."""
        if not self._keeps_starts:
            return self.documents.bounds(documents)
        return self._starts[documents], self._starts[documents + 1]

    @property
    def _keeps_starts(self) -> bool:
        return self.documents.num_documents <= MOST_KEPT_STARTS

    @cached_property
    def _starts(self) -> Integers:
        """The first token of each document, and the end of the last one: the index, in memory."""
        return np.concatenate([np.zeros(1, np.int64), *self.documents.lengths()]).cumsum()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_starts", "_documents_before")}

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        """Return the rows themselves."""
        return [ResolvedRows(self, None, index)]

    def leaves(self) -> list[PackedRows]:
        """Return this packing."""
        return [self]

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Return the row's number in every epoch."""
        return list(range(row, stop, self.num_rows)) if leaf is self else []

    def _set_counts(self, num_rows: int) -> None:
        """Set the counts of rows and tokens from the report on the documents, which has counted their tokens."""
        if num_rows < 1:
            raise UsageError(f"{self.documents.name} has no document that fits a row of {self.seq_len:,} tokens")
        self.num_rows = self.report.num_rows = num_rows
        self.num_tokens = self.report.num_tokens
        self.report.num_padding_tokens = num_rows * self.seq_len - self.num_tokens

    def describe(self) -> dict[str, Any]:
        """Describe the method and its settings, the row length, and the documents."""
        documents = {name: getattr(self.documents, name) for name in ("fingerprint", "num_documents", "num_tokens")}
        what = {"kind": "pack", "method": self.method, "seq_len": self.seq_len}
        return {**what, **self._settings, "documents": documents}

    def title(self) -> str:
        """Return one line for the tree."""
        seed = f", seed {self._settings['seed']}" if "seed" in self._settings else ""
        most = f", at most {plural(self.max_documents, 'document')}" if self.max_documents is not None else ""
        align = f", aligned to {self.align:,}" if self.align > 1 else ""
        return f"pack {self.method}, seq_len {self.seq_len:,}{most}{align}{seed}: {self.report}"

    def _tree(self, label: str, indent: str) -> Iterator[str]:
        yield from super()._tree(label, indent)
        yield f"{indent}  {self.documents!r}  [{self.documents.fingerprint[:8]}]"


def aligned(lengths: Integers, align: int) -> Integers:
    """Round lengths up to multiples."""
    return lengths if align == 1 else -(-lengths // align) * align


def unique_leaves(rows: Rows) -> list[PackedRows]:
    """Return the packings of a tree, one that occurs in several places only once."""
    return list({id(leaf): leaf for leaf in rows.leaves()}.values())


def row_number(index: Any, num_rows: int | None = None) -> int:
    """Check the number of one row; if rows end, it must be below `num_rows`."""
    if isinstance(index, slice):
        raise UsageError(f"rows are indexed one by one, not by {show(index)}; use tm.slice(rows, start, stop)")
    number = whole_number(index, "row", most=MOST_ROWS)
    if number < 0 or (num_rows is not None and number >= num_rows):
        there = "are counted from 0" if num_rows is None else f"are 0 to {num_rows - 1}"
        raise NoSuchRow(f"row {number} does not exist; rows {there}")
    return number


def as_rows(value: Any, verb: str) -> Rows:
    """Check that a value is rows; the error says how to make rows of it."""
    if isinstance(value, Rows):
        return value
    how = "pack them first: tm.pack(store, seq_len=...)"
    if not isinstance(value, (Documents, TokenSource)):
        how = "make some with tm.pack(tm.open(path), seq_len=...)"
    raise UsageError(f"{verb} needs rows, not {name_kind(value)}; {how}")


def as_documents(value: Any, verb: str) -> Documents:
    """Return documents as they are, and those of the first split of a store."""
    if isinstance(value, TokenSource):
        return value.split()
    if isinstance(value, Documents):
        return value
    how = "these are packed already" if isinstance(value, Rows) else "open it first: tm.open(path)"
    raise UsageError(f"{verb} needs a store or documents of one, not {name_kind(value)}; {how}")


def refuse_special(documents: Documents) -> UsageError:
    """Say why documents that are not trained on one by one, such as rejected answers, cannot be packed."""
    what = "preference pairs, so a trainer would learn the rejected answers too"
    if documents.holds == "prompts":
        what = "prompts, in which nothing is trained on"
    return UsageError(
        f"{documents.name} holds {what}; use packing={documents.holds!r}, or tm.{documents.holds} in place of tm.pack"
    )


def as_seed(seed: Any) -> int:
    """Check a seed; states and fingerprints hold it as a number of 64 bits."""
    return whole_number(seed, "seed", -(1 << 63), (1 << 64) - 1)
