"""What a dataset of rows is, and the two kinds of places it can name.

Every dataset answers one question: which tokens are in row i? Packings answer it with *spans* of
a store; shuffles, mixtures and slices hand the question on with other indices (`resolve`). So a
tree of any depth costs its index arithmetic, done for thousands of rows at once.
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
from tokenmill.dataset.permutation import Integers, permute, unpermute
from tokenmill.dataset.report import PackingReport
from tokenmill.dataset.segments import Segments
from tokenmill.errors import UsageError
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource

__all__ = [
    "Choice",
    "Integers",
    "NoSuchRow",
    "PackedRows",
    "Rows",
    "Segments",
    "Spans",
    "as_documents",
    "as_rows",
    "as_seed",
    "row_number",
    "whole_number",
]


MOST_KEPT_STARTS = 4_000_000
"""Where so many documents start is kept, eight bytes each; of more documents, the index is asked."""


class NoSuchRow(UsageError, IndexError):
    """A row that is not there; as an IndexError, it ends a plain `for` over whatever is asked by number."""


class Spans(NamedTuple):
    """Stretches of tokens that follow each other in rows; row i has those from `ends[i - 1]` up to `ends[i]`."""

    ends: Integers
    starts: Integers
    lengths: Integers


class Choice(NamedTuple):
    """Some of the rows that were asked for, and where they are: rows `numbers` of a packing.

    `at` are their places among those that were asked for; None is all of them, in order.
    """

    rows: PackedRows
    at: Integers | None
    numbers: Integers
    beside: Documents | None = None
    """What to copy instead of tokens."""

    @property
    def source(self) -> Documents:
        """The documents that are copied."""
        return self.beside if self.beside is not None else self.rows.documents

    def among(self, at: Integers) -> Choice:
        """The same rows where they are only some of those that were asked for, at these places."""
        return self._replace(at=at if self.at is None else at[self.at])


class Rows(ABC):
    """Rows of `seq_len` tokens by number; an index past the end is the next epoch."""

    seq_len: int
    num_rows: int
    """Rows of one epoch."""
    num_tokens: int
    """Tokens of one epoch that are not padding."""
    limit: int | None = None
    """How many rows there are in all epochs; None: they never end."""
    is_known: bool = True
    """Whether it is known how many rows an epoch has; not while its text is being tokenized."""
    bottleneck: str | None = None
    """What rows are waited for, where it is not the loader, and what to do about it."""

    @property
    def is_remote(self) -> bool:
        """Whether tokens have to be fetched from a bucket."""
        return any(leaf.documents.table.room_bytes is not None for leaf in self.leaves())

    def wait_for(self, count: int) -> int:
        """Wait until the first `count` rows are there, or are known not to be; tells how many are."""
        return MOST_ROWS

    def rows_of_epochs(self, epochs: Fraction) -> int:
        """How many rows so many epochs have."""
        return int(epochs * self.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    @abstractmethod
    def resolve(self, index: Integers) -> list[Choice]:
        """Where rows are: each one is in exactly one of the choices."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything that decides which tokens are in a row, as plain JSON."""

    @abstractmethod
    def title(self) -> str:
        """One line for the tree."""

    def parts(self) -> list[tuple[str, Rows]]:
        """The datasets this one is made of, each with a label for the tree."""
        return []

    @cached_property
    def fingerprint(self) -> str:
        """Equal for datasets that have the same rows in the same order."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self.describe(), order="deterministic"))

    def permute(self, index: Integers, key: int) -> Integers:
        """Numbers of one epoch in another order, for a shuffle over this dataset."""
        return permute(index, self.num_rows, key)

    def unpermute(self, index: Integers, key: int) -> Integers:
        """What `permute` sends to each number."""
        return unpermute(index, self.num_rows, key)

    def leaves(self) -> list[PackedRows]:
        """The packings at the ends of the tree, in order."""
        return [leaf for _, part in self.parts() for leaf in part.leaves()]

    @abstractmethod
    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """All numbers below `stop` under which a row of a packing comes up here, in order."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """The tokens of one row as the store has them, without padding."""
        (choice,) = self.resolve(np.array([row_number(index, self.limit)]))
        spans = choice.rows.spans(choice.numbers)
        documents = choice.rows.documents
        pieces = [
            documents.read(start, start + length)
            for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)
        ]
        return np.concatenate(pieces)[: self.seq_len].astype(np.int64)

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        """The rows of one epoch."""
        return (self[index] for index in range(self.num_rows))

    def __repr__(self) -> str:
        return "\n".join(self._tree("", ""))

    def _tree(self, label: str, indent: str) -> Iterator[str]:
        yield f"{indent}{label}{self.title()}  [{self.fingerprint[:8]}]"
        for part_label, part in self.parts():
            yield from part._tree(part_label, indent + "  ")


class PackedRows(Rows):
    """Rows that are cut out of documents; the leaves of every tree."""

    documents: Documents
    has_lookahead: bool
    """Whether spans hold one token more than a row, the last target."""
    report: PackingReport

    @abstractmethod
    def spans(self, index: Integers) -> Spans:
        """The tokens of rows, one epoch after the other."""

    @abstractmethod
    def segments(self, index: Integers) -> Segments:
        """The documents of rows."""

    def _bounds(self, documents: Integers) -> tuple[Integers, Integers]:
        """The first token of each document and the one past its last."""
        if not self._keeps_starts:
            return self.documents.bounds(documents)
        return self._starts[documents], self._starts[documents + 1]

    @property
    def _keeps_starts(self) -> bool:
        return self.documents.num_documents <= MOST_KEPT_STARTS

    @cached_property
    def _starts(self) -> Integers:
        """The first token of each document, and of the one that would come behind the last: the index, in memory."""
        return np.concatenate([np.zeros(1, np.int64), *self.documents.lengths()]).cumsum()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_starts", "_documents_before")}

    @abstractmethod
    def rows_of(self, document: int) -> list[int]:
        """The rows that hold tokens of a document, in order."""

    def resolve(self, index: Integers) -> list[Choice]:
        """The rows themselves."""
        return [Choice(self, None, index)]

    def leaves(self) -> list[PackedRows]:
        """This one."""
        return [self]

    def where(self, leaf: PackedRows, row: int, stop: int) -> list[int]:
        """Once in every epoch."""
        return list(range(row, stop, self.num_rows)) if leaf is self else []

    def _describe(self, method: str, **settings: Any) -> dict[str, Any]:
        return {
            "kind": "pack",
            "method": method,
            "seq_len": self.seq_len,
            **settings,
            "documents": {
                "fingerprint": self.documents.fingerprint,
                "num_documents": self.documents.num_documents,
                "num_tokens": self.documents.num_tokens,
            },
        }

    def _tree(self, label: str, indent: str) -> Iterator[str]:
        yield from super()._tree(label, indent)
        yield f"{indent}  {self.documents!r}  [{self.documents.fingerprint[:8]}]"


def row_number(index: Any, num_rows: int | None = None) -> int:
    """The number of one row, below `num_rows` where they end."""
    if isinstance(index, slice):
        raise UsageError(f"rows are asked for one by one, not as {show(index)}; use tm.slice(rows, start, stop)")
    number = whole_number(index, "row", most=MOST_ROWS)
    if number < 0 or (num_rows is not None and number >= num_rows):
        there = "are counted from 0" if num_rows is None else f"are 0 to {num_rows - 1}"
        raise NoSuchRow(f"row {number} does not exist; rows {there}")
    return number


def as_rows(value: Any, verb: str) -> Rows:
    """Rows to do something with; what they are made of is refused with how to make them."""
    if isinstance(value, Rows):
        return value
    how = "pack them first: tm.pack(store, seq_len=...)"
    if not isinstance(value, (Documents, TokenSource)):
        how = "make some with tm.pack(tm.open(path), seq_len=...)"
    raise UsageError(f"{verb} needs rows, not {name_kind(value)}; {how}")


def as_documents(value: Any, verb: str) -> Documents:
    """Documents to do something with: those of the first split, where it is a store."""
    if isinstance(value, TokenSource):
        return value.split()
    if isinstance(value, Documents):
        return value
    how = "these are packed already" if isinstance(value, Rows) else "open it first: tm.open(path)"
    raise UsageError(f"{verb} needs a store or documents of one, not {name_kind(value)}; {how}")


def as_seed(seed: Any) -> int:
    """A seed, which states and fingerprints hold as a number of 64 bits."""
    return whole_number(seed, "seed", -(1 << 63), (1 << 64) - 1)
