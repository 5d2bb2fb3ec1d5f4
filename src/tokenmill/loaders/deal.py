"""Deal the rows of a global batch to ranks, so that all have about the same work.

Attention over a document costs the square of its length. In rounds of one row for each rank, the row that costs most
goes to the rank with the least so far. This depends on the rows of the batch alone, so a run that resumes on another
number of ranks gets the same global batches.
"""

from __future__ import annotations

import numpy as np

from tokenmill.dataset.rows import Integers, Rows

__all__ = ["deal", "find_owners"]


def deal(
    rows: Rows, firsts: Integers, *, batch_size: int, rank: int, world_size: int, limit: int | None = None
) -> Integers:
    """Return the rows of one rank, in ascending order, for global batches that begin with the given rows."""
    owners = find_owners(rows, firsts, batch_size=batch_size, world_size=world_size, limit=limit)
    batches, places = np.nonzero(owners == rank)
    found: Integers = firsts[batches] + places
    return found


def find_owners(
    rows: Rows, firsts: Integers, *, batch_size: int, world_size: int, limit: int | None = None
) -> Integers:
    """Return the rank that gets each row of global batches, of shape (number of batches, rows of a batch)."""
    index = firsts[:, None] + np.arange(batch_size * world_size)
    costs = count_squares(rows, index.reshape(-1), limit).reshape(index.shape)
    order = np.argsort(-costs, axis=1, kind="stable")
    owners = np.empty(index.shape, np.int64)
    loads = np.zeros((len(firsts), world_size), np.int64)
    for start in range(0, index.shape[1], world_size):
        taken = order[:, start : start + world_size]
        ranks = np.argsort(loads, axis=1, kind="stable")
        np.put_along_axis(owners, taken, ranks, axis=1)
        added = np.take_along_axis(costs, taken, axis=1) + np.take_along_axis(loads, ranks, axis=1)
        np.put_along_axis(loads, ranks, added, axis=1)
    return owners


def count_squares(rows: Rows, index: Integers, limit: int | None = None) -> Integers:
    """Return the sum of the squared lengths of the documents in each row; 0 for blank rows, those from `limit` on."""
    costs = np.zeros(len(index), np.int64)
    filled = np.flatnonzero(index < limit) if limit is not None else np.arange(len(index))
    for resolved in rows.resolve(index[filled]) if len(filled) else []:
        segments = resolved.rows.segments(resolved.numbers)
        sums = np.append(0, np.cumsum(segments.lengths**2))[np.append(0, segments.ends)]
        costs[filled if resolved.at is None else filled[resolved.at]] = np.diff(sums)
    return costs
