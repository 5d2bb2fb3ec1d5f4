"""Totals by the origin of documents: by input, and by the values of kept fields.

A field such as `source` or `lang` is worth a table, one such as `id` or `url` is not. Names do not tell them apart
reliably, so values are counted, until there are too many of them or nearly as many as documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.formatting import shorten, show_safely
from tokenmill.store.manifest import InputInfo
from tokenmill.tools.report.figures import Grouping, Totals

__all__ = ["GroupTally", "SourceTally", "Sums"]

Integers = npt.NDArray[np.int64]

MOST_ROWS = 20
MOST_VALUES = 10_000
FEW_VALUES = 20
LONGEST_NAME = 120
LANGUAGE_NAMES = {"lang", "language", "lang_id", "language_id", "lang_code", "language_code", "locale"}
SOURCE_NAMES = {"source", "dataset", "subset", "domain", "corpus", "collection", "origin", "category", "license"}


class Sums:
    """For each document of a shard: its tokens; of those in the sample, the count, the bytes and the trained ones."""

    def __init__(self, lengths: Integers) -> None:
        self.values = np.zeros((4, len(lengths)), np.float64)
        self.values[0] = lengths

    def look(self, documents: Integers, lengths: Integers, sizes: Integers, trained: Integers | None) -> None:
        """Add sampled parts of documents, each document at most once per call."""
        self.values[1, documents] += lengths
        self.values[2, documents] += sizes
        if trained is not None:
            self.values[3, documents] += trained


class GroupTally:
    """Sums by group; groups are numbered in the order in which they occur, or given from the start."""

    def __init__(self, is_supervised: bool, names: Iterable[str | None] = ()) -> None:
        self._is_supervised = is_supervised
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._sums = np.zeros((5, len(self.names)))

    def number(self, names: list[str | None]) -> Integers:
        """Number the groups of some values; new ones get the next numbers."""
        for name in names:
            if name not in self._numbers:
                self._numbers[name] = len(self.names)
                self.names.append(name)
        missing = len(self.names) - self._sums.shape[1]
        self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        return np.array([self._numbers[name] for name in names], np.int64)

    def add(self, groups: Integers, sums: Sums) -> None:
        """Add the documents of one shard, each to its group. Sums are exact, because all are below 2**53."""
        size = self._sums.shape[1]
        self._sums[0] += np.bincount(groups, minlength=size)
        for place, values in enumerate(sums.values, 1):
            self._sums[place] += np.bincount(groups, values, size)

    def grouping(
        self, key: str | None, *, is_language: bool = False, inputs: list[InputInfo] | None = None
    ) -> Grouping:
        """The groups with the most tokens, and the others together."""
        order = np.argsort(-self._sums[1], kind="stable").tolist()
        top, rest = order[:MOST_ROWS], order[MOST_ROWS:]
        return Grouping(
            key=key,
            is_language=is_language,
            num_values=len(self.names),
            rows=[self.sum_up(_show_name(self.names[number]), [number], inputs) for number in top],
            others=self.sum_up(f"{len(rest):,} others", rest, inputs) if rest else None,
        )

    def sum_up(self, name: str, groups: Sequence[int], inputs: list[InputInfo] | None = None) -> Totals:
        """The totals of some groups together; `inputs` are the files, if each of them is a group."""
        documents, tokens, num_seen, size, trained = self._sums[:, groups].sum(axis=1).tolist()
        return Totals(
            name=name,
            num_documents=int(documents),
            num_tokens=int(tokens),
            bytes_per_token=size / num_seen if num_seen else None,
            trained_share=trained / num_seen if num_seen and self._is_supervised else None,
            file_bytes=None if inputs is None else sum(inputs[number].bytes for number in groups),
        )


def _show_name(name: str | None) -> str:
    return "not given" if name is None else shorten(show_safely(name) or "(empty)", LONGEST_NAME)


class SourceTally:
    """Sums by input and by kept field, over all shards."""

    def __init__(self, inputs: list[InputInfo], keys: list[str], *, is_supervised: bool) -> None:
        self._inputs = inputs
        self._by_input = GroupTally(is_supervised, [file.path for file in inputs])
        self._by_key = {key: GroupTally(is_supervised) for key in keys}
        self._num_documents = 0
        self.ungrouped: list[str] = []

    def add(self, path: Path, sums: Sums) -> None:
        """Add the documents of one shard, whose table is at `path`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        count = sums.values.shape[1]
        self._num_documents += count
        try:
            table = pq.read_table(path, columns=["input", *(f"key.{key}" for key in self._by_key)])
        except (pa.ArrowException, OSError, KeyError) as error:
            raise StoreError(f"{path} cannot be read ({str(error)[:80]}); run tokenmill verify") from None
        inputs = table["input"].to_numpy().astype(np.int64)
        if len(inputs) != count or (count and not 0 <= inputs.min() <= inputs.max() < len(self._inputs)):
            raise StoreError(f"{path} does not describe the {count} documents of its shard; run tokenmill verify")
        self._by_input.add(inputs, sums)
        for key in list(self._by_key):
            self._add_key(key, table[f"key.{key}"], sums)

    def _add_key(self, key: str, column: Any, sums: Sums) -> None:
        coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        tally = self._by_key[key]
        if len(coded.dictionary) <= MOST_VALUES:
            groups = tally.number(coded.dictionary.to_pylist())
            if len(tally.names) <= MOST_VALUES:
                tally.add(groups[coded.indices.to_numpy(zero_copy_only=False)], sums)
                return
        self._give_up(key)

    def _give_up(self, key: str) -> None:
        del self._by_key[key]
        self.ungrouped.append(key)

    def groupings(self) -> list[Grouping]:
        """List inputs first, then fields in the order in which they were kept, languages before others."""
        found = []
        for key, tally in list(self._by_key.items()):
            name = key.rpartition(".")[2].lower()
            is_known = name in LANGUAGE_NAMES | SOURCE_NAMES
            if not is_known and len(tally.names) > max(FEW_VALUES, self._num_documents // 2):
                self._give_up(key)
                continue
            found.append(tally.grouping(key, is_language=name in LANGUAGE_NAMES))
        found.sort(key=lambda grouping: not grouping.is_language)
        return [self._by_input.grouping(None, inputs=self._inputs), *found]
