"""Concat rows of documents chosen here and there: a row lies in many pieces, and targets go on from one to the next.

Rows of neighbouring documents are one stretch of memory each, with the last target after it. Of scattered documents,
each row is joined from the pieces of runs, as the rows of `best-fit` are; then the targets at the ends of pieces, which
have none there, are filled in: the next input, or after a row the token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Integers, Spans
from tokenmill.filling import kernels
from tokenmill.store.documents import Documents
from tokenmill.store.mapping import everywhere

__all__ = ["Following", "cut_stream"]


class Following(NamedTuple):
    """The token after each row: its index in memory, -1 if it is not mapped; its documents and its number there."""

    stored: np.dtype[Any]
    indices: Integers
    documents: Sequence[Documents]
    owners: Integers
    numbers: Integers

    def in_order(self, order: Integers) -> Following:
        """Return the tokens of the same rows in another order."""
        return self._replace(indices=self.indices[order], owners=self.owners[order], numbers=self.numbers[order])

    def join(
        self,
        lengths: Integers,
        some: slice,
        places: Integers | None,
        inputs: npt.NDArray[Any],
        targets: npt.NDArray[Any],
    ) -> None:
        """Fill in the targets at the ends of pieces of these lengths, which make up some of the rows."""
        seq_len = inputs.shape[1]
        ends = np.cumsum(lengths)
        if places is not None:
            ends += (places.repeat(seq_len_counts(lengths, seq_len)) - (ends - 1) // seq_len) * seq_len
        inner = ends[ends % seq_len > 0]
        targets.reshape(-1)[inner - 1] = inputs.reshape(-1)[inner]
        rows: Any = slice(0, some.stop - some.start) if places is None else places
        targets[rows, -1] = self._read(some, inputs.dtype)

    def _read(self, some: slice, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Read the tokens after some rows."""
        indices = self.indices[some]
        missing = np.flatnonzero(indices < 0)
        if not len(missing):
            tokens = everywhere(self.stored.str, self.stored.itemsize)[indices]
        else:
            tokens = np.empty(len(indices), self.stored)
            mapped = indices >= 0
            tokens[mapped] = everywhere(self.stored.str, self.stored.itemsize)[indices[mapped]]
            for at in missing.tolist():
                documents, number = self.documents[self.owners[some][at]], int(self.numbers[some][at])
                tokens[at] = documents.read(number, number + 1)[0]
        kernels.check_range(tokens, dtype)
        return tokens


def seq_len_counts(lengths: Integers, seq_len: int) -> Integers:
    """Count the pieces of each row; all rows are full."""
    return np.diff(np.flatnonzero(np.append(0, np.cumsum(lengths)) % seq_len == 0))


def cut_stream(several: Sequence[Documents], spans: Sequence[Spans]) -> tuple[list[Spans], Following]:
    """Cut rows of several packings into the pieces that lie in one run each, without the token after each row."""
    found, indices, numbers, owners = [], [], [], []
    for owner, (documents, some) in enumerate(zip(several, spans, strict=True)):
        counts, starts, lengths = documents.cut(some.starts, some.lengths - 1)
        found.append(Spans(np.cumsum(counts), starts, lengths))
        after = some.starts + some.lengths - 1
        indices.append(documents.addresses(after, 1) // documents.dtype.itemsize - 1)
        numbers.append(after)
        owners.append(np.full(len(after), owner))
    parts = (np.concatenate(some) for some in (indices, owners, numbers))
    return found, Following(several[0].dtype, next(parts), several, next(parts), next(parts))
