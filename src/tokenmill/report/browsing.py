"""Documents for the page's browser: a sample spread over each split, and those that a table points to.

The ids of a document are stored with the text of each id once for all documents, which is a third of the size of
text and ids side by side. Text whose characters are parts of several tokens is stored where it comes up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tokenmill.engines.decoding import Decoder
from tokenmill.inspection.tokens import TokenGroup, group_tokens
from tokenmill.progress import show_safely
from tokenmill.store.documents import Documents
from tokenmill.store.sources import read_sources
from tokenmill.store.store import TokenStore

__all__ = ["NUM_SAMPLED", "BrowsedDocument", "Browser", "browse", "choose_documents"]

NUM_SAMPLED = 200
MOST_TOKENS = 1500
LEAST_TOKENS = 60
MOST_BYTES = 2_200_000
LAST_TOKENS = 4
MARGIN_TOKENS = 8
"""Characters of four tokens at most are cut through; with twice as many at hand, whole ones are left."""
LONGEST_FIELD = 200


class BrowsedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document: the first of its ids and the last ones."""

    split: str
    number: int
    num_tokens: int
    origin: str
    keys: dict[str, str] = {}
    notes: list[str] = []
    ids: list[int]
    hidden: int = 0
    """Tokens that are left out, behind the first `head` ids."""
    head: int = 0
    shared: list[tuple[int, int, str]] = []
    """Where characters are parts of several tokens, or no characters: the first token, how many, and the text."""
    trained: list[tuple[int, int]] = []
    """Ids that are trained on, from one up to another."""


class Browser(msgspec.Struct, frozen=True, kw_only=True):
    """All documents of the browser, and the text of their ids."""

    supervised: bool
    pieces: dict[int, str]
    specials: list[int]
    documents: list[BrowsedDocument]


def choose_documents(documents: Documents, count: int) -> list[int]:
    """Numbers spread evenly over a split."""
    count = min(count, documents.num_documents)
    return (np.arange(count) * documents.num_documents // max(1, count)).tolist()


def browse(store: TokenStore, chosen: dict[tuple[str, int], list[str]]) -> bytes:
    """Documents by split and number, with notes about them, as JSON that fits a page.

    All documents stay; where they are too much together, less of each is shown.
    """
    origins = _find_origins(store, list(chosen))
    most_tokens = MOST_TOKENS
    while True:
        reader = _Reader(store, most_tokens)
        documents = [
            reader.read(split, number, origins[split, number], notes) for (split, number), notes in chosen.items()
        ]
        browser = Browser(
            supervised=any(split.mask is not None for split in store.splits.values()),
            pieces=dict(sorted(reader.pieces.items())),
            specials=sorted(reader.specials),
            documents=documents,
        )
        data = msgspec.json.encode(browser)
        if len(data) <= MOST_BYTES or most_tokens <= LEAST_TOKENS:
            return data
        most_tokens = most_tokens * 2 // 3


def _find_origins(
    store: TokenStore, chosen: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], tuple[str, dict[str, str]]]:
    """Where documents came from, and their kept fields."""
    found = {}
    for name, split in store.splits.items():
        numbers = [number for where, number in chosen if where == name]
        for number, row in zip(numbers, read_sources(split, numbers), strict=True):
            found[name, number] = _describe_origin(store, row)
    return found


def _describe_origin(store: TokenStore, row: dict[str, Any]) -> tuple[str, dict[str, str]]:
    if "input" not in row:
        return "", {}
    keys = {
        show_safely(name.removeprefix("key.")): _shorten(value)
        for name, value in row.items()
        if name.startswith("key.") and value is not None
    }
    return f"{show_safely(store.manifest.inputs[row['input']].path)}, position {row['position']:,}", keys


def _shorten(text: str) -> str:
    shown = show_safely(text[: LONGEST_FIELD + 1])
    return shown if len(shown) <= LONGEST_FIELD else shown[:LONGEST_FIELD] + "…"


class _Reader:
    """Reads documents and collects the text of the ids that come up."""

    def __init__(self, store: TokenStore, most_tokens: int) -> None:
        self._store = store
        self._most_tokens = most_tokens
        self._decoder = Decoder(store.tokenizer)
        self._specials = set(store.tokenizer.special_tokens.values())
        self._is_text: dict[int, bool] = {}
        self.pieces: dict[int, str] = {}
        self.specials: set[int] = set()

    def read(self, split: str, number: int, origin: tuple[str, dict[str, str]], notes: list[str]) -> BrowsedDocument:
        """One document, cut between characters."""
        documents = self._store.splits[split]
        bounds = documents.bounds(np.array([number]))
        start, stop = int(bounds[0][0]), int(bounds[1][0])
        head, tail = self._cut(documents, start, stop)
        groups = [*head, *tail]
        ids = [token for group in groups for token in group.ids]
        num_head = sum(len(group.ids) for group in head)
        hidden = stop - start - len(ids)
        trained: list[tuple[int, int]] = []
        if documents.mask is not None:
            seen = documents.mask.read(start, start + num_head).tolist()
            seen += documents.mask.read(stop - (len(ids) - num_head), stop).tolist()
            trained = list(_spans(seen))
        return BrowsedDocument(
            split=split,
            number=number,
            num_tokens=stop - start,
            origin=origin[0],
            keys=origin[1],
            notes=notes,
            ids=ids,
            hidden=hidden,
            head=num_head if hidden else 0,
            shared=list(self._collect(groups)),
            trained=trained,
        )

    def _cut(self, documents: Documents, start: int, stop: int) -> tuple[list[TokenGroup], list[TokenGroup]]:
        """The first and the last characters; a document is never read whole, because it may be huge."""
        if stop - start <= self._most_tokens + MARGIN_TOKENS + LAST_TOKENS:
            return self._group(documents, start, stop), []
        head = self._group(documents, start, start + self._most_tokens + MARGIN_TOKENS)
        num_left = self._most_tokens
        for number, group in enumerate(head):
            num_left -= len(group.ids)
            if num_left < 0:
                head = head[:number]
                break
        tail = self._group(documents, stop - LAST_TOKENS - MARGIN_TOKENS, stop)
        num_left = LAST_TOKENS
        for number, group in enumerate(reversed(tail)):
            num_left -= len(group.ids)
            if num_left < 0:
                tail = tail[len(tail) - number :]
                break
        return head, tail

    def _group(self, documents: Documents, start: int, stop: int) -> list[TokenGroup]:
        return group_tokens(documents.read(start, stop).tolist(), self._decoder, self._specials)

    def _collect(self, groups: list[TokenGroup]) -> Iterator[tuple[int, int, str]]:
        """Note the text of ids that always have the same; yields where it is otherwise."""
        place = 0
        for group in groups:
            token = group.ids[0]
            if group.special:
                self.specials.add(token)
                self.pieces[token] = _show(group.text)
            elif len(group.ids) == 1 and self._spells_text(token):
                self.pieces[token] = _show(group.text)
            else:
                yield place, len(group.ids), _show(group.text)
            place += len(group.ids)

    def _spells_text(self, token: int) -> bool:
        if token not in self._is_text:
            try:
                self._decoder.token_bytes(token).decode()
                self._is_text[token] = True
            except UnicodeDecodeError:
                self._is_text[token] = False
        return self._is_text[token]


def _show(text: str) -> str:
    """As `show_safely`, but line ends and tabs are kept: the page marks them itself."""
    return "".join(part if part in "\n\t" else show_safely(part) for part in re.split(r"([\n\t])", text))


def _spans(values: list[int]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.array([0, *values, 0], np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
