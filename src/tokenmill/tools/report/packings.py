"""How documents fill rows with each packing, with some rows to draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenmill.dataset.pack import pack
from tokenmill.dataset.pairs import pairs, prompts
from tokenmill.dataset.rows import PackedRows
from tokenmill.errors import UsageError
from tokenmill.store.documents import Documents
from tokenmill.tools.report.figures import DrawnRow, DrawnSegment, Filling

__all__ = ["PACKINGS", "fill_rows"]

PACKINGS = (("concat", "split"), ("best-fit", "split"), ("pad", "split"), ("pad", "truncate"))
SPECIAL = {"pairs": (pairs, ("keep_start", "keep_end")), "prompts": (prompts, ("drop",))}
"""How to make rows of a store that holds something else than documents, and what to do with long ones."""
NUM_DRAWN_ROWS = 12
MOST_SEGMENTS = 200


def fill_rows(documents: Documents, seq_len: int) -> Iterator[Filling]:
    """Pack all documents with one packing after the other."""
    make: Any
    make, ways = SPECIAL.get(documents.holds or "", (None, ()))
    packings = PACKINGS if make is None else [(str(documents.holds), way) for way in ways]
    for method, long_documents in packings:
        rows: PackedRows
        try:
            if make is not None:
                rows = make(documents, max_length=seq_len, long_documents=long_documents)
            else:
                rows = pack(documents, seq_len=seq_len, method=method, long_documents=long_documents)  # type: ignore[arg-type]
        except UsageError as error:
            yield Filling(method=method, long_documents=long_documents, problem=str(error))
            continue
        report = rows.report
        cut = report.num_split_documents + report.num_truncated_documents
        yield Filling(
            method=method,
            long_documents=long_documents,
            num_rows=report.num_rows,
            num_tokens=report.num_tokens,
            padding=report.padding,
            num_cut_documents=_count_cut(documents, seq_len, rows.num_rows) if method == "concat" else cut,
            num_lost_tokens=report.num_truncated_tokens + report.num_left_over_tokens,
            left_out=report.left_out,
            row_len=rows.seq_len,
            rows=_draw(rows),
        )


def _count_cut(documents: Documents, seq_len: int, num_rows: int) -> int:
    """Count the documents of one stream that cross the end of a row."""
    count, start = 0, 0
    for lengths in documents.lengths():
        stops = np.cumsum(lengths) + start
        first, last = (stops - lengths) // seq_len, (stops - 1) // seq_len
        count += int(np.count_nonzero((first < last) & (first < num_rows)))
        start = int(stops[-1])
    return count


def _draw(rows: PackedRows) -> list[DrawnRow]:
    """Draw rows spread over the epoch: best-fit puts its full rows first, so the first ones would show little."""
    count = min(NUM_DRAWN_ROWS, rows.num_rows)
    numbers = np.arange(count) * rows.num_rows // count
    segments, spans = rows.segments(numbers), rows.spans(numbers)
    row_of = np.repeat(np.arange(count), np.diff(segments.ends, prepend=0))
    begins, _ = rows.documents.bounds(segments.documents)
    # Either each segment is one span, or each row is.
    is_each = len(spans.starts) == len(segments.starts)
    is_cut_before = (spans.starts if is_each else spans.starts[row_of] + segments.starts) > begins
    drawn: list[list[DrawnSegment]] = [[] for _ in range(count)]
    for place, row in enumerate(row_of.tolist()):
        drawn[row].append(
            DrawnSegment(
                document=int(segments.documents[place]),
                start=int(segments.starts[place]),
                num_tokens=int(segments.lengths[place]),
                is_cut_before=bool(is_cut_before[place]),
                is_cut_behind=not segments.is_end[place],
            )
        )
    return [
        DrawnRow(
            number=number,
            segments=some[:MOST_SEGMENTS],
            num_more_documents=len(some[MOST_SEGMENTS:]),
            num_more_tokens=sum(segment.num_tokens for segment in some[MOST_SEGMENTS:]),
        )
        for number, some in zip(numbers.tolist(), drawn, strict=True)
    ]
