"""Documents for the page's browser: a sample spread over each split, and those that a table points to.

The page holds the ids of each document, and the text of each id once for all documents, which takes a third of the
space of text beside ids. Characters that are made of several tokens are stored where they occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from tokenmill.engines.decoder import Decoder
from tokenmill.formatting import shorten, show_safely
from tokenmill.store.sources import read_sources
from tokenmill.store.store import TokenStore
from tokenmill.tools.inspect.document_view import describe_origin, kept_fields
from tokenmill.tools.inspect.token_view import Excerpt, TokenGroup, group_tokens
from tokenmill.tools.report.figures import Figures

__all__ = ["BrowsedDocument", "browse"]

NUM_SAMPLED = 200
MOST_TOKENS = 1500
LEAST_TOKENS = 60
MOST_BYTES = 2_200_000
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
    """Tokens that are left out after the first `head` ids."""
    head: int = 0
    shared: list[tuple[int, int, str]] = []
    """Tokens that are no characters on their own: the first of them, how many, and their text together."""
    trained: list[tuple[int, int]] = []
    """Ranges of ids that are trained on."""


def browse(store: TokenStore, figures: Figures) -> bytes:
    """Encode documents, with notes about the odd ones, as JSON that fits a page.

    No document is left out; if they are too large together, each of them is cut shorter.
    """
    chosen = [origin for split, notes in _choose(store, figures).items() for origin in _origins(store, split, notes)]
    most_tokens = MOST_TOKENS
    while True:
        reader = _Reader(store, most_tokens)
        documents = [reader.read(**origin) for origin in chosen]
        browser = {
            "supervised": figures.is_supervised,
            "pieces": dict(sorted(reader.pieces.items())),
            "specials": sorted(reader.specials),
            "documents": documents,
        }
        data = msgspec.json.encode(browser)
        if len(data) <= MOST_BYTES or most_tokens <= LEAST_TOKENS:
            return data
        most_tokens = most_tokens * 2 // 3


def _choose(store: TokenStore, figures: Figures) -> dict[str, dict[int, list[str]]]:
    """Choose documents of each split, in order of their numbers, with notes about the odd ones."""
    chosen: dict[str, dict[int, list[str]]] = {}
    for name, split in store.splits.items():
        share = max(NUM_SAMPLED // 8, NUM_SAMPLED * split.num_documents // max(1, figures.num_documents))
        count = min(share, split.num_documents)
        chosen[name] = {number: [] for number in (np.arange(count) * split.num_documents // max(1, count)).tolist()}
    for suspicion in figures.suspicions:
        for example in suspicion.examples:
            note = f"{suspicion.name}: {example.detail}"
            chosen[example.split].setdefault(example.document, []).append(note)
    for run in figures.tokens.runs:
        chosen[run.split].setdefault(run.document, []).append(f"{run.num_tokens:,} times {run.text} ({run.id})")
    return {name: dict(sorted(notes.items())) for name, notes in chosen.items()}


def _origins(store: TokenStore, split: str, notes: dict[int, list[str]]) -> Iterator[dict[str, Any]]:
    """Look up where documents of a split came from, and their kept fields."""
    for number, row in zip(notes, read_sources(store.splits[split], list(notes)), strict=True):
        path = describe_origin(store.manifest.inputs[row["input"]].path, row["position"]) if "input" in row else ""
        fields = ((show_safely(name), value) for name, value in kept_fields(row).items() if value is not None)
        # Cut before it is made safe, because a field may be huge.
        keys = {name: shorten(show_safely(value[: LONGEST_FIELD + 1]), LONGEST_FIELD) for name, value in fields}
        yield {"split": split, "number": number, "origin": path, "keys": keys, "notes": notes[number]}


class _Reader:
    """Reads documents and collects the text of their ids."""

    def __init__(self, store: TokenStore, most_tokens: int) -> None:
        self._store = store
        self._most_tokens = most_tokens
        self._decoder = Decoder(store.tokenizer)
        self._specials = set(store.tokenizer.special_tokens.values())
        self.pieces: dict[int, str] = {}
        self.specials: set[int] = set()

    def read(self, split: str, number: int, **origin: Any) -> BrowsedDocument:
        """Read one document, cut between characters; a huge one is never read whole."""
        documents = self._store.splits[split]
        bounds = documents.bounds(np.array([number]))
        start, stop = int(bounds[0][0]), int(bounds[1][0])

        def group(a: int, b: int) -> list[TokenGroup]:
            return group_tokens(documents.read(start + a, start + b).tolist(), self._decoder, self._specials)

        excerpt = Excerpt.cut(group, stop - start, self._most_tokens)
        groups = [*excerpt.head, *excerpt.tail]
        ids = [token for group in groups for token in group.ids]
        num_head = sum(len(group.ids) for group in excerpt.head)
        trained: list[tuple[int, int]] = []
        if documents.mask is not None:
            seen = documents.mask.read(start, start + num_head).tolist()
            seen += documents.mask.read(stop - (len(ids) - num_head), stop).tolist()
            edges = np.flatnonzero(np.diff(np.array([0, *seen, 0], np.int8)))
            trained = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        return BrowsedDocument(
            split=split,
            number=number,
            num_tokens=stop - start,
            ids=ids,
            hidden=excerpt.hidden,
            head=num_head if excerpt.hidden else 0,
            shared=list(self._collect(groups)),
            trained=trained,
            **origin,
        )

    def _collect(self, groups: list[TokenGroup]) -> Iterator[tuple[int, int, str]]:
        """Collect the text of single tokens; yield the text of those that are no characters on their own."""
        place = 0
        for group in groups:
            token = group.ids[0]
            if group.special:
                self.specials.add(token)
                self.pieces[token] = _show(group.text)
            elif len(group.ids) == 1 and (token in self.pieces or _is_text(self._decoder.token_bytes(token))):
                self.pieces[token] = _show(group.text)
            else:
                yield place, len(group.ids), _show(group.text)
            place += len(group.ids)


def _is_text(spelling: bytes) -> bool:
    try:
        spelling.decode()
    except UnicodeDecodeError:
        return False
    return True


def _show(text: str) -> str:
    """As `show_safely`, but keep line ends and tabs, which the page marks itself."""
    return "".join(part if part in "\n\t" else show_safely(part) for part in re.split(r"([\n\t])", text))
