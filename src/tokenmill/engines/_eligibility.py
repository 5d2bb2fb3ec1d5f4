"""Decide which tokenizers the fast engine encodes exactly as the reference does.

gigatoken loads many configurations that it does not implement, without an error. So this is a list of allowed
structures, not of forbidden ones. A structure is allowed if hundreds of thousands of fuzzed strings, over vocabularies
whose merges cross every boundary, got equal ids; `scripts/fuzz_engines.py` repeats this. Everything else, down to an
unknown key, is refused with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import add
from typing import Any

from tokenmill.engines._disputes import Ranges, disputed_ranges
from tokenmill.engines.decoder import byte_alphabet

__all__ = ["SCHEMES", "disputed_ranges_of", "engine_config", "refuses", "strip_special_tokens"]

Config = Mapping[str, Any]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

SCHEMES: Mapping[str, tuple[str, ...]] = {
    "gpt2": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    "llama3": (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}",),
    "qwen3.5": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "o200k": (
        rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
    "nemotron": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
    "deepseek": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}
"""The split patterns of `tokenizer.json` files that gigatoken reproduces, by their best-known names."""

_SAME_AS = {
    # `\s*[\r\n]` matches up to the last line end of the white space, and so does `\s*[\r\n]+`. gigatoken accepts the
    # first spelling too, but then splits the end of a text like OpenAI's cl100k, which has one more branch.
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+": SCHEMES["llama3"][0],
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": SCHEMES["gpt2"][0],
}
"""Patterns that match exactly what a scheme matches, with the spelling that the engine needs."""

_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_CONFIG_KEYS = frozenset(["version", "truncation", "padding", "added_tokens", *_STAGES])
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_FLAGS = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
_MODEL_KEYS = frozenset(["type", "vocab", "merges", *_AFFIXES, *_FLAGS])
_TOKEN_KEYS = frozenset(["id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"])
_BYTE_LEVEL_KEYS = frozenset(["type", "add_prefix_space", "trim_offsets", "use_regex"])
_METASPACE_KEYS = frozenset(["type", "replacement", "prepend_scheme", "split", "add_prefix_space"])
_MAX_ID = 1 << 24
_BYTE_TOKEN = re.compile("<0x..>", re.DOTALL)
_PREPEND = {"type": "Prepend", "prepend": "▁"}
_MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_INERT_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


class _NotEligible(Exception):
    """The reason why a tokenizer is refused."""


def refuses(config: Config, *, parse_special: bool = False) -> str | None:
    """Explain why gigatoken may not be used for a `tokenizer.json`; None if its ids are those of the reference.

    This holds for an engine that is loaded from `engine_config(config, parse_special=parse_special)`. With
    `parse_special` the strings of special tokens become their ids; otherwise they are plain text.
    """
    try:
        _require_keys("tokenizer.json", config, _CONFIG_KEYS)
        model = config["model"]
        _check_model(model)
        if model.get("byte_fallback"):
            _check_byte_fallback(model)
            _check_space_marking(config.get("normalizer"), config.get("pre_tokenizer"))
        else:
            _check_byte_level(model)
            _check_normalizer(config.get("normalizer"))
            _check_split(config.get("pre_tokenizer"))
        _check_added_tokens(config, parse_special)
    except _NotEligible as refused:
        return str(refused)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"its tokenizer.json is not laid out as expected ({type(error).__name__}: {error})"
    return None


def strip_special_tokens(config: Config) -> dict[str, Any]:
    """Remove the special added tokens from a configuration, so that their strings are plain text.

    Other added tokens stay: the reference matches them in either mode.
    """
    return {**config, "added_tokens": [token for token in config.get("added_tokens") or [] if not token["special"]]}


def engine_config(config: Config, *, parse_special: bool = False) -> dict[str, Any]:
    """Return the configuration with which gigatoken does what the reference does with `config`."""
    stripped = dict(config) if parse_special else strip_special_tokens(config)
    pre_tokenizer = config.get("pre_tokenizer")
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        steps = [_respell(step) for step in pre_tokenizer["pretokenizers"]]
        stripped["pre_tokenizer"] = {**pre_tokenizer, "pretokenizers": steps}
    return stripped


def disputed_ranges_of(config: Config, *, exact: bool | None = None) -> Ranges:
    """Return the code points that send a document to the reference with this tokenizer.

    There are none with byte fallback: no character class affects how such a tokenizer splits.
    """
    if config["model"].get("byte_fallback"):
        return ()
    pre_tokenizer = config.get("pre_tokenizer") or {}
    patterns = [step.get("pattern", {}).get("Regex", "") for step in pre_tokenizer.get("pretokenizers", ())]
    classes = set(re.findall(r"\\p\{(\w+)\}", "".join(patterns)))
    return disputed_ranges(_normalizes(config.get("normalizer")), letters_only=classes <= {"L", "N"}, exact=exact)


def _merge_parts(merges: Sequence[Any]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the left and the right parts of all merges; old files write "a b" instead of ["a", "b"]."""
    if set(map(type, merges)) <= {str}:
        if set(map(str.count, merges, repeat(" "))) - {1}:
            raise ValueError("a merge is not two parts")
        # One split for all merges, because a run cannot start before this is done.
        parts = " ".join(merges).split(" ") if merges else []
        return parts[::2], parts[1::2]
    pairs = [(left, right) for left, right in (m.split(" ") if isinstance(m, str) else m for m in merges)]
    return [left for left, _ in pairs], [right for _, right in pairs]


