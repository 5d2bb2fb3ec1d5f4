"""The reference for `tokenizer.json`: Hugging Face `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tokenmill.engines._guard import guarded
from tokenmill.engines._split import cut_between_words, splits_words
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import TokenBatch

__all__ = ["HuggingFaceEngine", "open_library"]


class HuggingFaceEngine(Engine):
    """Encodes with `tokenizers`.

    Workers do not use the library's thread pool: there is one worker per core already, and the pool does not survive a
    fork.
    """

    name = "huggingface"
    memory_per_character = 130

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._file = tokenizer.shown
        self._backend = tokenizer.open_library(special_tokens)
        self._splits_words = splits_words(tokenizer)

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text without the special tokens of the post-processor."""
        parallelism = "true" if self.uses_threads else "false"
        if os.environ.get("TOKENIZERS_PARALLELISM") != parallelism:
            # The library reads the environment at every call, and another engine may have changed it.
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism
        with guarded(self._file, "cannot encode a text"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return TokenBatch.from_lists([encoding.ids for encoding in encodings])

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words if the tokenizer is known to keep them apart."""
        return cut_between_words(text, size) if self._splits_words else [text]


def open_library(data: bytes, special_tokens: str) -> Any:
    """Load a `tokenizer.json` into `tokenizers`, without its truncation and padding."""
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(data)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = special_tokens == "as-text"
    return library
