"""Which part of which document is where in a row: what `trace` and `inspect --row` show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenmill.dataset.rows import Integers, PackedRows, aligned

__all__ = ["DocumentPart", "document_parts"]


class DocumentPart(NamedTuple):
    """Tokens of one document that follow each other in a row."""

    document: int
    start: int
    """The first of them in the row."""
    offset: int
    """The first of them in the document."""
    num_tokens: int


def document_parts(rows: PackedRows, numbers: Integers) -> list[list[DocumentPart]]:
    """Return the parts of documents in each of some rows, in their order."""
    segments, spans = rows.segments(numbers), rows.spans(numbers)
    firsts, _ = rows.documents.bounds(segments.documents)
    found: list[list[DocumentPart]] = []
    for row in range(len(numbers)):
        some = slice(segments.ends[row - 1] if row else 0, segments.ends[row])
        own = slice(spans.ends[row - 1] if row else 0, spans.ends[row])
        # Where the spans of a row begin in it, and in the store.
        room = aligned(spans.lengths[own], rows.align)
        begins = np.cumsum(room) - room
        starts = segments.starts[some]
        span = np.searchsorted(begins, starts, "right") - 1
        offsets = spans.starts[own][span] + starts - begins[span] - firsts[some]
        columns = (segments.documents[some], starts, offsets, segments.lengths[some])
        found.append([DocumentPart(*part) for part in zip(*(c.tolist() for c in columns), strict=True)])
    return found
