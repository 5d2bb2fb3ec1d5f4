"""Refuse a tokenizer before any work starts if no store can hold its ids, or if its own library rejects it.

The file alone shows ids that do not fit, dropout and a normalizer that inflates text (`check_config`). Only the library
knows which ids it gives to added tokens, whatever the file says (`check_added`), and whether it encodes without a panic
(`try_encoding`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenmill.engines._guard import PanicError, guarded
from tokenmill.errors import DataError
from tokenmill.text_batch import TokenBatch, shorten

__all__ = [
    "check_added",
    "check_config",
    "check_function",
    "check_ids",
    "check_sequence",
    "find_patterns",
    "try_encoding",
]

ID_LIMIT = 1 << 31
"""Stores have ids of 16 or 31 bits."""
MOST_ADDED = 100_000
MOST_GROWTH = 64
"""The factor by which a normalizer may lengthen a text: a worker has memory for batches of a megabyte."""
LONGEST_AFFIX = 64
TRIAL = [
    "a",
    "the cat",
    "isn't 100%?",
    " \n\t",
    "  two  spaces ",
    "\u00e9\u4e2d\U0001f600",
    "1234567890",
    "a" * 32 + "!",
]
TRIAL += [" " * 32 + "x", "1" * 32 + "a", "." * 32 + "a", "ab " * 11 + "!", "aB1 " * 8 + "\n", "\u00e9" * 32 + "!"]
"""Short texts; on those with long runs, a split pattern that backtracks takes exponential time."""
BACKTRACKING = ("retry-limit", "BacktrackLimit", "backtrack")
"""Words in the errors of Oniguruma and fancy-regex for a search that was given up."""
TRIAL_SECONDS = 2.0
"""The time limit for one of these texts; a good pattern takes a millisecond."""


def check_config(file: str, config: Mapping[str, Any]) -> None:
    """Refuse a `tokenizer.json` whose ids no store can hold, or whose normalizer makes texts many times as long."""
    model, added = config["model"], config.get("added_tokens") or []
    if isinstance(model["vocab"], dict):
        check_ids(file, model["vocab"])
    if len(added) > MOST_ADDED:
        raise DataError(file, f"has {len(added):,} added tokens; expected at most {MOST_ADDED:,}")
    for token in added:
        _check_id(file, token["content"], token["id"])
    growth = _growth(config.get("normalizer"))
    if growth > MOST_GROWTH:
        raise DataError(
            file,
            f"its normalizer can make a text {growth:,} times as long; expected at most {MOST_GROWTH} times: shorten "
            "what it inserts",
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(key) or "") > LONGEST_AFFIX:
            raise DataError(file, f"its {key} has {len(model[key]):,} characters; expected at most {LONGEST_AFFIX}")


def check_ids(file: str, tokens: Mapping[Any, Any]) -> None:
    """Refuse ids that are not numbers, that no store can hold, or that two tokens share."""
    ids = tokens.values()
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < ID_LIMIT)):
        if len(set(ids)) == len(ids):
            return
        first: dict[int, Any] = {}
        for token, number in tokens.items():
            if first.setdefault(number, token) != token:
                raise DataError(file, f"gives the id {number} to both {_show(first[number])} and {_show(token)}")
    for token, number in tokens.items():
        _check_id(file, token, number)


def _check_id(file: str, token: Any, number: Any) -> None:
    if type(number) is not int or not 0 <= number < ID_LIMIT:
        expected = f"expected a whole number from 0 to {ID_LIMIT - 1:,}, the largest that a store can hold"
        raise DataError(file, f"gives {_show(token)} the id {shorten(repr(number), 60)}; {expected}")


def check_function(file: str, config: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that gives the same text different ids each time."""
    dropout = config["model"].get("dropout")
    if dropout:
        raise DataError(
            file,
            f"its model has dropout {shorten(repr(dropout), 60)}, so a text has other ids each time; set it to null",
        )


