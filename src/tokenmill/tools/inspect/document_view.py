"""Single documents and training rows: where they came from, and the text and the id of each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tokenmill.dataset.rows import Rows
from tokenmill.display.tables import make_facts
from tokenmill.engines.decoder import Decoder
from tokenmill.formatting import plural, show_safely
from tokenmill.store.sources import read_sources
from tokenmill.store.store import TokenStore
from tokenmill.tools._document_parts import DocumentPart, document_parts
from tokenmill.tools.inspect.token_view import DrawnIds, DrawnTokens, Excerpt, group_tokens

__all__ = ["describe_origin", "document_json", "kept_fields", "render_document", "render_row", "row_json"]


def render_document(store: TokenStore, number: int, split: str = "train", *, max_tokens: int = 200) -> RenderableType:
    """Draw one document: where it came from, its text with tokens in alternating colours, and its ids.

    Without colour, a bar separates tokens. A long document shows its first `max_tokens` and always its last ones,
    where a missing EOS would be seen.
    """
    documents = store.split(split)
    ids = documents.document(number).tolist()
    trained = documents.mask.document(number).tolist() if documents.mask is not None else None
    excerpt = _Excerpts(store, max_tokens).cut(ids, trained)
    facts = make_facts(_describe_document(store, number, split, len(ids), trained))
    return Group(facts, Text(), DrawnTokens(excerpt), Text(), DrawnIds(excerpt))


def document_json(store: TokenStore, number: int, split: str = "train") -> dict[str, Any]:
    """One document as plain values: its ids, its text and where it came from."""
    documents = store.split(split)
    ids = documents.document(number).tolist()
    (origin,) = read_sources(documents, [number])
    document = {"document": number, "split": split, "ids": ids, "text": store.decode(ids), "from": origin}
    return document if documents.mask is None else {**document, "trained": documents.mask.document(number).tolist()}


def render_row(store: TokenStore, rows: Rows, number: int, *, max_tokens: int = 200) -> RenderableType:
    """Draw one training row: its documents, each with its tokens in alternating colours, and its padding."""
    tokens = rows[number].tolist()
    mask = _row_mask(rows, number)
    excerpts = _Excerpts(store, max_tokens)
    titles = dict.fromkeys([rows.title(), *(leaf.title() for leaf in rows.leaves())])
    parts: list[RenderableType] = [Text(f"row {number:,} of {' over '.join(titles)}\n", style="bold")]
    for document, start, offset, length in _parts_of(rows, number):
        at, inside = (f"{first:,} to {first + length:,}" for first in (start, offset))
        parts.append(Text(f"document {document:,}, its tokens {inside}, at {at} of the row", style="bold cyan"))
        some = slice(start, start + length)
        parts += [DrawnTokens(excerpts.cut(tokens[some], mask[some] if mask is not None else None)), Text()]
    if len(tokens) < rows.seq_len:
        parts.append(Text(f"padding, tokens {len(tokens):,} to {rows.seq_len:,}", style="bold yellow"))
    return Group(*parts)


def row_json(store: TokenStore, rows: Rows, number: int) -> dict[str, Any]:
    """One training row as plain values: its ids without padding, and its documents."""
    ids = rows[number].tolist()
    documents = [
        {
            "document": part.document,
            "start": part.start,
            "offset": part.offset,
            "tokens": part.num_tokens,
            "text": store.decode(ids[part.start : part.start + part.num_tokens]),
        }
        for part in _parts_of(rows, number)
    ]
    row = {"row": number, "epoch": number // len(rows), "seq_len": rows.seq_len, "ids": ids, "documents": documents}
    mask = _row_mask(rows, number)
    return row if mask is None else {**row, "trained": mask[: len(ids)]}


def _parts_of(rows: Rows, number: int) -> list[DocumentPart]:
    (choice,) = rows.resolve(np.array([number]))
    return document_parts(choice.rows, choice.numbers)[0]


def _row_mask(rows: Rows, number: int) -> list[int] | None:
    """The loss mask of a row; None if the store is not supervised."""
    (choice,) = rows.resolve(np.array([number]))
    mask = choice.rows.documents.mask
    if mask is None:
        return None
    _, starts, lengths = choice.rows.spans(choice.numbers)
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [int(value) for start, length in spans for value in mask.read(start, start + length)]


class _Excerpts:
    """Cuts excerpts of documents for display."""

    def __init__(self, store: TokenStore, max_tokens: int) -> None:
        self._decoder = Decoder(store.tokenizer)
        self._specials = set(store.tokenizer.special_tokens.values())
        self._max_tokens = max_tokens

    def cut(self, ids: list[int], trained: list[int] | None) -> Excerpt:
        return Excerpt.cut(
            lambda start, stop: group_tokens(
                ids[start:stop], self._decoder, self._specials, trained[start:stop] if trained is not None else None
            ),
            len(ids),
            self._max_tokens,
        )


def _describe_document(
    store: TokenStore, number: int, split: str, num_tokens: int, trained: list[int] | None
) -> Iterator[tuple[str, str]]:
    documents = store.splits[split]
    yield (
        "document",
        f"{number:,} of {split} ({plural(documents.num_documents, 'document')}), {plural(num_tokens, 'token')}",
    )
    if documents.holds == "pairs":
        yield "pair", f"{number // 2:,}, the {'rejected' if number % 2 else 'chosen'} answer with its prompt"
    if trained is not None:
        yield "trained", f"{plural(sum(trained), 'token')}, {100 * sum(trained) / max(1, num_tokens):.1f}%"
    (row,) = read_sources(documents, [number])
    yield "from", describe_origin(store.manifest.inputs[row["input"]].path, row["position"])
    for name, value in kept_fields(row).items():
        yield show_safely(name), "not given" if value is None else show_safely(value)


def describe_origin(path: str, position: int | None) -> str:
    """`data/a.jsonl, position 5`."""
    return show_safely(path) + ("" if position is None else f", position {position:,}")


def kept_fields(row: dict[str, Any]) -> dict[str, str | None]:
    """The fields of a document that `--keep-keys` kept, from its row in the table of documents."""
    return {name.removeprefix("key."): value for name, value in row.items() if name.startswith("key.")}