def _require(is_met: bool, otherwise: str) -> None:
    if not is_met:
        raise _NotEligible(otherwise)


def _require_keys(what: str, found: Config, known: Collection[str]) -> None:
    for key in found:
        _require(key in known, f"{what} has the unknown key {key!r}")


def _check_model(model: Config) -> None:
    """Check what every BPE model needs: nothing may change how merges apply."""
    kind = model.get("type", "BPE")
    _require(kind == "BPE", f"its model is {kind}, not BPE")
    _require_keys("its model", model, _MODEL_KEYS)
    for key in ("dropout", *_AFFIXES):
        _require(not model.get(key), f"its model has {key} {model.get(key)!r}")
    ids = set(model["vocab"].values())
    are_distinct = len(ids) == len(model["vocab"]) and all(0 <= token < _MAX_ID for token in ids)
    _require(are_distinct, f"its token ids are not distinct numbers below {_MAX_ID}")
    _check_merges(model)


def _check_merges(model: Config) -> None:
    """Check that each pair is in the vocabulary and occurs once; of two ranks, the libraries use different ones."""
    lefts, rights = _merge_parts(model["merges"])
    _require(len(set(zip(lefts, rights, strict=True))) == len(lefts), "its merges name a pair twice")
    vocab = model["vocab"]
    if not all(map(vocab.__contains__, chain(lefts, rights, map(add, lefts, rights)))):
        pairs = zip(lefts, rights, strict=True)
        left, right = next((a, b) for a, b in pairs if a not in vocab or b not in vocab or a + b not in vocab)
        raise _NotEligible(f"its merge of {left!r} and {right!r} is not in the vocabulary")


def _check_byte_level(model: Config) -> None:
    """Check that all 256 bytes are tokens, so that no text is unknown, and that no token has two spellings."""
    alphabet = byte_alphabet()
    vocab = model["vocab"]
    _require(alphabet.keys() <= vocab.keys(), "its vocabulary has no token for some byte, or is not byte-level")
    spelled = re.compile(f"[{re.escape(''.join(alphabet))}]*")
    foreign = [token for token in vocab if not spelled.fullmatch(token)]
    if foreign and model.get("ignore_merges"):
        # The reference never uses these tokens; gigatoken reads them as plain text and does.
        raise _NotEligible(f"its vocabulary has {foreign[0]!r}, which is not spelled in bytes, and it ignores merges")
    spelling = {byte: character for character, byte in alphabet.items()}
    spelled_again = {"".join([spelling[byte] for byte in token.encode()]) for token in foreign}
    _require(spelled_again.isdisjoint(vocab), "its vocabulary has one token in two spellings")
    parts = set(chain(*_merge_parts(model["merges"]))) if foreign else set()
    _require(parts.isdisjoint(foreign), "its merges have parts that are not spelled in bytes")