def check_sequence(file: str, surrounding: Iterable[tuple[Any, Any]], known: Mapping[str, int]) -> None:
    """Refuse a post-processor with a token that is unknown or has another id in the vocabulary; None is no id."""
    for token, number in surrounding:
        if not isinstance(token, str) or token not in known:
            raise DataError(file, f"its post-processor adds {_show(token)}, which is not in the vocabulary")
        if number is not None and number != known[token]:
            raise DataError(
                file,
                f"its post-processor gives {_show(token)} the id {shorten(repr(number), 60)}, and the vocabulary "
                f"{known[token]}; correct one of them",
            )


def check_added(file: str, config: Mapping[str, Any], library: Any) -> None:
    """Refuse added tokens to which the library gives other ids than the file."""
    for token in config.get("added_tokens") or []:
        actual = library.token_id(token["content"], token["id"])
        if actual != token["id"]:
            raise DataError(
                file,
                f"gives the added token {_show(token['content'])} the id {token['id']}, and the tokenizers library "
                f"{'no id' if actual is None else actual}; correct the file, or save it again with that library",
            )


def try_encoding(
    file: str, encode: Callable[[list[str]], TokenBatch], vocab_size: int, patterns: Sequence[str] = ()
) -> None:
    """Encode a few short texts; refuse a tokenizer that panics, gives ids outside its vocabulary, or takes too long.

    The libraries end a search with their `patterns` after some millions of steps, so this call always returns.
    """
    for text in TRIAL:
        started, what = time.monotonic(), f"the {len(text)} characters {shorten(text, 16)!r}"
        try:
            with guarded(file, f"cannot encode {what}"):
                twice = encode([text, text])
        except PanicError as error:
            if not any(word in error.reason for word in BACKTRACKING):
                raise
            raise DataError(file, f"{_show_patterns(patterns)} backtracks without end on {what}") from None
        except DataError:
            # A tokenizer may lack a token for these characters, and the user's texts may not contain them.
            continue
        seconds = time.monotonic() - started
        if seconds > TRIAL_SECONDS:
            raise DataError(file, f"{_show_patterns(patterns)} takes {seconds:.0f} s for {what}")
        half = len(twice.ids) // 2
        if twice.ids[:half].tolist() != twice.ids[half:].tolist():
            raise DataError(file, f"gives {what} other ids each time; a tokenizer must be a function")
        if len(twice.ids) and int(twice.ids.max()) >= vocab_size:
            raise DataError(file, f"gives the id {int(twice.ids.max())}, outside its vocabulary of {vocab_size}")


def find_patterns(part: Any) -> list[str]:
    """List the regular expressions in a part of a `tokenizer.json`."""
    if isinstance(part, list):
        return [pattern for item in part for pattern in find_patterns(item)]
    if not isinstance(part, dict):
        return []
    steps = [part.get(key) for key in ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers", "pattern")]
    found = part.get("Regex")
    return [*([found] if isinstance(found, str) else []), *find_patterns(steps)]


def _show_patterns(patterns: Sequence[str]) -> str:
    shown = ", ".join(shorten(repr(pattern), 80) for pattern in patterns[:3])
    return f"its split pattern {shown}" if patterns else "its normalizer or pre_tokenizer"


def _growth(step: Any) -> int:
    """Return how many times as long a normalizer can make a text of one character, at most."""
    if not isinstance(step, dict):
        return 1
    if step.get("type") == "Sequence":
        growth = 1
        for part in step.get("normalizers") or []:
            growth = min(growth * _growth(part), 1 << 62)
        return growth
    if step.get("type") == "Prepend":
        return 1 + len(step.get("prepend") or "")
    if step.get("type") != "Replace":
        return 1
    pattern, content = step.get("pattern"), step.get("content")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    length = len(content) if isinstance(content, str) else 0
    return max(1, -(-length // len(literal)) if isinstance(literal, str) and literal else length)


def _show(token: Any) -> str:
    return shorten(repr(token), 60)
