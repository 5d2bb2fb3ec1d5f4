"""The reference for `tokenizer.json`: Hugging Face `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenmill.batch import TokenBatch
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.splitting import cut_between_words, splits_words
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import DataError

__all__ = ["HuggingFaceEngine"]


class HuggingFaceEngine:
    """Encodes with `tokenizers`; truncation and padding settings of the file are switched off.

    `threads` lets the library use its own thread pool. Workers leave it off: there is one
    worker per core already, and the pool does not survive a fork.
    """

    name = "huggingface"
    num_rerouted = 0
    takes_packed = False
    memory_per_character = 130

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens, *, threads: bool = False) -> None:
        import tokenizers

        self._parallelism = "true" if threads else "false"

        try:
            self._backend = tokenizers.Tokenizer.from_buffer(tokenizer.files[tokenizer.main_file])
        except Exception as error:
            raise DataError(tokenizer.name, f"tokenizer.json cannot be loaded: {error}") from None
        self._splits_words = splits_words(tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = special_tokens == "as-text"

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text without the post-processor's special tokens."""
        if os.environ.get("TOKENIZERS_PARALLELISM") != self._parallelism:
            # The library asks the environment at every call, and another engine may have said otherwise.
            os.environ["TOKENIZERS_PARALLELISM"] = self._parallelism
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return TokenBatch.from_lists([encoding.ids for encoding in encodings])

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words, where the tokenizer is known to keep them apart."""
        return cut_between_words(text, size) if self._splits_words else [text]

    def recycle(self) -> None:
        """The library's caches are bounded."""