def _check_byte_fallback(model: Config) -> None:
    vocab = model["vocab"]
    _require(not model.get("ignore_merges"), "its model has byte fallback and ignores merges")
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    similar = {token for token in vocab if len(token) == 6 and _BYTE_TOKEN.fullmatch(token)}
    _require(similar <= names, "its vocabulary has a byte token in another spelling than <0x0A>")
    # gigatoken takes such a token for the byte even if a merge made it.
    lefts, rights = _merge_parts(model["merges"])
    merged = chain(lefts, rights, map(add, lefts, rights))
    _require(names.isdisjoint(merged), "its merges spell a byte token such as <0x0A>")
    for byte in range(256):
        # A missing byte is harmless if the only character that contains it has a token.
        is_spelled = f"<0x{byte:02X}>" in vocab or (byte < 0x80 and chr(byte) in vocab)
        _require(is_spelled, f"its vocabulary has no token for the byte 0x{byte:02X}")


def _check_normalizer(normalizer: Config | None) -> None:
    for step in [] if normalizer is None else _steps(normalizer):
        if step != {"type": "NFC"}:
            raise _NotEligible(f"its normalizer is {step['type']}; only NFC is known to agree")


def _steps(normalizer: Config | None) -> list[Any]:
    return normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]


def _normalizes(normalizer: Config | None) -> bool:
    return normalizer is not None and normalizer != {"type": "Sequence", "normalizers": []}


def _check_split(pre_tokenizer: Config | None) -> None:
    """Allow a bare ByteLevel, or the Splits of one known scheme and a ByteLevel that only spells bytes."""
    if pre_tokenizer is None:
        raise _NotEligible("it has byte-level tokens but no pre_tokenizer")
    if pre_tokenizer["type"] == "ByteLevel":
        _require_keys("its pre_tokenizer", pre_tokenizer, _BYTE_LEVEL_KEYS)
        _require(pre_tokenizer.get("use_regex", True), "its ByteLevel pre_tokenizer does not split")
        return
    _require(pre_tokenizer["type"] == "Sequence", f"its pre_tokenizer is {pre_tokenizer['type']}")
    _require_keys("its pre_tokenizer", pre_tokenizer, {"type", "pretokenizers"})
    *splits, last = pre_tokenizer["pretokenizers"]
    for step in splits:
        _require(step["type"] == "Split", f"its pre_tokenizer has {step['type']} before ByteLevel")
    only_spells = last["type"] == "ByteLevel" and not last.get("use_regex", True) and not last["add_prefix_space"]
    _require(only_spells, "its pre_tokenizer does not end in a ByteLevel that neither splits nor adds a space")
    _require_keys("its pre_tokenizer", last, _BYTE_LEVEL_KEYS)
    patterns = tuple(_pattern(_respell(step)) for step in splits)
    _require(patterns in SCHEMES.values(), f"its split pattern is not one that is known to agree: {patterns}")
    # A single pattern matches every character of a text, so there is no rest that could be treated differently.
    allowed = {("Isolated", False)} if len(splits) > 1 else {("Isolated", False), ("Isolated", True), ("Removed", True)}
    found = {(step["behavior"], step["invert"]) for step in splits}
    _require(found <= allowed, "its Split does not keep all of the text as separate pieces")


def _pattern(split: Config) -> str:
    _require_keys("its Split", split, {"type", "pattern", "behavior", "invert"})
    _require(list(split["pattern"]) == ["Regex"], f"its pre_tokenizer splits at {split['pattern']}")
    return str(split["pattern"]["Regex"])


def _respell(step: Config) -> dict[str, Any]:
    pattern = step.get("pattern", {}).get("Regex")
    return {**step, "pattern": {"Regex": _SAME_AS[pattern]}} if pattern in _SAME_AS else dict(step)


