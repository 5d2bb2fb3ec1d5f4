"""Where rows are in memory: the spans of thousands of rows, of any datasets, as addresses for the loops that copy."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Integers, ResolvedRows, Spans
from tokenmill.filling import kernels
from tokenmill.filling.context import RowCutter
from tokenmill.filling.pieces_of_streams import Following, cut_stream
from tokenmill.store.documents import Documents

__all__ = ["LocatedSpans", "locate"]

ROWS_PER_RUN = 8
"""With fewer rows in a run of documents on average, rows are cut at the ends of runs all at once, not one by one."""

_Apart = tuple[int, int, int, Documents, int, int]


class LocatedSpans(NamedTuple):
    """The spans of rows that are copied in the same way and have one type, with their places in memory.

    `at` are the places of their rows in the chunk, ascending; None for all of its rows. Row i has the spans from
    `edges[i]` up to `edges[i + 1]`. Span i begins with token `indices[i]` of memory, see `everywhere`. Spans that are
    not in one piece of mapped memory have the index -1, or that of another row if rows are contiguous. They are in
    `apart`: (row, column in it, length, documents, first token, number of targets). Padding has the index `BLANK`.
    `followed` are the spans whose last token has a target, the token after them: (row, column, span) of each.

    If a cutter makes several strips of a row, all this is about strips.
    """

    is_contiguous: bool
    num_strips: int
    stored: np.dtype[Any]
    at: Integers | None
    edges: Integers
    lengths: Integers
    indices: Integers
    apart: list[_Apart]
    followed: tuple[Integers, Integers, Integers] | None
    name: str
    following: Following | None = None


def locate(
    found: list[ResolvedRows], suffix: str | None, num_rows: int, cutter: RowCutter | None
) -> list[LocatedSpans]:
    """Locate rows, or the values that stores have beside their tokens, in files that end in `suffix`.

    All rows of one kind and type are located together, so that a mixture costs no more than its sources.
    """
    groups: dict[tuple[bool, np.dtype[Any]], list[tuple[Documents, ResolvedRows]]] = {}
    for resolved in found:
        documents: Documents | None = resolved.rows.documents
        if suffix is not None:
            documents = resolved.rows.documents.view(suffix) if suffix in resolved.rows.documents.beside else None
        if documents is not None:
            groups.setdefault((resolved.rows.has_lookahead, documents.dtype), []).append((documents, resolved))
    return [_locate_group(group, num_rows, cutter) for group in groups.values()]


def _locate_group(group: list[tuple[Documents, ResolvedRows]], num_rows: int, cutter: RowCutter | None) -> LocatedSpans:
    spans = [resolved.rows.spans(resolved.numbers) for _, resolved in group]
    is_stream, following = group[0][1].rows.has_lookahead, None
    width = group[0][1].rows.seq_len
    places: list[Any] = [resolved.at for _, resolved in group]
    followed: list[Any] = [None] * len(group)
    if cutter is not None:
        cut = [cutter.cut_spans(resolved.rows, some) for (_, resolved), some in zip(group, spans, strict=True)]
        spans, followed = [some for some, _ in cut], [some for _, some in cut]
        places = [None if at is None else cutter.strips_of(at) for at in places]
        num_rows *= cutter.num_strips
    elif is_stream and any(some.is_scattered and some.run_tokens < ROWS_PER_RUN * width for some, _ in group):
        spans, following = cut_stream([documents for documents, _ in group], spans)
    join: Any = np.concatenate if len(group) > 1 else itemgetter(0)
    order: Any = slice(None)
    at, ends = places[0], spans[0].ends
    if at is not None:
        at = join(places)
        sizes = join([np.diff(some.ends, prepend=0) for some in spans])
        by_row = np.argsort(at, kind="stable")
        firsts, sizes = (np.cumsum(sizes) - sizes)[by_row], sizes[by_row]
        ends = np.cumsum(sizes)
        order = np.arange(int(sizes.sum())) + np.repeat(firsts - (ends - sizes), sizes)
        following = following and following.in_order(by_row)
        at = at[by_row] if len(at) < num_rows else None
    has_next = None
    if any(some is not None for some in followed):
        pairs = zip(followed, spans, strict=True)
        followed = [np.zeros(len(own.starts), bool) if some is None else some for some, own in pairs]
        has_next = join(followed)[order]
    found = [(documents, some, more) for (documents, _), some, more in zip(group, spans, followed, strict=True)]
    if cutter is None:
        addresses = join([documents.addresses(some.starts, some.lengths) for documents, some, _ in found])[order]
    else:
        addresses = join([_find_addresses(*some) for some in found])[order]
    edges, lengths = np.append(0, ends), join([some.lengths for some in spans])[order]
    stored, is_contiguous = group[0][0].dtype, is_stream and following is None
    apart: list[_Apart] = []
    numbers = np.flatnonzero(addresses == 0)
    if len(numbers):
        owners = np.repeat(np.arange(len(group)), [len(some.starts) for some in spans])[order][numbers]
        sources = [group[owner][0] for owner in owners.tolist()]
        starts = join([some.starts for some in spans])[order]
        apart = _list_apart(sources, numbers, edges, starts, lengths, has_next)
        if is_contiguous:
            # The loops copy every row, so use a row that is in memory in place of each that is not.
            addresses[numbers] = addresses.max()
    return LocatedSpans(
        is_contiguous=is_contiguous,
        num_strips=1 if cutter is None else cutter.num_strips,
        stored=stored,
        at=at,
        edges=edges,
        lengths=lengths,
        indices=addresses // stored.itemsize - 1,
        apart=apart,
        followed=None if has_next is None else _find_followed(edges, lengths, addresses, has_next),
        name=" or ".join(dict.fromkeys(documents.name for documents, _ in group)),
        following=following,
    )


def _list_apart(
    sources: list[Documents],
    numbers: Integers,
    edges: Integers,
    starts: Integers,
    lengths: Integers,
    has_next: npt.NDArray[np.bool_] | None,
) -> list[_Apart]:
    """List the spans with these numbers, which are read one by one."""
    rows, columns = _places(edges, lengths, numbers)
    sizes = lengths[numbers]
    targets = sizes - 1 if has_next is None else sizes - 1 + has_next[numbers]
    columns_of = (rows, columns, sizes, sources, starts[numbers], targets)
    lists = (some if isinstance(some, list) else some.tolist() for some in columns_of)
    return list(zip(*lists, strict=True))


def _find_addresses(documents: Documents, spans: Spans, followed: npt.NDArray[np.bool_] | None) -> Integers:
    """Return where spans are in memory, each with the token after it if that is a target; 0 if they are not."""
    lengths = spans.lengths if followed is None else spans.lengths + followed
    is_blank = spans.starts < 0
    if not is_blank.any():
        return documents.addresses(spans.starts, lengths)
    found = np.full(len(lengths), (kernels.BLANK + 1) * documents.dtype.itemsize)
    found[~is_blank] = documents.addresses(spans.starts[~is_blank], lengths[~is_blank])
    return found


def _places(edges: Integers, lengths: Integers, numbers: Integers) -> tuple[Integers, Integers]:
    """Return the row of some spans, and the column in it at which each begins."""
    rows = np.searchsorted(edges, numbers, "right") - 1
    before = np.append(0, np.cumsum(lengths))
    return rows, before[numbers] - before[edges[rows]]


def _find_followed(
    edges: Integers, lengths: Integers, addresses: Integers, has_next: npt.NDArray[np.bool_]
) -> tuple[Integers, Integers, Integers]:
    """Return row, column and number of the spans in memory whose last token has the token after it as a target."""
    numbers = np.flatnonzero(has_next & (addresses > 0))
    rows, columns = _places(edges, lengths, numbers)
    return rows, columns + lengths[numbers] - 1, numbers
