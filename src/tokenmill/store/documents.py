"""An ordered choice of documents of a store: all of a split, a slice of it, or all but some.

A choice is a list of *runs*, documents that follow each other in one shard. Its documents and its
tokens are numbered from 0, and a run says what they are in the shard; nothing is copied. A split
of 2,000 shards has 2,000 runs, and every document that is denied adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.arguments import show, whole_number
from tokenmill.batch import IntArray
from tokenmill.errors import UsageError
from tokenmill.store.finding import Stretches
from tokenmill.store.table import Integers, ShardTable

__all__ = ["Documents"]


class Documents:
    """Documents and their tokens, numbered from 0; `name` and `fingerprint` say which ones."""

    vocab_size: int | None = None
    """One more than the largest id, where that is known."""

    def __init__(
        self,
        table: ShardTable,
        name: str,
        fingerprint: str,
        runs: tuple[Integers, Integers, Integers] | None = None,
        beside: Mapping[str, ShardTable] | None = None,
    ) -> None:
        self.table = table
        self.beside = dict(beside or {})
        self.name = name
        self.fingerprint = fingerprint
        if runs is None:
            filled = np.flatnonzero(table.num_documents)
            runs = (filled, np.zeros(len(filled), np.int64), table.num_documents[filled])
        self._shards, self._first_documents, counts = runs
        self._first_tokens, stops = self._run_bounds(counts)
        self._document_ends = np.cumsum(counts)
        self._token_ends = np.cumsum(stops - self._first_tokens)
        self._runs_of_tokens = Stretches(self._token_ends)
        self.num_documents = int(self._document_ends[-1]) if len(counts) else 0
        self.num_tokens = int(self._token_ends[-1]) if len(counts) else 0
        # Where the documents and tokens of a run would start if it began with its shard.
        self._document_shifts = self._document_ends - counts - self._first_documents
        self._token_shifts = self._token_ends - stops

    def _run_bounds(self, counts: Integers) -> tuple[Integers, Integers]:
        """The first token of each run in its shard, and the one past its last; whole shards need no look-up."""
        starts = np.zeros(len(counts), np.int64)
        stops = self.table.num_tokens[self._shards]
        late = np.flatnonzero(self._first_documents)
        starts[late] = self.table.document_starts(self._shards[late], self._first_documents[late])
        ends = self._first_documents + counts
        early = np.flatnonzero(ends != self.table.num_documents[self._shards])
        stops[early] = self.table.document_starts(self._shards[early], ends[early])
        return starts, stops

    @property
    def mask(self) -> Documents | None:
        """The same documents with one byte per token, 1 where it is trained on; None where all tokens are."""
        return self.view(".mask")

    @property
    def weight(self) -> Documents | None:
        """The same documents with the weight of each token's loss as float16; None where all are 1."""
        return self.view(".weight")

    def view(self, suffix: str) -> Documents | None:
        """The same documents read from files beside the tokens, None where there are none."""
        if suffix not in self.beside:
            return None
        view = Documents.__new__(Documents)
        vars(view).update(vars(self), table=self.beside[suffix], beside={})
        return view

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the stored ids."""
        return self.table.dtype

    def __len__(self) -> int:
        return self.num_documents

    def document(self, number: int) -> IntArray:
        """The ids of one document."""
        (number,) = self._check([number])
        starts, stops = self.bounds(np.array([number]))
        return self.read(int(starts[0]), int(stops[0]))

    def read(self, start: int, stop: int) -> IntArray:
        """The ids from token `start` up to token `stop`, across documents and shards, as a copy of your own."""
        start, stop = whole_number(start, "start"), whole_number(stop, "stop")
        if not 0 <= start <= stop <= self.num_tokens:
            raise UsageError(f"tokens {start} to {stop} are not in {self.name}, which has {self.num_tokens} tokens")
        out = np.empty(stop - start, self.dtype)
        self.copy(start, out)
        return out

    def _check(self, numbers: Iterable[int]) -> list[int]:
        """Numbers of documents, which must be there."""
        found = [whole_number(number, "document") for number in numbers]
        wrong = next((number for number in found if not 0 <= number < self.num_documents), None)
        if wrong is not None:
            raise UsageError(f"document {wrong} is not in {self.name}, which has {self.num_documents}, from 0 on")
        return found

    def copy(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill an array with the tokens from `start` on, run by run."""
        done = 0
        run = int(np.searchsorted(self._token_ends, start, "right"))
        while done < len(out):
            count = min(len(out) - done, int(self._token_ends[run]) - start - done)
            first = start + done - int(self._token_shifts[run])
            out[done : done + count] = self.table.read(int(self._shards[run]), first, first + count)
            done += count
            run += 1

    def addresses(self, starts: Integers, widths: Integers | int) -> Integers:
        """Where in memory each stretch of tokens lies; 0 for one that is not in a single piece, or not mapped."""
        runs = self._runs_of_tokens.find(starts)
        shards, shifts, ends = self._shards[runs], self._token_shifts[runs], self._token_ends[runs]
        addresses = self.table.token_addresses(shards, starts - shifts)
        addresses[starts + widths > ends] = 0
        self.table.expect(shards, starts - shifts, np.minimum(starts + widths, ends) - shifts)
        return addresses

    def runs(self) -> tuple[Integers, Integers, Integers]:
        """Documents that follow each other in one shard: the shard, the first document and the first token of each."""
        firsts = np.concatenate([[0], self._document_ends[:-1]]), np.concatenate([[0], self._token_ends[:-1]])
        return self._shards, *firsts

    def bounds(self, documents: Integers) -> tuple[Integers, Integers]:
        """The first token of each document and the one past its last."""
        runs = np.searchsorted(self._document_ends, documents, "right")
        inner = documents - self._document_shifts[runs]
        shards, shifts = self._shards[runs], self._token_shifts[runs]
        starts, stops = self.table.document_bounds(shards, inner)
        return starts + shifts, stops + shifts

    def lengths(self) -> Iterator[Integers]:
        """Tokens per document, run after run; much faster than to ask for each."""
        counts = np.diff(self._document_ends, prepend=0).tolist()
        for shard, first, count in zip(self._shards.tolist(), self._first_documents.tolist(), counts, strict=True):
            lengths = np.diff(self.table.all_starts(shard, first, count))
            if lengths.min() < 0:
                raise self.table.damage(shard)
            yield lengths

    def find(self, tokens: Integers) -> Integers:
        """The document that holds each token."""
        runs = self._runs_of_tokens.find(tokens)
        inner = self.table.find_documents(self._shards[runs], tokens - self._token_shifts[runs])
        return inner + self._document_shifts[runs]

    def find_all(self, starts: Integers, width: int) -> tuple[Integers, Integers, Integers, Integers]:
        """The documents of stretches of `width` tokens: how many each has, their numbers, first tokens and ends.

        The same as `find` and `bounds`, but what a stretch lies in is looked up once for all its documents.
        """
        runs = self._runs_of_tokens.find(starts)
        apart = np.flatnonzero(starts + width > self._token_ends[runs])
        if len(apart):
            return self._find_all_apart(starts, width, apart)
        shards, shifts = self._shards[runs], self._token_shifts[runs]
        edges = np.concatenate([starts - shifts, starts - shifts + (width - 1)])
        firsts, lasts = np.split(self.table.find_documents(np.concatenate([shards, shards]), edges), 2)
        counts = lasts - firsts + 1
        ends = np.cumsum(counts)
        # One start more than documents: that of the one behind the last is where the last one ends.
        spread = np.repeat(firsts - (ends - counts) - np.arange(len(counts)), counts + 1)
        inner = np.arange(int(counts.sum()) + len(counts)) + spread
        positions = self.table.document_starts(np.repeat(shards, counts + 1), inner)
        positions += np.repeat(shifts, counts + 1)
        is_last = np.zeros(len(inner), bool)
        is_last[ends + np.arange(len(ends))] = True
        numbers = (inner + np.repeat(self._document_shifts[runs], counts + 1))[~is_last]
        begins, stops = positions[~is_last], positions[1:][~is_last[:-1]]
        if (stops < begins).any():
            raise self.table.damage(int(shards[0]))
        return counts, numbers, begins, stops

    def _find_all_apart(
        self, starts: Integers, width: int, apart: Integers
    ) -> tuple[Integers, Integers, Integers, Integers]:
        """The same where some stretches lie in several runs: these are looked up by themselves."""
        whole = np.delete(np.arange(len(starts)), apart)
        edges = self.find(np.concatenate([starts[apart], starts[apart] + width - 1]))
        firsts, lasts = np.split(edges, 2)
        some = lasts - firsts + 1
        numbers = np.arange(int(some.sum())) - np.repeat(np.cumsum(some) - some - firsts, some)
        counts = np.empty(len(starts), np.int64)
        others, *columns = self.find_all(starts[whole], width) if len(whole) else (some[:0], *[numbers[:0]] * 3)
        counts[whole], counts[apart] = others, some
        order = np.argsort(np.concatenate([np.repeat(whole, others), np.repeat(apart, some)]), kind="stable")
        added = (numbers, *self.bounds(numbers))
        found = [np.concatenate([ours, theirs])[order] for ours, theirs in zip(columns, added, strict=True)]
        return counts, found[0], found[1], found[2]

    def locate(self, documents: Integers) -> tuple[Integers, Integers]:
        """The shard of each document and its number there."""
        runs = np.searchsorted(self._document_ends, documents, "right")
        return self._shards[runs], documents - self._document_shifts[runs]

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
        name = f"{self.name} without {len(denied):,} documents"
        return self._choose(starts, stops, name, f"without {xxhash.xxh3_64_hexdigest(denied.astype('<i8').tobytes())}")

    def _choose(self, starts: Integers, stops: Integers, name: str, change: str) -> Documents:
        """The documents of some intervals, cut where runs end."""
        edges = np.unique(np.concatenate([starts, stops, self._document_ends]))
        edges = edges[(edges >= starts[0]) & (edges <= stops[-1])]
        firsts, counts = edges[:-1], np.diff(edges)
        inside = firsts < stops[np.searchsorted(starts, firsts, "right") - 1]
        firsts, counts = firsts[inside], counts[inside]
        runs = np.searchsorted(self._document_ends, firsts, "right")
        fingerprint = xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {change}".encode())
        pieces = (self._shards[runs], firsts - self._document_shifts[runs], counts)
        chosen = Documents(self.table, name, fingerprint, pieces, self.beside)
        chosen.vocab_size = self.vocab_size
        return chosen

    def __repr__(self) -> str:
        return f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens"
