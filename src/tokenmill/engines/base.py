"""What an engine is: it turns texts into one flat array of ids.

An engine encodes only the text of a document, as the reference does with `encode(..., add_special_tokens=False)`. The
pipeline adds beginning- and end-of-text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import TokenBatch

__all__ = ["Engine", "SpecialTokens"]

SpecialTokens = Literal["as-text", "parse", "error"]
"""How to treat the string of a special token inside a text: as plain text, as the token, or as an error."""


class Engine(Protocol):
    """Encodes batches of texts with one tokenizer. The defaults are those of a library without caches that grow."""

    name: str
    num_rerouted: int = 0
    """Documents that the reference encoded because this engine may differ on them."""

    takes_packed: bool = False
    """Whether the engine encodes `PackedTexts` without creating a string for each text."""

    uses_threads: bool = False
    """Whether a reference may use the thread pool of its library."""

    memory_per_character: int
    """The memory for encoding one long text, in bytes per character at most."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        """Load the tokenizer into the library."""

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text; the batch has exactly `len(texts)` documents."""
        ...

    def split(self, text: str, size: int) -> list[str]:
        """Cut a long text into pieces of about `size` characters whose concatenated ids are those of the text.

        An engine that does not know such places returns the whole text.
        """
        return [text]

    def recycle(self) -> None:
        """Free memory that grows with use, such as caches. Ids do not change."""
        return
