"""Find documents with code points on which the fast engine and the reference libraries disagree.

gigatoken has newer Unicode tables than `tokenizers` and `tiktoken`. A few thousand recently assigned code points are in
other classes, and NFC orders combining marks newer than Unicode 9 differently. `disputes.json` lists all of them, as
measured by `scripts/probe_code_points.py`. A document without any of them gets the same ids from both libraries.
Scanning every text would take longer than encoding it, so `DisputeFilter` searches the ids instead.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.text_batch import IntArray

__all__ = ["DisputeFilter", "Ranges", "disputed_ranges", "made_for", "merge_ranges", "versions_match"]

Ranges = tuple[tuple[int, int], ...]

# Comparing a uint32 array with a scalar takes 0.08-0.11 ns per token, a table look-up 1.0 ns (300,000 ids, numpy 2.4,
# x86-64).
_MAX_COMPARISONS = 9


class _Table(msgspec.Struct, frozen=True):
    """The data file: the first and the last code point of each range, in hexadecimal."""

    made_for: dict[str, str]
    letters: list[str]
    classes: list[str]
    nfc: list[str]
    cautious: list[str]


@lru_cache(maxsize=1)
def _table() -> _Table:
    return msgspec.json.decode(Path(__file__).with_name("disputes.json").read_bytes(), type=_Table)


def made_for() -> dict[str, str]:
    """Return the library versions for which the exact lists were measured."""
    return dict(_table().made_for)


@lru_cache(maxsize=8)
def versions_match(reference: str = "tokenizers") -> bool:
    """Whether gigatoken and `reference` are installed in exactly the versions of `made_for()`."""
    try:
        return all(metadata.version(name) == _table().made_for[name] for name in ("gigatoken", reference))
    except (metadata.PackageNotFoundError, KeyError):
        return False


def disputed_ranges(
    normalizes: bool, *, letters_only: bool = False, exact: bool | None = None, reference: str = "tokenizers"
) -> Ranges:
    """Return inclusive ranges of code points on which engine and reference can differ.

    `letters_only` is for patterns with no finer classes than `\\p{L}`, `\\p{N}` and `\\s`. For other library versions
    than the measured ones (`exact=False`; by default `versions_match` decides) the result is a superset: everything
    that Unicode 14 does not assign, and every code point on which the measured versions disagree. `tokenizers` 0.21,
    the oldest allowed version, has the tables of Unicode 14, and assigned code points hardly ever change class.
    """
    table = _table()
    if not (versions_match(reference) if exact is None else exact):
        return _parse(table.cautious)
    classes = table.letters if letters_only else table.classes
    return merge_ranges(_parse(classes + table.nfc if normalizes else classes))


def _parse(ranges: list[str]) -> Ranges:
    pairs = (item.partition("-") for item in ranges)
    return tuple((int(first, 16), int(last or first, 16)) for first, _, last in pairs)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join those that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


class DisputeFilter:
    """Finds documents with a disputed code point by their ids.

    The tokens of a byte-level vocabulary spell the (normalized) text byte by byte, so the first byte of each character
    is in some token. For a disputed character that token either contains the whole character or ends in a proper
    prefix of it. These tokens are the `suspects`, so no document is missed. Another byte of the character would work
    too, but first bytes are the most selective: GPT-2 has 3 suspects, and 13 to 99 for the second to fourth byte.
    Many characters share a prefix ("\\xea" starts every Hangul syllable), so the first bytes of the next token must
    match too: of 4,933 multilingual documents that leaves 24 instead of 411.
    """

    suspects: npt.NDArray[np.uint32]
    leads: int
    """The first bytes of disputed characters, as in `PackedTexts`. Most texts have none of them."""

    def __init__(self, ranges: Ranges, vocabulary: Mapping[int, bytes]) -> None:
        size = max(vocabulary, default=0) + 1
        ends = _token_ends(ranges, vocabulary)
        self.suspects = np.array(sorted(ends), np.uint32)
        prefixes = sorted(set(ends.values()) - {b""})
        self._heads, heads = _token_heads(vocabulary, size)
        # One row per prefix; row 0 is for tokens that contain the character. One column per head;
        # column 0 is for tokens that begin with a whole character.
        self._fits = np.zeros((len(prefixes) + 1, len(heads) + 1), np.bool_)
        self._fits[0] = True
        for row, prefix in enumerate(prefixes, 1):
            self._fits[row, 1:] = _can_follow(ranges, prefix, heads)
        self._rows = np.zeros(size, np.int32)
        for token, prefix in ends.items():
            self._rows[token] = prefixes.index(prefix) + 1 if prefix else 0
        self._is_suspect = np.zeros(size, np.bool_)
        self._is_suspect[self.suspects] = True
        self._scratch = np.empty((2, 0), np.bool_)
        self.leads = sum({1 << byte - 0xC0 for byte in _byte_tree(ranges)})
        disputed = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
        self._pattern = re.compile(f"[{disputed}]" if ranges else "(?!)")

    def flag(self, ids: IntArray, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices of the documents that may contain a disputed code point, in order.

        Every document with one is among them; `confirms` tells which of them really have one. This takes 0.4 to 1.3 ns
        per token, depending on the number of suspects, and 20 ns per occurrence of a suspect.
        """
        hits = self._hits(ids)
        if len(hits):
            following = ids[np.minimum(hits + 1, len(ids) - 1)]
            hits = hits[self._fits[self._rows[ids[hits]], self._heads[following]]]
        return np.unique(np.searchsorted(offsets, hits, side="right") - 1)

    def _hits(self, ids: IntArray) -> npt.NDArray[np.intp]:
        """Return the positions of suspect ids."""
        if not len(self.suspects):
            return np.zeros(0, np.intp)
        if self._scratch.shape[1] < len(ids):
            self._scratch = np.empty((2, len(ids)), np.bool_)
        found, scratch = self._scratch[:, : len(ids)]
        if len(self.suspects) > _MAX_COMPARISONS:
            self._is_suspect.take(ids, mode="clip", out=found)
        else:
            # Convert the suspects to the type of the ids, so that numpy does not widen the ids.
            suspects = self.suspects.astype(ids.dtype)
            np.equal(ids, suspects[0], out=found)
            for suspect in suspects[1:]:
                np.equal(ids, suspect, out=scratch)
                np.logical_or(found, scratch, out=found)
        # Most batches have no hit, and `any` takes a tenth of the time of `flatnonzero`.
        return np.flatnonzero(found) if found.any() else np.zeros(0, np.intp)

    def confirms(self, text: str) -> bool:
        """Whether the text really contains a disputed code point; about 30 MB/s on non-ASCII text."""
        return not text.isascii() and self._pattern.search(text) is not None


