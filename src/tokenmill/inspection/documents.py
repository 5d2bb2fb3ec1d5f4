"""Single documents and training rows, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.dataset.base import Rows
from tokenmill.dataset.copying import RowBlock
from tokenmill.engines.decoding import Decoder
from tokenmill.inspection.tokens import DrawnIds, DrawnTokens, TokenGroup, group_tokens
from tokenmill.progress import show_safely
from tokenmill.store.sources import read_sources
from tokenmill.store.store import TokenStore

__all__ = ["document_json", "render_document", "render_row", "row_json"]

LAST_GROUPS = 2
MOST_PER_CHARACTER = 4
"""A character of UTF-8 has four bytes, so no more tokens than that can share one."""


def render_document(store: TokenStore, number: int, split: str = "train", *, max_tokens: int = 200) -> RenderableType:
    """One document: where it came from, its text with tokens in alternating colours, its ids.

    Without colour, a bar stands between tokens. Of a long document the first `max_tokens` are
    shown, and always the last ones: that is where a missing EOS would be seen.
    """
    documents = store.split(split)
    ids = documents.document(number).tolist()
    trained = documents.mask.document(number).tolist() if documents.mask is not None else None
    show = _Shortener(store, max_tokens)
    head, tail, hidden = show.shorten(ids, trained)
    header = Table.grid(padding=(0, 2))
    header.add_column(style="bold cyan", no_wrap=True)
    header.add_column()
    for name, value in _describe_document(store, number, split, len(ids), trained):
        header.add_row(name, Text(value))
    return Group(header, Text(), DrawnTokens(head, tail, hidden), Text(), DrawnIds(head, tail, hidden))


def document_json(store: TokenStore, number: int, split: str = "train") -> dict[str, Any]:
    """One document as plain values: its ids, its text and where it came from."""
    documents = store.split(split)
    ids = documents.document(number).tolist()
    (origin,) = read_sources(documents, [number])
    document = {"document": number, "split": split, "ids": ids, "text": store.decode(ids), "from": origin}
    return document if documents.mask is None else {**document, "trained": documents.mask.document(number).tolist()}


def render_row(store: TokenStore, rows: Rows, number: int, *, max_tokens: int = 200) -> RenderableType:
    """One training row: the documents in it, each with its tokens in alternating colours, and padding."""
    tokens = rows[number].tolist()
    mask = _row_mask(rows, number)
    show = _Shortener(store, max_tokens)
    titles = dict.fromkeys([rows.title(), *(leaf.title() for leaf in rows.leaves())])
    parts: list[RenderableType] = [Text(f"row {number:,} of {' over '.join(titles)}\n", style="bold")]
    for document, start, length in _documents_of(rows, number):
        parts.append(Text(f"document {document:,}, tokens {start:,} to {start + length:,}", style="bold cyan"))
        some = slice(start, start + length)
        parts += [DrawnTokens(*show.shorten(tokens[some], mask[some] if mask is not None else None)), Text()]
    if len(tokens) < rows.seq_len:
        parts.append(Text(f"padding, tokens {len(tokens):,} to {rows.seq_len:,}", style="bold yellow"))
    return Group(*parts)


def row_json(store: TokenStore, rows: Rows, number: int) -> dict[str, Any]:
    """One training row as plain values: its ids without padding, and the documents in it."""
    ids = rows[number].tolist()
    documents = [
        {"document": document, "start": start, "tokens": length, "text": store.decode(ids[start : start + length])}
        for document, start, length in _documents_of(rows, number)
    ]
    row = {"row": number, "epoch": number // len(rows), "seq_len": rows.seq_len, "ids": ids, "documents": documents}
    mask = _row_mask(rows, number)
    return row if mask is None else {**row, "trained": mask[: len(ids)]}


def _documents_of(rows: Rows, number: int) -> list[tuple[int, int, int]]:
    return RowBlock(rows, np.array([number]), document_mask=False).cover.documents_of(0)


def _row_mask(rows: Rows, number: int) -> list[int] | None:
    """Which tokens of a row are trained on; None where the store is not supervised."""
    (choice,) = rows.resolve(np.array([number]))
    mask = choice.rows.documents.mask
    if mask is None:
        return None
    _, starts, lengths = choice.rows.spans(choice.numbers)
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [int(value) for start, length in spans for value in mask.read(start, start + length)]


class _Shortener:
    """The first tokens of a document, and its last ones, as groups of whole characters."""

    def __init__(self, store: TokenStore, max_tokens: int) -> None:
        self._decoder = Decoder(store.tokenizer)
        self._specials = set(store.tokenizer.special_tokens.values())
        self._max_tokens = max_tokens

    def shorten(self, ids: list[int], trained: list[int] | None) -> tuple[list[TokenGroup], list[TokenGroup], int]:
        """The first groups, the last ones, and how many tokens are left out between them."""
        margin = LAST_GROUPS * MOST_PER_CHARACTER
        if len(ids) <= self._max_tokens + margin:
            return self._group(ids, trained, slice(None)), [], 0
        head = self._group(ids, trained, slice(0, self._max_tokens + margin))
        ends = accumulate(len(group.ids) for group in head)
        head = head[: sum(end <= self._max_tokens for end in ends)]
        tail = self._group(ids, trained, slice(-margin, None))[-LAST_GROUPS:]
        return head, tail, len(ids) - sum(len(group.ids) for group in (*head, *tail))

    def _group(self, ids: list[int], trained: list[int] | None, some: slice) -> list[TokenGroup]:
        return group_tokens(ids[some], self._decoder, self._specials, trained[some] if trained is not None else None)


def _describe_document(
    store: TokenStore, number: int, split: str, num_tokens: int, trained: list[int] | None
) -> Iterator[tuple[str, str]]:
    documents = store.splits[split]
    yield "document", f"{number:,} of {split} ({documents.num_documents:,} documents), {num_tokens:,} tokens"
    if trained is not None:
        yield "trained", f"{sum(trained):,} tokens, {100 * sum(trained) / max(1, num_tokens):.1f}%"
    (row,) = read_sources(documents, [number])
    yield "from", f"{show_safely(store.manifest.inputs[row['input']].path)}, position {row['position']:,}"
    for name, value in row.items():
        if name.startswith("key."):
            yield show_safely(name.removeprefix("key.")), "not given" if value is None else show_safely(value)
