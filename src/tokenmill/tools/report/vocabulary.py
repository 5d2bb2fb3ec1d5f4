"""The bytes of each id of a vocabulary, as arrays, to look up millions of tokens at a time."""

from __future__ import annotations

import numpy as np

from tokenmill.engines.decoder import Decoder
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.formatting import shorten, show_safely

__all__ = ["Vocabulary", "show_piece"]

REPLACEMENT = "\ufffd".encode()
LONGEST_PIECE = 20
ENDS_1, ENDS_2, IS_MIDDLE, STARTS_2, STARTS_1 = 1, 2, 4, 8, 16
"""Flags of tokens that hold a part of U+FFFD, which is EF BF BD: EF or EF BF at their end, only BF, BF BD or BD at
their start."""


class Vocabulary:
    """For every id the size in bytes (0 for special tokens), and which parts of U+FFFD it holds."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._decoder = Decoder(tokenizer)
        self.specials = frozenset(tokenizer.special_tokens.values())
        spellings = [b"" if token in self.specials else self.spell(token) for token in range(size)]
        self.sizes = np.array([len(spelling) for spelling in spellings], np.int64)
        self._replacements = np.array([spelling.count(REPLACEMENT) for spelling in spellings], np.int64)
        self._parts = np.array([_parts_of_replacement(spelling) for spelling in spellings], np.uint8)

    def spell(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the vocabulary does not use."""
        try:
            return self._decoder.token_bytes(token)
        except (KeyError, IndexError, ValueError):
            return b""

    def show(self, token: int) -> str:
        """Show a token in a table, with visible spaces and bytes."""
        return show_piece(self.spell(token))

    def count_replacements(self, ids: np.ndarray) -> np.ndarray:
        """Count for each token the characters U+FFFD that end in it, even if they begin in an earlier token."""
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
    """Show bytes as the text of a table cell."""
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        return " ".join(f"0x{byte:02X}" for byte in spelling)
    return shorten(show_safely(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")), LONGEST_PIECE)
