"""Find the bytes of UTF-8 that each token stands for.

The tokens of most tokenizers spell the text byte by byte, so that their lengths give their places; this is checked for
every document. If a normalizer has changed the text, the reference library returns the offsets.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.engines._guard import guarded
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.decoder import Decoder
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import IntArray, TokenBatch

__all__ = ["Aligner", "Places", "count_bytes"]

Places = npt.NDArray[np.int64]
MOST_SPELLED = 16 << 20
"""The bytes of documents that are compared with their tokens at once; more are compared one document at a time."""


class Aligner:
    """Finds the places of an engine's tokens in their texts."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        decoder = Decoder(tokenizer)
        self._spellings = [decoder.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._lengths = np.array([len(spelling) for spelling in self._spellings], np.int64)
        self._bytes = np.frombuffer(b"".join(self._spellings), np.uint8)
        self._places = np.cumsum(self._lengths) - self._lengths
        self._normalizes = tokenizer.kind == "sentencepiece" or tokenizer.config.get("normalizer") is not None

    def align(self, texts: list[str], batch: TokenBatch) -> tuple[Places, Places]:
        """Return the first byte of each token in its text, and the byte after its last."""
        lengths = self._lengths[batch.ids]
        ends = np.cumsum(lengths)
        edges = np.concatenate([[0], ends])[batch.offsets]
        stops = ends - np.repeat(edges[:-1], np.diff(batch.offsets))
        starts = stops - lengths
        sizes = count_bytes(texts)
        doubtful = np.diff(edges) != sizes
        if self._normalizes:
            changeable = np.array([not text.isascii() for text in texts], bool)
            doubtful |= self._differ(texts, batch, sizes, changeable & ~doubtful)
        for number in np.flatnonzero(doubtful).tolist():
            some = slice(int(batch.offsets[number]), int(batch.offsets[number + 1]))
            starts[some], stops[some] = self._align_one(texts[number], batch.ids[some], starts[some], stops[some])
        return starts, stops

    def _differ(self, texts: list[str], batch: TokenBatch, sizes: Places, which: npt.NDArray[np.bool_]) -> Any:
        """Return which of some documents, whose tokens have as many bytes as their texts, have other bytes."""
        numbers = np.flatnonzero(which)
        ends = np.cumsum(sizes[which])
        if not len(numbers) or ends[-1] > MOST_SPELLED:
            return which
        ids = batch.ids[np.repeat(which, np.diff(batch.offsets))]
        lengths = self._lengths[ids]
        index = np.repeat(self._places[ids] - (np.cumsum(lengths) - lengths), lengths)
        index += np.arange(len(index))
        written = np.frombuffer("".join([texts[number] for number in numbers.tolist()]).encode(), np.uint8)
        wrong = np.flatnonzero(self._bytes[index] != written)
        found = np.zeros(len(texts), bool)
        found[numbers[np.searchsorted(ends, wrong, "right")]] = True
        return found

    def _align_one(self, text: str, ids: IntArray, starts: Places, stops: Places) -> tuple[Places, Places]:
        spelled = b"".join([self._spellings[token] for token in ids.tolist()])
        data = text.encode()
        if spelled == data:
            return starts, stops
        if spelled == b" " + data:
            # The tokenizer has put a space in front of the text.
            return np.maximum(starts - 1, 0), stops - 1
        edges = _byte_edges(text)
        found, spans = self._reference_offsets(text)
        if found != ids.tolist():
            raise RuntimeError(f"the reference gives other ids for {text[:60]!r} than the engine did")
        places = np.array(spans, np.int64).reshape(-1, 2)
        return edges[places[:, 0]], edges[places[:, 1]]

    def _reference_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and their spans of characters, according to the reference."""
        if self._tokenizer.kind == "sentencepiece":
            pieces = self._library.encode(text, out_type="immutable_proto").pieces
            return [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]
        with guarded(self._tokenizer.shown, "cannot encode a text"):
            ids, spans = self._library.align(text)
        return ids, spans

    @cached_property
    def _library(self) -> Any:
        return self._tokenizer.open_library(self._special_tokens)


def count_bytes(texts: list[str]) -> Places:
    """Count the bytes of each text in UTF-8."""
    return np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)


def _byte_edges(text: str) -> Places:
    """Return the place in UTF-8 of each character of a text, and of its end."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)])
