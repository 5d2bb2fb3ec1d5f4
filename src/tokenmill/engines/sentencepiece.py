"""The reference for `.model` files: Google's `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engines._guard import guarded
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import TokenBatch

__all__ = ["SentencePieceEngine"]


class SentencePieceEngine(Engine):
    """Encodes with `sentencepiece` on the calling thread; the pipeline runs one process per core.

    It does not split texts: merges may cross any place.
    """

    name = "sentencepiece"
    memory_per_character = 100

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._file, self._processor = tokenizer.shown, tokenizer.open_library()

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text. Control pieces such as `<s>` in a text are plain text."""
        with guarded(self._file, "cannot encode a text"):
            return TokenBatch.from_lists(self._processor.encode(list(texts), num_threads=1))
