"""What each id of a vocabulary stands for, as arrays, so that tokens are looked up millions at a time."""

from __future__ import annotations

import numpy as np

from tokenmill.engines.decoding import Decoder
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.progress import show_safely

__all__ = ["Vocabulary", "show_piece"]

REPLACEMENT = "\ufffd".encode()
LONGEST_PIECE = 20
ENDS_1, ENDS_2, IS_MIDDLE, STARTS_2, STARTS_1 = 1, 2, 4, 8, 16
"""Tokens that hold a part of U+FFFD, which is EF BF BD: its first byte or two at their end, BF alone, BF BD or BD
at their start."""


class Vocabulary:
    """Spellings of all ids: `sizes` in bytes (0 for special tokens), and what they hold of U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._decoder = Decoder(tokenizer)
        self.specials = frozenset(tokenizer.special_tokens.values())
        spellings = [b"" if token in self.specials else self.spell(token) for token in range(size)]
        self.sizes = np.array([len(spelling) for spelling in spellings], np.int64)
        self._replacements = np.array([spelling.count(REPLACEMENT) for spelling in spellings], np.int64)
        self._parts = np.array([_parts_of_replacement(spelling) for spelling in spellings], np.uint8)

    def spell(self, token: int) -> bytes:
        """The bytes of a token; none for an id that a vocabulary has left out."""
        try:
            return self._decoder.token_bytes(token)
        except (KeyError, IndexError, ValueError):
            return b""

    def show(self, token: int) -> str:
        """A token in a table: spaces and bytes that are no character are made visible."""
        return show_piece(self.spell(token))

    def count_replacements(self, ids: np.ndarray) -> np.ndarray:
        """For each token the characters U+FFFD that end in it, whether whole tokens or parts of several."""
        found: np.ndarray = self._replacements[ids]
        parts = self._parts[ids]
        if not parts.any():
            return found
        before, here = parts[:-1], parts[1:]
        found[1:] += ((before & ENDS_1 > 0) & (here & STARTS_2 > 0)) | ((before & ENDS_2 > 0) & (here & STARTS_1 > 0))
        found[2:] += (parts[:-2] & ENDS_1 > 0) & (parts[1:-1] & IS_MIDDLE > 0) & (parts[2:] & STARTS_1 > 0)
        return found


def _parts_of_replacement(spelling: bytes) -> int:
    parts = ENDS_1 * spelling.endswith(b"\xef") + ENDS_2 * spelling.endswith(b"\xef\xbf")
    parts += IS_MIDDLE * (spelling == b"\xbf")
    return parts + STARTS_2 * spelling.startswith(b"\xbf\xbd") + STARTS_1 * spelling.startswith(b"\xbd")


def show_piece(spelling: bytes) -> str:
    """Bytes as text for a table cell."""
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        return " ".join(f"0x{byte:02X}" for byte in spelling)
    shown = show_safely(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣"))
    return shown if len(shown) <= LONGEST_PIECE else shown[: LONGEST_PIECE - 1] + "…"
