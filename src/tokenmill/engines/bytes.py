"""The tokenizer without a vocabulary file: the ids of a text are its UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.engines.base import Engine
from tokenmill.text_batch import TokenBatch, encode_texts

__all__ = ["BytesEngine"]


class BytesEngine(Engine):
    """Ids 0 to 255 are bytes; 256 ends a document and 257 begins one."""

    name = "bytes"
    takes_packed = True
    memory_per_character = 16

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text as its UTF-8 bytes."""
        encoded = encode_texts(texts)
        return TokenBatch(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)]))

    def split(self, text: str, size: int) -> list[str]:
        """Cut anywhere: bytes do not depend on each other."""
        return [text[start : start + size] for start in range(0, len(text), size)] or [text]
