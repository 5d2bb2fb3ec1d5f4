"""Decode ids to text, for display and for checks.

`token_bytes` returns the bytes of one token. Coloured previews need bytes, because a byte-level token may be only a
part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenmill.engines.tokenizer import Tokenizer

__all__ = ["Decoder", "byte_alphabet"]

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Decoder:
    """Turns ids of one tokenizer into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, including special tokens, as the reference library does."""
        wanted = [int(i) for i in ids]
        if self._tokenizer.kind == "huggingface" and not self._byte_level:
            return str(self._library.decode(wanted))
        if self._tokenizer.kind == "sentencepiece":
            return str(self._library.decode(wanted))
        return b"".join(self.token_bytes(i) for i in wanted).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, or the name of a special token."""
        if token in self._special_names:
            return self._special_names[token].encode()
        kind = self._tokenizer.kind
        if kind == "bytes":
            return bytes([token])
        if kind == "tiktoken":
            return bytes(self._library.decode_single_token_bytes(token))
        if kind == "sentencepiece":
            return _piece_bytes(self._library.id_to_piece(token))
        piece = self._pieces.get(token)
        if piece is None:
            return b""
        if self._byte_level and all(c in _BYTE_OF for c in piece):
            return bytes(_BYTE_OF[c] for c in piece)
        return _piece_bytes(piece)

    def piece(self, token: int) -> str:
        """Return one token as text, with U+FFFD for bytes that are not a complete character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @cached_property
    def _special_names(self) -> dict[int, str]:
        return {i: name for name, i in self._tokenizer.special_tokens.items()}

    @cached_property
    def _pieces(self) -> dict[int, str]:
        """The vocabulary, read from the file because the library takes seconds to load a large one."""
        config = self._tokenizer.config
        vocab = config["model"]["vocab"]
        numbered = vocab.items() if isinstance(vocab, dict) else ((piece[0], i) for i, piece in enumerate(vocab))
        pieces = {i: piece for piece, i in numbered}
        return pieces | {token["id"]: token["content"] for token in config.get("added_tokens") or []}

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in repr(self._tokenizer.config.get("decoder")).replace("'", '"')

    @cached_property
    def _library(self) -> Any:
        return self._tokenizer.open_library()


def _piece_bytes(piece: str) -> bytes:
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match.group(1), 16)]) if match else piece.replace("▁", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level tokenizers write for each byte: itself if visible, else one from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = byte_alphabet()
