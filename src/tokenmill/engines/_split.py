"""Cut a long text without changing its ids: before a space between two ASCII letters.

Every pre-tokenizer listed here starts a word there, and no listed normalizer looks across it. SentencePiece-like models
are not listed, because their merges may cross words. A tokenizer with an added token that contains such a space is not
split either.
"""

from __future__ import annotations

import re
from typing import Any

from tokenmill.engines.tokenizer import Tokenizer

__all__ = ["cut_between_words", "has_gap", "splits_words"]

WORD_GAP = re.compile("[A-Za-z] [A-Za-z]")
PRE_TOKENIZERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
MODELS = {"BPE", "WordPiece", "WordLevel"}


def cut_between_words(text: str, size: int) -> list[str]:
    """Cut a text where words end, into pieces of at least `size` characters; the last may be shorter."""
    pieces = []
    start = 0
    while gap := WORD_GAP.search(text, start + size):
        pieces.append(text[start : gap.start() + 1])
        start = gap.start() + 1
    return [*pieces, text[start:]]


def has_gap(tokenizer: Tokenizer) -> bool:
    """Whether an added token contains a place where a text would be cut."""
    added = [token["content"] for token in tokenizer.config.get("added_tokens") or []]
    return any(map(WORD_GAP.search, [*added, *tokenizer.special_tokens]))


def splits_words(tokenizer: Tokenizer) -> bool:
    """Whether all parts of a `tokenizer.json` are known to keep words apart."""
    config = tokenizer.config
    first: Any = config.get("pre_tokenizer")
    kind = first.get("type") if isinstance(first, dict) else None
    keeps_apart = first.get("use_regex", True) if kind == "ByteLevel" else kind in PRE_TOKENIZERS
    is_known = config["model"].get("type") in MODELS and keeps_apart and _is_local(config.get("normalizer"))
    return bool(is_known) and not has_gap(tokenizer)


def _is_local(step: Any) -> bool:
    if step is None:
        return True
    if step.get("type") == "Sequence":
        return all(_is_local(part) for part in step.get("normalizers") or [])
    return step.get("type") in NORMALIZERS