def _check_space_marking(normalizer: Config | None, pre_tokenizer: Config | None) -> None:
    """Check how a SentencePiece-like tokenizer turns spaces into ▁: in the normalizer or by Metaspace."""
    if _steps(normalizer) in ([_PREPEND, _MARK_SPACES], [_MARK_SPACES]):
        if pre_tokenizer not in (None, _INERT_SPLIT):
            raise _NotEligible(f"its pre_tokenizer is {pre_tokenizer['type']}, after a normalizer that marks spaces")
        return
    _require(normalizer is None, "its normalizer does more than to mark spaces with ▁")
    if pre_tokenizer is None or pre_tokenizer["type"] != "Metaspace":
        raise _NotEligible("it has byte fallback but does not mark spaces with ▁")
    _require_keys("its Metaspace", pre_tokenizer, _METASPACE_KEYS)
    is_known = pre_tokenizer["replacement"] == "▁" and pre_tokenizer["prepend_scheme"] in ("always", "first", "never")
    _require(is_known, f"its Metaspace is {dict(pre_tokenizer)}")


def _check_added_tokens(config: Config, parse_special: bool) -> None:
    """Check that both libraries match every added token at the same places, with the same id."""
    tokens: Sequence[Config] = config.get("added_tokens") or []
    vocab = config["model"]["vocab"]
    contents = {token["content"] for token in tokens}
    is_good = "" not in contents and len(contents) == len(tokens)
    _require(is_good, "it has an empty added token or one that is listed twice")
    next_id = len(vocab)
    for token in tokens:
        _require_keys("its added token", token, _TOKEN_KEYS)
        # The reference ignores the id in the file and continues the ids of the vocabulary.
        what = f"its added token {token['content']!r} has the id {token['id']}, which the reference ignores"
        _require(token["id"] == vocab.get(token["content"], next_id), what)
        next_id = max(next_id, token["id"] + 1)
    has_gaps = next_id > len(vocab) and max(vocab.values()) >= len(vocab)
    _require(not has_gaps, "its token ids have gaps, which added tokens may fall into")
    kept = [token for token in tokens if parse_special or not token["special"]]
    for token in kept:
        for key in ("single_word", "lstrip", "rstrip"):
            _require(not token[key], f"its added token {token['content']!r} has {key}")
    if _normalizes(config.get("normalizer")) and not config["model"].get("byte_fallback"):
        _check_normalized_tokens(kept)
    _check_overlaps(config, tokens, kept)


def _check_normalized_tokens(kept: Sequence[Config]) -> None:
    """Check that normalizing can neither create nor destroy the string of an added token."""
    for token in kept:
        content = token["content"]
        _require(not token["normalized"], f"its added token {content!r} is matched after NFC")
        # gigatoken matches tokens in normalized text too. NFC turns three other characters into ASCII: U+212A into K,
        # U+037E into the semicolon and U+1FEF into the grave accent.
        is_stable = content.isascii() and set(content).isdisjoint("K;`")
        _require(is_stable, f"its added token {content!r} can be the outcome of NFC")


def _check_overlaps(config: Config, tokens: Sequence[Config], kept: Sequence[Config]) -> None:
    """Check overlaps: the reference searches in two passes and lets special tokens hide others, gigatoken does not."""
    is_kept = {token["content"] for token in kept}
    plain = {token["content"] for token in kept if not token["normalized"]}
    normalized = is_kept - plain
    hiding = [token for token in tokens if token["content"] not in is_kept]
    if config["model"].get("byte_fallback"):
        if normalized and any(token["normalized"] for token in hiding):
            raise _NotEligible("it has special and other added tokens that are matched after normalizing")
    elif overlap := next(_overlaps(plain, normalized), None) or next(_overlaps(normalized, plain), None):
        raise _NotEligible(f"its added tokens {overlap[0]!r} and {overlap[1]!r} overlap and are matched in two passes")
    for group, others in ((plain, False), (normalized, True)):
        strings = [token["content"] for token in hiding if token["normalized"] is others]
        if overlap := next(_overlaps(strings, group), None):
            raise _NotEligible(f"its special token {overlap[0]!r} hides parts of its added token {overlap[1]!r}")


def _overlaps(hiding: Iterable[str], hidden: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs where a match of the first can consume text that a match of the second needs."""
    starts: dict[str, str] = {}
    for token in hidden:
        for stop in range(1, len(token) + 1):
            starts.setdefault(token[:stop], token)
    for token in hiding:
        for start in range(len(token)):
            for stop in range(start + 1, len(token) + 1):
                part = token[start:stop]
                if part in hidden and part != token:
                    yield token, part
            if start and token[start:] in starts:
                yield token, starts[token[start:]]
