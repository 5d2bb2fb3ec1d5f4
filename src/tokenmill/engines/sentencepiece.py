"""The reference for `.model` files: Google's `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.batch import TokenBatch
from tokenmill.engines.tokenizer import Tokenizer, sentencepiece_processor

__all__ = ["SentencePieceEngine"]


class SentencePieceEngine:
    """Encodes with `sentencepiece`, on the calling thread: parallelism is the pipeline's."""

    name = "sentencepiece"
    num_rerouted = 0
    takes_packed = False
    memory_per_character = 100

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._processor = sentencepiece_processor(tokenizer.files[tokenizer.main_file])

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text; control pieces such as `<s>` in a text are plain text."""
        return TokenBatch.from_lists(self._processor.encode(list(texts), num_threads=1))

    def split(self, text: str, size: int) -> list[str]:
        """The whole text: its merges may cross any place."""
        return [text]

    def recycle(self) -> None:
        """Nothing grows here."""
