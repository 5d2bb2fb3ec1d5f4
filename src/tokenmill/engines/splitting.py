"""Where a long text may be cut without changing its ids: before a space between two ASCII letters.

Every pre-tokenizer here starts a word there, and no normalizer here looks across it. SentencePiece-like
models are not here, since their merges may cross words, nor tokenizers with an added token that has such a
space inside.
"""

from __future__ import annotations

import re
from typing import Any

from tokenmill.engines.tokenizer import Tokenizer

__all__ = ["WORD_GAP", "cut_between_words", "splits_words"]

WORD_GAP = re.compile("[A-Za-z] [A-Za-z]")
PRE_TOKENIZERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
MODELS = {"BPE", "WordPiece", "WordLevel"}


def cut_between_words(text: str, size: int) -> list[str]:
    """Pieces of at least `size` characters, cut where a word ends; the last one is what is left."""
    pieces = []
    start = 0
    while gap := WORD_GAP.search(text, start + size):
        pieces.append(text[start : gap.start() + 1])
        start = gap.start() + 1
    return [*pieces, text[start:]]


def splits_words(tokenizer: Tokenizer) -> bool:
    """Whether a `tokenizer.json` keeps words apart, as far as its parts are known."""
    config = tokenizer.config
    added = [token["content"] for token in config.get("added_tokens") or []]
    return (
        config["model"].get("type") in MODELS
        and _keeps_words_apart(config.get("pre_tokenizer"))
        and _is_local(config.get("normalizer"))
        and not any(map(WORD_GAP.search, added))
    )


def _keeps_words_apart(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step.get("type") in PRE_TOKENIZERS


def _is_local(step: Any) -> bool:
    if step is None:
        return True
    if step.get("type") == "Sequence":
        return all(_is_local(part) for part in step.get("normalizers") or [])
    return step.get("type") in NORMALIZERS
