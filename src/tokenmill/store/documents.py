"""An ordered selection of documents of a store: all of a split, a slice of it, or all but some.

A selection is a list of *runs*, each of consecutive documents of one shard. Its documents and tokens
are numbered from 0, and runs translate these numbers to places in shards, so nothing is copied. A
split of 2,000 shards has 2,000 runs, and every denied document adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.arguments import show, whole_number
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.store.table import Integers, ShardTable
from tokenmill.text_batch import IntArray

__all__ = ["Documents", "IntervalLookup"]

MANY_POSITIONS = 512
"""With this many runs or more, a lookup table saves more time than it takes to build."""
CELLS_PER_INTERVAL = 4
MAX_STEPS = 4
RUNS_AT_ONCE = 1 << 20
"""Documents chosen here and there may be in many millions of runs; lookups of so many at once take little memory."""


class Documents:
    """Documents and their tokens, numbered from 0; `name` and `fingerprint` say which ones."""

    def __init__(
        self,
        table: ShardTable,
        name: str,
        fingerprint: str,
        runs: tuple[Integers, Integers, Integers] | None = None,
        beside: Mapping[str, ShardTable] | None = None,
        vocab_size: int | None = None,
        holds: str | None = None,
    ) -> None:
        self.table = table
        self.dtype: np.dtype[Any] = table.dtype
        """The type of the stored ids."""
        self.vocab_size = vocab_size
        """One more than the largest id; None if unknown."""
        self.holds = holds
        """`pairs` if documents 2i and 2i + 1 are two answers to a prompt, `prompts` if each is a prompt alone."""
        self.beside = dict(beside or {})
        self.tokenizer: tuple[str, str] | None = None
        """Name and hash of the tokenizer that made the ids; None if unknown."""
        self.sources: tuple[tuple[str, int], ...] = ((name, 0),)
        """The stores that were joined, each with its first shard in the table."""
        self.name = name
        self.fingerprint = fingerprint
        if runs is None:
            filled = np.flatnonzero(table.num_documents)
            runs = (filled, np.zeros(len(filled), np.int64), table.num_documents[filled])
        shards, firsts, counts = runs
        self._shards: Any = shards if len(shards) < RUNS_AT_ONCE else shards.astype(np.int32)
        self._document_ends = np.cumsum(counts)
        self._token_ends, self._token_shifts = np.empty((2, len(counts)), np.int64)
        for run in range(0, len(counts), RUNS_AT_ONCE):
            some = slice(run, run + RUNS_AT_ONCE)
            starts, self._token_shifts[some] = self._run_bounds(self._shards[some], firsts[some], counts[some])
            np.subtract(self._token_shifts[some], starts, out=self._token_ends[some])
        np.cumsum(self._token_ends, out=self._token_ends)
        self.num_documents = int(self._document_ends[-1]) if len(counts) else 0
        self.num_tokens = int(self._token_ends[-1]) if len(counts) else 0
        self.is_scattered = len(counts) > len(table.stems)
        """Whether these are documents chosen here and there, so that they are in more runs than there are shards."""
        self.run_tokens = self.num_tokens // max(1, len(counts))
        """The number of tokens in a run, on average."""
        # The numbers that the first document and the first token of each run's shard would have.
        self._document_shifts = self._document_ends - counts
        self._document_shifts -= firsts
        np.subtract(self._token_ends, self._token_shifts, out=self._token_shifts)

    def _run_bounds(self, shards: Integers, firsts: Integers, counts: Integers) -> tuple[Integers, Integers]:
        """The first token of each run in its shard, and the one past its last; whole shards need no lookup."""
        starts = np.zeros(len(counts), np.int64)
        stops = self.table.num_tokens[shards]
        late = np.flatnonzero(firsts)
        if len(late):
            starts[late], _ = self.table.document_bounds(shards[late], firsts[late])
        ends = firsts + counts
        early = np.flatnonzero(ends != self.table.num_documents[shards])
        if len(early):
            stops[early], _ = self.table.document_bounds(shards[early], ends[early])
        return starts, stops

    def cut(self, starts: Integers, lengths: Integers) -> tuple[Integers, Integers, Integers]:
        """Cut ranges of tokens where runs end: how many pieces each range has, their first tokens and lengths."""
        stops = starts + lengths
        firsts = self._runs_of(starts)
        counts = self._runs_of(stops - 1) - firsts + 1
        runs = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts - firsts).repeat(counts)
        ends = self._token_ends[runs]
        begins = np.maximum(starts.repeat(counts), np.where(runs > 0, self._token_ends[runs - 1], 0))
        sizes = np.minimum(stops.repeat(counts), ends) - begins
        if (sizes == 0).any():
            # A run may have only documents without a token.
            filled = sizes > 0
            counts = np.bincount(np.arange(len(counts)).repeat(counts)[filled], minlength=len(counts))
            begins, sizes = begins[filled], sizes[filled]
        return counts, begins, sizes

    @property
    def mask(self) -> Documents | None:
        """The same documents with one byte per token, 1 if it is trained on; None if all tokens are."""
        return self.view(".mask")

    @property
    def weight(self) -> Documents | None:
        """The same documents with the weight of each token's loss as float16; None if all are 1."""
        return self.view(".weight")

    def view(self, suffix: str) -> Documents | None:
        """The same documents read from companion files of the tokens; None if there are none."""
        if suffix not in self.beside:
            return None
        view = Documents.__new__(Documents)
        vars(view).update(vars(self), table=self.beside[suffix], dtype=self.beside[suffix].dtype, beside={})
        return view

    def without_values(self) -> Documents:
        """The same documents without their mask and weights, as if all tokens were trained on."""
        plain = Documents.__new__(Documents)
        vars(plain).update(vars(self), beside={})
        return plain

    def __len__(self) -> int:
        return self.num_documents

    def document(self, number: int) -> IntArray:
        """The ids of one document."""
        (number,) = self._check([number])
        starts, stops = self.bounds(np.array([number]))
        return self.read(int(starts[0]), int(stops[0]))

    def read(self, start: int, stop: int) -> IntArray:
        """A copy of the ids from token `start` up to token `stop`, across documents and shards."""
        start, stop = whole_number(start, "start"), whole_number(stop, "stop")
        if not 0 <= start <= stop <= self.num_tokens:
            raise UsageError(f"tokens {start} to {stop} are not in {self.name}, which has {self.num_tokens} tokens")
        out = np.empty(stop - start, self.dtype)
        self.copy(start, out)
        return out

    def _check(self, numbers: Iterable[int]) -> list[int]:
        """Check that documents exist."""
        found = [whole_number(number, "document") for number in numbers]
        wrong = next((number for number in found if not 0 <= number < self.num_documents), None)
        if wrong is not None:
            raise UsageError(f"document {wrong} is not in {self.name}, which has {self.num_documents}, from 0 on")
        return found

    def copy(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill an array with the tokens from `start` on."""
        done = 0
        run = int(np.searchsorted(self._token_ends, start, "right"))
        while done < len(out):
            count = min(len(out) - done, int(self._token_ends[run]) - start - done)
            first = start + done - int(self._token_shifts[run])
            out[done : done + count] = self.table.read(int(self._shards[run]), first, first + count)
            done += count
            run += 1

    def _runs_of(self, tokens: Integers) -> npt.NDArray[np.intp]:
        """The run of each token."""
        if len(tokens) < MANY_POSITIONS:
            return np.searchsorted(self._token_ends, tokens, "right")
        return self._lookup.find(tokens)

    @cached_property
    def _lookup(self) -> IntervalLookup:
        return IntervalLookup(self._token_ends)

    def addresses(self, starts: Integers, widths: Integers | int) -> Integers:
        """The memory address of each range of tokens; 0 for one that is in several runs or not mapped."""
        runs = self._runs_of(starts)
        shards, shifts, ends = self._shards[runs], self._token_shifts[runs], self._token_ends[runs]
        addresses = self.table.token_addresses(shards, starts - shifts)
        addresses[starts + widths > ends] = 0
        if self.table.room_bytes is not None:
            self.table.prefetch_tokens(shards, starts - shifts, np.minimum(starts + widths, ends) - shifts)
        return addresses

    def runs(self) -> tuple[Integers, Integers, Integers]:
        """The shard, the first document and the first token of each run."""
        firsts = np.concatenate([[0], self._document_ends[:-1]]), np.concatenate([[0], self._token_ends[:-1]])
        return self._shards, *firsts

    def bounds(self, documents: Integers) -> tuple[Integers, Integers]:
        """The first token of each document and the one past its last."""
        runs = np.searchsorted(self._document_ends, documents, "right")
        inner = documents - self._document_shifts[runs]
        shards, shifts = self._shards[runs], self._token_shifts[runs]
        starts, stops = self.table.document_bounds(shards, inner)
        return starts + shifts, stops + shifts

    def lengths(self, shards: range | None = None) -> Iterator[Integers]:
        """The lengths of all documents, or of those in some shards, run by run; much faster than `bounds`."""
        if shards is None and self.is_scattered:
            for number in range(0, self.num_documents, RUNS_AT_ONCE):
                starts, stops = self.bounds(np.arange(number, min(number + RUNS_AT_ONCE, self.num_documents)))
                yield stops - starts
            return
        counts = np.diff(self._document_ends, prepend=0)
        firsts = self._document_ends - counts - self._document_shifts
        for shard, first, count in zip(self._shards.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            if shards is not None and shard not in shards:
                continue
            lengths = np.diff(self.table.all_starts(shard, first, count))
            if lengths.min() < 0:
                raise self.table.damage(shard)
            yield lengths

    def find(self, tokens: Integers) -> Integers:
        """The document that contains each token."""
        runs = self._runs_of(tokens)
        inner = self.table.find_documents(self._shards[runs], tokens - self._token_shifts[runs])
        return inner + self._document_shifts[runs]

    def find_all(self, starts: Integers, width: int) -> tuple[Integers, Integers, Integers, Integers]:
        """The documents in ranges of `width` tokens: the count for each range, then numbers, first tokens and ends."""
        firsts, lasts = np.split(self.find(np.concatenate([starts, starts + (width - 1)])), 2)
        counts = lasts - firsts + 1
        numbers = np.arange(int(counts.sum())) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        return counts, numbers, *self.bounds(numbers)

    def locate(self, documents: Integers) -> tuple[Integers, Integers]:
        """The shard of each document and its number in the shard."""
        runs = np.searchsorted(self._document_ends, documents, "right")
        return self._shards[runs], documents - self._document_shifts[runs]

    def find_sources(self, documents: Integers) -> Integers:
        """The number of the joined store that each document is from."""
        first_shards = np.array([shard for _, shard in self.sources])
        return np.searchsorted(first_shards, self.locate(documents)[0], "right") - 1

    def slice(self, start: int, stop: int) -> Documents:
        """The documents from `start` up to `stop`."""
        start, stop = whole_number(start, "start"), whole_number(stop, "stop")
        if not 0 <= start <= stop <= self.num_documents:
            raise UsageError(f"documents {start} to {stop} are not in {self.name}, which has {self.num_documents}")
        name = f"{self.name}[{start}:{stop}]"
        return self._choose(np.array([start]), np.array([stop]), name, f"slice {start} {stop}")

    def without(self, documents: Iterable[int]) -> Documents:
        """All but the given documents."""
        try:
            listed = list(documents)
        except TypeError:
            raise UsageError(f"{show(documents)} is not a list of document numbers") from None
        denied = np.array(sorted(set(self._check(listed))), np.int64)
        starts = np.concatenate([[0], denied + 1])
        stops = np.concatenate([denied, [self.num_documents]])
        name = f"{self.name} without {plural(len(denied), 'document')}"
        return self._choose(starts, stops, name, f"without {xxhash.xxh3_64_hexdigest(denied.astype('<i8').tobytes())}")

    def choose(self, numbers: Integers, name: str) -> Documents:
        """Only the documents of these numbers, which ascend."""
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        starts = numbers[np.concatenate([[0], breaks + 1])] if len(numbers) else numbers
        stops = numbers[np.concatenate([breaks, [-1]])] + 1 if len(numbers) else numbers
        digest = xxhash.xxh3_64(np.ascontiguousarray(starts, "<i8").data)
        digest.update(np.ascontiguousarray(stops, "<i8").data)
        return self._choose(starts, stops, name, f"choose {digest.hexdigest()}")

    def _choose(self, starts: Integers, stops: Integers, name: str, change: str) -> Documents:
        """Select the documents of some intervals, which ascend, split at the ends of runs."""
        if (starts == stops).any():
            filled = starts < stops
            starts, stops = starts[filled], stops[filled]
        if self.holds == "pairs" and ((starts | stops) % 2).any():
            raise UsageError(f"{self.name} has pairs of documents 2i and 2i + 1; take or leave out both of a pair")
        cuts = self._document_ends[:-1]
        if len(starts):
            among = np.searchsorted(starts, cuts, "right") - 1
            cuts = cuts[(among >= 0) & (cuts > starts[among]) & (cuts < stops[among])]
            # Sorting is fast because both parts are sorted.
            starts, stops = (np.sort(np.concatenate([some, cuts]), kind="stable") for some in (starts, stops))
        runs = np.searchsorted(self._document_ends, starts, "right")
        fingerprint = xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {change}".encode())
        pieces = (self._shards[runs], starts - self._document_shifts[runs], stops - starts)
        chosen = Documents(self.table, name, fingerprint, pieces, self.beside, self.vocab_size, self.holds)
        chosen.tokenizer, chosen.sources = self.tokenizer, self.sources
        return chosen

    def __repr__(self) -> str:
        return f"{self.name}: {plural(self.num_documents, 'document')}, {plural(self.num_tokens, 'token')}"


class IntervalLookup:
    """Finds which of many adjacent intervals contains a position; they are given by their ends, and begin at 0.

    For positions in random order, the CPU mispredicts every branch of a binary search: 40 ns a position for 64
    intervals. If intervals are of similar size, a table gives a first guess, and one or two comparisons without
    branches find the interval in 4 ns.
    """

    def __init__(self, ends: Integers) -> None:
        self._ends = ends
        size = int(ends[-1])
        self._shift = max(0, (size // (CELLS_PER_INTERVAL * len(ends))).bit_length() - 1)
        # The interval at the start of each cell of `1 << shift` positions.
        self._firsts = np.searchsorted(ends, np.arange(((size - 1) >> self._shift) + 2) << self._shift, "right")
        self.num_steps = int(np.diff(self._firsts).max(initial=0))
        """The largest number of ends in one cell."""

    def find(self, positions: Integers) -> npt.NDArray[np.intp]:
        """The number of the interval that contains each position; all positions are before the last end."""
        if self.num_steps > MAX_STEPS:
            return np.searchsorted(self._ends, positions, "right")
        found: npt.NDArray[np.intp] = self._firsts[positions >> self._shift]
        for _ in range(self.num_steps):
            found += positions >= self._ends[found]
        return found
