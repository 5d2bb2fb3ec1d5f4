"""A cache of words in front of the reference, for tokenizers that gigatoken does not implement.

A text is cut only where the reference would split it in any case (`_cutting`), and the reference itself encodes each
word, once. So the ids are its ids by construction, for every kind of model, whatever its Unicode tables say. A text
that is never cut, such as a page of Chinese without punctuation, is encoded at the reference's own speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tokenmill.engines._cutting import Cuts, UncuttableError, find_cuts, find_pattern_cuts
from tokenmill.engines._split import cut_between_words, has_gap
from tokenmill.engines._unigram_words import open_unigram
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tiktoken import EncodingDefinition
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import PackedTexts, TokenBatch, check_range

try:
    from tokenmill.engines.words import Words
except ImportError:
    Words = None  # type: ignore[assignment, misc]

__all__ = ["WordCacheEngine", "why_no_words"]

MOST_BYTES = 64 << 20
"""When the words take more memory, all are forgotten; those of a language with their ids take some 30 MB."""


def why_no_words(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> str | None:
    """Explain why this engine may not be used for a tokenizer, or return None."""
    if Words is None:
        return "the module in C was not compiled"
    try:
        _cuts(tokenizer, special_tokens)
    except UncuttableError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return f"its tokenizer.json is not laid out as expected ({type(error).__name__}: {error})"
    return None


def _cuts(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> Cuts:
    parses = special_tokens != "as-text"
    if tokenizer.kind == "huggingface":
        return find_cuts(tokenizer.config, parse_special=parses)
    if tokenizer.kind == "tiktoken":
        definition = msgspec.json.decode(tokenizer.files["tiktoken.json"], type=EncodingDefinition)
        return find_pattern_cuts(definition.pattern, tokenizer.special_tokens if parses else ())
    raise UncuttableError(f"{tokenizer.kind} scores a whole text at once")


class WordCacheEngine(Engine):
    """Encodes words that it has not seen yet with the reference, and looks up the others."""

    name = "wordcache"
    memory_per_character = 160
    takes_packed = True

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        from tokenmill.engines import make_reference

        cuts = _cuts(tokenizer, special_tokens)
        self.reference = make_reference(tokenizer, special_tokens)
        self._words = Words(cuts.groups, cuts.pairs)
        self._unigram = (
            open_unigram(tokenizer.config, cuts, parse_special=special_tokens != "as-text")
            if tokenizer.kind == "huggingface"
            else None
        )
        self._vocab_size = tokenizer.vocab_size
        self._keeps_gaps = has_gap(tokenizer)

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text."""
        if not len(texts):
            return TokenBatch.from_lists([])
        packed = texts if isinstance(texts, PackedTexts) else PackedTexts.of(texts)
        if self._words.num_bytes > MOST_BYTES:
            self._words.clear()
        size = 2 if self._vocab_size <= 1 << 16 else 4
        ids, edges = self._words.encode(packed.data, self._encode_words, size)
        return TokenBatch(np.frombuffer(ids, np.uint16 if size == 2 else np.uint32), np.frombuffer(edges, np.int64))

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words."""
        return [text] if self._keeps_gaps else cut_between_words(text, size)

    def recycle(self) -> None:
        """Forget all words."""
        self._words.clear()

    def _encode_words(self, words: list[str]) -> tuple[object, object]:
        encode = self.reference.encode
        batch = encode(words) if self._unigram is None else self._unigram.encode(words, encode)
        check_range(batch.ids, self._vocab_size)
        return np.ascontiguousarray(batch.ids, np.uint32), np.ascontiguousarray(batch.offsets, np.int64)
