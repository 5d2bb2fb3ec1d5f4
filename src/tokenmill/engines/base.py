"""The seam between tokenmill and tokenizer libraries: texts in, one flat array of ids out.

An engine encodes what a document says and nothing else: beginning- and end-of-text tokens
are the pipeline's to add, so that every engine agrees with the reference's
`encode(..., add_special_tokens=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from tokenmill.batch import TokenBatch

__all__ = ["Engine", "SpecialTokens"]

SpecialTokens = Literal["as-text", "parse", "error"]
"""What a special token's string inside a text means: plain text, the token, or a reject."""


class Engine(Protocol):
    """Encodes batches of texts with one tokenizer."""

    name: str
    num_rerouted: int
    """Documents that were encoded by the reference because this engine may differ on them."""

    takes_packed: bool
    """Whether `PackedTexts` are encoded as they are, without a string for each."""

    memory_per_character: int
    """Bytes that encoding one long text takes at most, for each of its characters."""

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text; the batch has exactly `len(texts)` documents."""
        ...

    def split(self, text: str, size: int) -> list[str]:
        """Cut a long text into pieces of about `size` characters whose ids, end to end, are the text's.

        An engine that cannot tell such places gives the whole text back.
        """
        ...

    def recycle(self) -> None:
        """Give back memory that grows with use, such as caches; ids do not change."""
        ...
