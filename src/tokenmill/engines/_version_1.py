"""Which tokenizers may be used with `tokenizers` 1.0: those to which it gives the ids of 0.23.

The third release candidate gives other ids than 0.23 to models with `end_of_word_suffix`, to byte-level vocabularies
with tokens that are not spelled in bytes, and after a U+017F with the pattern of o200k. It knows no split patterns but
the best-known ones. What is allowed here was compared on 60,000 fuzzed strings for each structure: ids differ only in
texts with characters that Unicode has assigned recently, which the two versions put into different classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.engines._eligibility import SCHEMES, refuses

__all__ = ["distrusts"]

Config = Mapping[str, Any]
_DIGITS = {"type": "Digits", "individual_digits": True}
_WORDS = {"type": "WhitespaceSplit"}
_UNIGRAM_NORMALIZERS = ("Precompiled", "NFKC", "NFKD", "NFC", "NFD", "StripAccents", "Lowercase", "Replace")


def distrusts(config: Config, *, parse_special: bool) -> str | None:
    """Explain why version 1 may not be used for a `tokenizer.json`; None if its ids are those of 0.23."""
    kind = config["model"].get("type", "BPE")
    pre_tokenizer = config.get("pre_tokenizer") or {"type": None}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    normalizer = config.get("normalizer") or {"type": "Sequence", "normalizers": []}
    normalizers = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    if kind == "BPE":
        if len(steps) == 2 and steps[0] == _DIGITS and steps[1]["type"] == "ByteLevel":
            return refuses({**config, "pre_tokenizer": steps[1]}, parse_special=parse_special)
        if any(step.get("pattern", {}).get("Regex") == SCHEMES["o200k"][0] for step in steps):
            return "it matches contractions after U+017F otherwise"
        return refuses(config, parse_special=parse_special)
    for token in config.get("added_tokens") or []:
        for key in ("single_word", "lstrip", "rstrip"):
            if token[key]:
                return f"its added token {token['content']!r} has {key}"
    if kind == "WordPiece":
        is_known = [step["type"] for step in (*normalizers, *steps)] in (
            ["BertNormalizer", "BertPreTokenizer"],
            ["BertPreTokenizer"],
        )
    elif kind == "Unigram":
        *before, last = steps
        is_known = before in ([], [_WORDS]) and last["type"] == "Metaspace"
        is_known &= all(step["type"] in _UNIGRAM_NORMALIZERS for step in normalizers)
    else:
        is_known = False
    return None if is_known else f"its {kind} model has another normalizer or pre_tokenizer than was compared"