def _token_ends(ranges: Ranges, vocabulary: Mapping[int, bytes]) -> dict[int, bytes]:
    """Map each suspect to the prefix of a disputed character it ends in, or to b"" if it contains one.

    One regular expression searches all tokens at once: 10-50 ms for 50,000-150,000 tokens, a tenth of one search per
    token. "\xff" never occurs in UTF-8 and marks the end of a token.
    """
    items = [(token, spelling) for token, spelling in vocabulary.items() if not spelling.isascii()]
    starts = list(accumulate((len(spelling) + 1 for _, spelling in items), initial=0))
    ends: dict[int, bytes] = {}
    for match in _end_pattern(ranges).finditer(b"\xff".join([spelling for _, spelling in items]) + b"\xff"):
        token = items[bisect_right(starts, match.start()) - 1][0]
        prefix, is_end, _ = match.group().partition(b"\xff")
        ends[token] = ends.get(token, prefix) if is_end else b""
    return ends


@lru_cache(maxsize=8)
def _end_pattern(ranges: Ranges) -> re.Pattern[bytes]:
    return re.compile(_tree_pattern(_byte_tree(ranges)) or b"(?!)")


_ByteTree = dict[int, Any]
_ALL_LAST_BYTES: _ByteTree = dict.fromkeys(range(0x80, 0xC0))


def _byte_tree(ranges: Ranges) -> _ByteTree:
    """Build a tree of the UTF-8 spellings of all disputed characters, one level per byte.

    64 code points share all bytes but the last. Whole planes may be disputed, so full blocks of 64 share one leaf.
    """
    tree: _ByteTree = {}
    for first, last in ranges:
        for block in range(first >> 6, (last >> 6) + 1):
            node = tree
            *path, end = chr(block << 6).encode()[:-1]
            for byte in path:
                node = node.setdefault(byte, {})
            low, high = max(first, block << 6), min(last, block << 6 | 0x3F)
            if high - low == 0x3F:
                node[end] = _ALL_LAST_BYTES
            else:
                node.setdefault(end, {}).update(dict.fromkeys(range(0x80 | low & 0x3F, (0x80 | high & 0x3F) + 1)))
    return tree


def _tree_pattern(tree: _ByteTree) -> bytes:
    """Build a pattern that matches a spelling, or a proper prefix of one followed by the mark of a token's end.

    Bytes with equal subtrees share a branch, so that thousands of characters take a few kilobytes.
    """
    if tree is _ALL_LAST_BYTES:
        return b"[\x80-\xbf]"
    branches: dict[bytes, list[int]] = {}
    for byte, node in sorted(tree.items()):
        branches.setdefault(b"(?:\xff|" + _tree_pattern(node) + b")" if node else b"", []).append(byte)
    return b"|".join(
        b"[" + b"".join(b"\\x%02x" % head for head in heads) + b"]" + tail for tail, heads in branches.items()
    )


def _token_heads(vocabulary: Mapping[int, bytes], size: int) -> tuple[npt.NDArray[np.int32], list[bytes]]:
    """Number the head of each token, the continuation bytes it starts with; 0 is for none."""
    numbers: dict[bytes, int] = {}
    column = np.zeros(size, np.int32)
    for token, spelling in vocabulary.items():
        if spelling and 0x80 <= spelling[0] < 0xC0:
            length = next((i for i, byte in enumerate(spelling[:3]) if not 0x80 <= byte < 0xC0), 3)
            column[token] = numbers.setdefault(spelling[:length], len(numbers) + 1)
    return column, list(numbers)


def _can_follow(ranges: Ranges, prefix: bytes, heads: list[bytes]) -> npt.NDArray[np.bool_]:
    """For each head, whether a disputed character can start with `prefix` and continue with that head.

    A short head leaves a range of code points possible, one of which has to be disputed. Of a long head only the first
    bytes belong to the character.
    """
    missing = (2 if prefix[0] < 0xE0 else 3 if prefix[0] < 0xF0 else 4) - len(prefix)
    low = np.array([_bits(prefix + head[:missing]) << 6 * max(missing - len(head), 0) for head in heads], np.int64)
    high = low | np.array([(1 << 6 * max(missing - len(head), 0)) - 1 for head in heads], np.int64)
    starts, stops = np.array(ranges, np.int64).T
    nearest = np.searchsorted(starts, high, side="right") - 1
    fits: npt.NDArray[np.bool_] = (nearest >= 0) & (stops[nearest] >= low)
    return fits


def _bits(spelling: bytes) -> int:
    """Return the bits of a code point that the first bytes of its UTF-8 spelling contain."""
    first = spelling[0]
    value = first & (0x1F if first < 0xE0 else 0x0F if first < 0xF0 else 0x07)
    for byte in spelling[1:]:
        value = value << 6 | byte & 0x3F
    return value
