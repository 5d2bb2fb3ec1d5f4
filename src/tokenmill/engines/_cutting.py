"""Where texts can be cut so that the ids of the parts, one after the other, are those of the whole.

A place between two characters is such a place if a step of the pre-tokenizer always splits there, and if nothing else
looks across it: no normalizer, no earlier step, no added token. Both characters are known, ASCII or of a group that all
versions of Unicode agree on, except that the first may be unknown where it does not matter. So the answer holds for
every version of the reference. A step that is not understood raises `UncuttableError`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tokenmill.engines import _characters
from tokenmill.engines._character_map import CharacterMap
from tokenmill.engines._patterns import Pairs, UnknownPatternError, read_pattern

__all__ = ["Cuts", "UncuttableError", "find_cuts", "find_pattern_cuts"]

Config = Mapping[str, Any]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII = range(128)
_SPACES = sorted(_characters.SPACES)
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_COMPOSED = {_characters.LOWER: b"abcdefghijklmnopqrstuvwxyz", _characters.UPPER: b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
_COMPOSED[_characters.SIGNS] = b"<=>"
"""What ASCII characters become with a mark after them."""


class UncuttableError(ValueError):
    """A tokenizer that may look across every place of a text."""


@dataclass(frozen=True)
class Cuts:
    """The group of each character below U+10000, and the pairs of groups between which a text is cut."""

    groups: bytes
    pairs: bytes
    normalize: tuple[_characters.Normalize, ...]
    """What happens to a single character, in order."""


@dataclass
class _State:
    """What is known after some steps of a tokenizer."""

    allowed: Pairs
    """The pairs across which no step has looked so far."""
    made: Pairs
    """Those of them where a step has split."""
    whole: Pairs
    """Pairs of original characters, before normalizing, that are part of a string that must not be cut."""
    normalize: list[_characters.Normalize] = field(default_factory=list)
    composes: bool = False
    removes: bool = False
    """Whether a normalizer removes characters, so that another one may precede a place."""
    needs_known: bool = False
    """Whether a normalizer does something to spaces at the end of a part."""
    spaced: list[int] = field(default_factory=list)
    """Groups around which a normalizer puts spaces."""
    drops_spaces: bool = False


def find_cuts(config: Config, *, parse_special: bool) -> Cuts:
    """Return where texts can be cut for a `tokenizer.json`."""
    none = np.zeros((_characters.NUM_GROUPS, _characters.NUM_GROUPS), np.bool_)
    state = _State(~none, none.copy(), none.copy())
    normalizer = config.get("normalizer")
    for step in _steps(normalizer, "normalizers"):
        _normalize(step, state)
    pre_tokenizer = config.get("pre_tokenizer")
    for step in _steps(pre_tokenizer, "pretokenizers"):
        _split(step, state)
    _keep_added_tokens(config, state, parse_special)
    return _finish(state)


def find_pattern_cuts(pattern: str, whole: Iterable[str]) -> Cuts:
    """Return where texts can be cut for a tokenizer that only has a split pattern, without cutting some strings."""
    none = np.zeros((_characters.NUM_GROUPS, _characters.NUM_GROUPS), np.bool_)
    state = _State(~none, none.copy(), none.copy())
    _split_at_pattern(pattern, state, drops_rest=True)
    _keep_whole(whole, state)
    return _finish(state)


def _steps(step: Config | None, key: str) -> list[Config]:
    if step is None:
        return []
    return [one for part in step[key] for one in _steps(part, key)] if step["type"] == "Sequence" else [step]


def _require_settings(step: Config, **expected: Sequence[Any]) -> None:
    """Refuse a step with unknown settings or other values than the expected ones."""
    for key, value in step.items():
        if key != "type" and (key not in expected or (expected[key] and value not in expected[key])):
            raise UncuttableError(f"its {step['type']} has {key} {value!r}")


# Normalizers


def _normalize(step: Config, state: _State) -> None:
    """Take note of what a normalizer does to single characters; what it does to several must stay within a part."""
    kind = step["type"]
    if kind in _FORMS:
        _require_settings(step)
        state.normalize.append(lambda text: unicodedata.normalize(kind, text))
        state.composes = True
    elif kind == "Lowercase":
        _require_settings(step)
        state.normalize.append(str.lower)
    elif kind == "StripAccents":
        _require_settings(step)
        state.normalize.append(_strip_marks)
        state.removes = True
    elif kind == "BertNormalizer":
        _normalize_bert(step, state)
    elif kind == "Precompiled":
        _require_settings(step, precompiled_charsmap=())
        characters = CharacterMap(step["precompiled_charsmap"])
        for code in _characters.PREPENDED:
            # With the next character it is looked up as one, which would be lost.
            if characters.apply(chr(code)) != chr(code):
                raise UncuttableError(f"its normalizer changes {chr(code)!r}")
        state.normalize.append(characters.apply)
        state.composes = state.removes = state.needs_known = True
    elif kind == "Replace":
        _replace(step, state)
    elif kind == "Strip":
        _require_settings(step, strip_left=(False,), strip_right=())
        state.needs_known = True
    else:
        raise UncuttableError(f"its normalizer is {kind}")


def _normalize_bert(step: Config, state: _State) -> None:
    either = (True, False)
    _require_settings(
        step, clean_text=either, handle_chinese_chars=either, strip_accents=(*either, None), lowercase=either
    )
    state.removes = True
    strips = step.get("strip_accents")
    if step.get("clean_text"):
        state.normalize.append(lambda text: "" if (text < " " and text not in "\t\n\r") or text == "\x7f" else text)
    if step.get("lowercase") if strips is None else strips:
        state.normalize.append(lambda text: _strip_marks(unicodedata.normalize("NFD", text)))
    if step.get("lowercase"):
        state.normalize.append(str.lower)
    if step.get("handle_chinese_chars"):
        state.spaced.append(_characters.HAN)


def _replace(step: Config, state: _State) -> None:
    pattern, content = step["pattern"], step["content"]
    _require_settings(step, pattern=(), content=())
    if pattern == {"Regex": " {2,}"} and content in (" ", "▁"):
        state.needs_known = True
        return
    literal = pattern.get("String", "")
    if not literal or not content or any(one.isspace() or one == "▁" for one in literal + content):
        raise UncuttableError(f"its normalizer replaces {dict(pattern)}")
    _keep_whole([literal], state)
    # What it ends or begins with may stand beside a place; then nothing is known about it.
    state.normalize.append(lambda text: "\u0378" if text in (literal[0], literal[-1]) else text)


def _strip_marks(text: str) -> str:
    return "".join([character for character in text if unicodedata.category(character) != "Mn"])


# Pre-tokenizers


def _split(step: Config, state: _State) -> None:
    """Take note of where a pre-tokenizer always splits, and of where it looks across."""
    kind = step["type"]
    if kind == "ByteLevel":
        _require_settings(step, add_prefix_space=(False,), trim_offsets=(), use_regex=())
        if step.get("use_regex", True):
            _split_at_pattern(GPT2, state)
    elif kind == "Split":
        _split_at_regex(step, state)
    elif kind == "Whitespace":
        _require_settings(step)
        _split_at_pattern(r"\w+|[^\w\s]+", state, drops_rest=True)
        state.drops_spaces = True
    elif kind == "WhitespaceSplit":
        _require_settings(step)
        _split_around([*_SPACES, *state.spaced], state)
        state.drops_spaces = True
    elif kind == "BertPreTokenizer":
        _require_settings(step)
        _split_around([*_SPACES, *_punctuation(), *state.spaced], state)
        state.drops_spaces = True
    elif kind == "Punctuation":
        _require_settings(step, behavior=("Isolated", "Contiguous"))
        _split_around(_punctuation(), state, alone=step["behavior"] == "Isolated")
    elif kind == "Digits":
        _require_settings(step, individual_digits=(True, False))
        _split_around(list(b"0123456789"), state, alone=step["individual_digits"])
    elif kind == "Metaspace":
        _mark_spaces(step, state)
    else:
        raise UncuttableError(f"its pre_tokenizer is {kind}")


def _split_at_regex(step: Config, state: _State) -> None:
    _require_settings(step, pattern=(), behavior=(), invert=())
    if list(step["pattern"]) != ["Regex"]:
        raise UncuttableError(f"its pre_tokenizer splits at {step['pattern']}")
    behavior = (step["behavior"], step["invert"])
    if behavior not in (("Isolated", False), ("Isolated", True), ("Removed", True)):
        raise UncuttableError(f"its Split has behavior {step['behavior']}")
    _split_at_pattern(step["pattern"]["Regex"], state, drops_rest=step["behavior"] == "Removed")


def _split_at_pattern(pattern: str, state: _State, *, drops_rest: bool = False) -> None:
    """A pattern splits between two characters that no match joins, unless both are left over."""
    try:
        found = read_pattern(pattern)
    except UnknownPatternError as error:
        raise UncuttableError(f"its split pattern {pattern!r} is not understood: {error}") from None
    state.allowed &= ~found.joins | state.made
    splits = ~found.joins
    if not drops_rest:
        covered = np.isin(np.arange(_characters.NUM_GROUPS), sorted(found.covers))
        splits &= covered[:, None] | covered[None, :]
    state.made |= splits & state.allowed


def _split_around(groups: Sequence[int], state: _State, *, alone: bool = True) -> None:
    """Split around each character of some groups, or around runs of them."""
    inside = np.isin(np.arange(_characters.NUM_GROUPS), groups)
    outside = ~inside
    outside[[_characters.WILD, _characters.REMOTE]] = False
    splits = (
        inside[:, None] | inside[None, :]
        if alone
        else (inside[:, None] & outside[None, :]) | (outside[:, None] & inside[None, :])
    )
    state.made |= splits & state.allowed


def _mark_spaces(step: Config, state: _State) -> None:
    """Metaspace splits before each space. Elsewhere it may put a ▁ before a part."""
    schemes = ("always", "never", "first")
    _require_settings(step, replacement=("▁",), prepend_scheme=schemes, split=(True, False), add_prefix_space=())
    scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
    if state.drops_spaces and scheme == "first":
        raise UncuttableError("its Metaspace marks the first word only")
    if state.drops_spaces:
        return
    before_space = np.zeros_like(state.made)
    before_space[:, ord(" ")] = True
    state.allowed &= before_space
    state.made &= before_space
    if step.get("split", True):
        state.made |= before_space & state.allowed


def _punctuation() -> list[int]:
    return [c for c in _ASCII if chr(c).isprintable() and not chr(c).isalnum() and c != ord(" ")] + [_characters.MARKS]


# Added tokens and the result


def _keep_added_tokens(config: Config, state: _State, parse_special: bool) -> None:
    """Cut nothing inside an added token, and refuse one that looks at what is beside it."""
    tokens: Sequence[Config] = config.get("added_tokens") or []
    kept = [token for token in tokens if parse_special or not token["special"]]
    for token in kept:
        for key in ("single_word", "lstrip", "rstrip"):
            if token[key]:
                raise UncuttableError(f"its added token {token['content']!r} has {key}")
        if token["normalized"] and state.normalize:
            raise UncuttableError(f"its added token {token['content']!r} is matched after normalizing")
    if kept:
        # Special tokens can hide others.
        _keep_whole((token["content"] for token in tokens), state)


def _keep_whole(strings: Iterable[str], state: _State) -> None:
    for string in strings:
        groups = [_characters.groups_of(character) for character in string]
        for left, right in pairwise(groups):
            state.whole[np.ix_(left, right)] = True


def _finish(state: _State) -> Cuts:
    groups = _characters.make_groups(tuple(state.normalize))
    cuts = state.made & state.allowed
    _move_ascii(cuts, state)
    known = [*_ASCII, *_characters.LETTERS, _characters.MARKS, _characters.SIGNS]
    unknown = [_characters.WILD, _characters.REMOTE]
    if state.composes:
        for group, codes in _COMPOSED.items():
            cuts[:, list(codes)] &= cuts[:, [group]]
    if state.normalize:
        # An unknown character may become any other, and if it is removed, the one before counts.
        others = [group for group in [*known, *unknown] if state.removes or group not in _characters.SPACES]
        cuts[unknown] = cuts[others].all(axis=0)
    if state.needs_known and not state.drops_spaces:
        cuts[unknown] = False
    if state.needs_known:
        # Characters are looked up together with those that Unicode joins to them.
        cuts[_characters.REMOTE] = False
        cuts[:, 128:] = False
    is_known = np.isin(np.arange(_characters.NUM_GROUPS), known)
    cuts[:, ~is_known] = False
    cuts &= ~state.whole
    cuts[~np.isin(np.arange(_characters.NUM_GROUPS), [*known, *unknown])] = False
    # A space stays with the next word, and white space together: fewer words are looked up.
    cuts[ord(" ")] = False
    cuts[np.ix_(_SPACES, _SPACES)] = False
    if not cuts[ord("a"), ord(" ")]:
        raise UncuttableError("it does not split before every word")
    return Cuts(groups, cuts.astype(np.uint8).tobytes(), tuple(state.normalize))


def _move_ascii(cuts: Pairs, state: _State) -> None:
    """Give an ASCII character that is normalized to another one the cuts of that one."""
    source = np.arange(_characters.NUM_GROUPS)
    stays = np.ones(_characters.NUM_GROUPS, np.bool_)
    for code in _ASCII:
        text = _characters.apply(state.normalize, chr(code))
        is_new_space = text == " " and code not in _characters.SPACES
        if len(text) == 1 and text.isascii() and not is_new_space:
            source[code] = ord(text)
        else:
            stays[code] = False
    cuts[:] = cuts[np.ix_(source, source)]
    cuts[~stays] = cuts[:, ~stays] = False
