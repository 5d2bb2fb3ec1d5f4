"""Which source each row and each token of a batch comes from, for the loss per domain.

A source is a store, or one of several that were opened as one. Sources are numbered as `Rows.sources` names them, in
the order of the tree. Each row comes from one packing, which is known when rows are resolved; only a packing of several
stores has to look at its documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import PADDING, Integers, ResolvedRows, Rows, Segments, unique_leaves

__all__ = ["NO_SOURCE", "segment_sources", "source_of_rows"]

NO_SOURCE = -1
"""The source of padding, of a blank row, and of a row with documents from several stores."""


def segment_sources(
    rows: Rows, resolved: Sequence[ResolvedRows], segments: Segments, num_rows: int
) -> npt.NDArray[np.int32]:
    """Return the source of each segment; the resolved rows are those to which the segments belong."""
    counts = np.diff(segments.ends, prepend=0)
    found = np.full(len(segments.documents), NO_SOURCE, np.int32)
    filled = segments.documents != PADDING
    for some, first in _numbered(rows, resolved):
        mine = np.zeros(num_rows, bool)
        mine[slice(None) if some.at is None else some.at] = True
        here = mine.repeat(counts) & filled
        documents = some.rows.documents
        found[here] = first
        if len(documents.sources) > 1:
            found[here] += documents.find_sources(segments.documents[here]).astype(np.int32)
    return found


def source_of_rows(rows: Rows, resolved: Sequence[ResolvedRows], num_rows: int) -> Integers:
    """Return the one source of each row."""
    found = np.full(num_rows, NO_SOURCE, np.int64)
    for some, first in _numbered(rows, resolved):
        at: slice | Integers = slice(None) if some.at is None else some.at
        found[at] = first
        documents = some.rows.documents
        if len(documents.sources) > 1:
            segments = some.rows.segments(some.numbers)
            sources = documents.find_sources(segments.documents)
            starts = segments.ends - np.diff(segments.ends, prepend=0)
            lowest, highest = np.minimum.reduceat(sources, starts), np.maximum.reduceat(sources, starts)
            found[at] = np.where(lowest == highest, first + lowest, NO_SOURCE)
    return found


def _numbered(rows: Rows, resolved: Sequence[ResolvedRows]) -> list[tuple[ResolvedRows, int]]:
    """Return resolved rows with the number of the first source of their packing."""
    firsts, count = {}, 0
    for leaf in unique_leaves(rows):
        firsts[id(leaf)] = count
        count += len(leaf.documents.sources)
    return [(some, firsts[id(some.rows if some.rows.part_of is None else some.rows.part_of)]) for some in resolved]
