"""Explain why a line of JSON is refused, so that a user can fix it.

The typed decoder is fast and its errors are terse. Python's own parser reads a refused line again. It distinguishes a
lone surrogate from broken JSON and keeps the last of two equal keys. If the text turns out to be valid, the document is
kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from shlex import quote
from typing import Any

from tokenmill.readers.base import as_kept, find_value
from tokenmill.text_batch import Refusal, shorten

__all__ = ["explain_record", "read_again"]

KEYS_SHOWN = 6
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def read_again(
    line: bytes | bytearray, text_parts: tuple[str, ...], keep_parts: tuple[tuple[str, ...], ...]
) -> tuple[str, tuple[str | None, ...]] | Refusal:
    """Return the text and the kept values of a line that the typed decoder refused, or why there are none."""
    value = _parse_object(line)
    if isinstance(value, Refusal):
        return value
    text = find_value(value, text_parts)
    if not isinstance(text, str):
        return _explain_no_text(value, text_parts)
    kept = tuple(as_kept(find_value(value, parts)) for parts in keep_parts)
    for parts, field in zip((text_parts, *keep_parts), (text, *kept), strict=True):
        try:
            (field or "").encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            where = f"field {'.'.join(parts)!r} has the lone surrogate \\u{code:04x} at character {error.start}"
            return Refusal("lone-surrogate", shorten(f"{where}, which UTF-8 cannot hold"))
    return text, kept


def explain_record(
    line: bytes | bytearray, parts: tuple[tuple[str, ...], ...], needed: Sequence[tuple[str, ...]]
) -> Refusal:
    """Explain why a line is no record: it is broken, lacks a needed field, or has none of the fields that are read."""
    value = _parse_object(line)
    if isinstance(value, Refusal):
        return value
    missing = [some for some in needed if find_value(value, some) is None]
    if missing or (parts and all(find_value(value, some) is None for some in parts)):
        key = ".".join((missing or parts)[0])
        return Refusal("missing-field", shorten(f"no field {key!r}, or it is null; {_name_fields(value)}"))
    return Refusal("lone-surrogate", "a field of the record has a lone surrogate, which UTF-8 cannot hold")


def _parse_object(line: bytes | bytearray) -> dict[str, Any] | Refusal:
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        return Refusal("invalid-utf8", f"byte {error.start} of the record (0x{bad:02x}) is not UTF-8")
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        return Refusal("malformed-json", f"not JSON at character {error.pos}: {what[:1].lower()}{what[1:]}")
    except RecursionError:
        return Refusal("malformed-json", "the record is nested too deeply")
    except ValueError as error:
        return Refusal("malformed-json", shorten(f"not JSON: {error}"))
    if isinstance(value, dict):
        return value
    return Refusal("not-an-object", f"the record is {_KINDS[type(value)]}, not an object")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _explain_no_text(record: dict[str, Any], parts: tuple[str, ...]) -> Refusal:
    key = ".".join(parts)
    value: Any = record
    for depth, name in enumerate(parts):
        if not isinstance(value, dict):
            held = f"{'.'.join(parts[:depth])!r} is {_KINDS[type(value)]}"
            return Refusal("missing-field", shorten(f"no field {key!r}; {held}"))
        if name not in value:
            return Refusal("missing-field", _suggest(record, key))
        value = value[name]
    if value is None:
        return Refusal("null-text", shorten(f"field {key!r} is null; {_name_fields(record)}"))
    problem = f"field {key!r} is {_KINDS[type(value)]}, not a string"
    return Refusal("not-a-string", shorten(f"{problem}; {_name_fields(record)}"))


def _name_fields(record: dict[str, Any]) -> str:
    if not record:
        return "the record is empty"
    shown = ", ".join(repr(shorten(name, 24)) for name in list(record)[:KEYS_SHOWN])
    more = f" and {len(record) - KEYS_SHOWN} more" if len(record) > KEYS_SHOWN else ""
    return f"the record has {shown}{more}"


def _suggest(record: dict[str, Any], key: str) -> str:
    """Name the fields of the record, and suggest the one with the longest string as the text.

    A name with line ends or the codes that control a terminal is not suggested.
    """
    detail = f"no field {key!r}; {_name_fields(record)}"
    strings = {
        f"{name}{inner}": text
        for name, value in record.items()
        for inner, text in ([("", value)] if not isinstance(value, dict) else ((f".{k}", v) for k, v in value.items()))
        if isinstance(text, str) and "." not in name and f"{name}{inner}".isprintable()
    }
    lists = {name: value for name, value in record.items() if isinstance(value, list) and value}
    conversations = [name for name, value in lists.items() if isinstance(value[0], dict) and name.isprintable()]
    advice = [f"--messages-key {quote(conversations[0])} for conversations"] if conversations else []
    if strings:
        advice.append(f"--text-key {quote(max(strings, key=lambda name: len(strings[name])))}")
    return shorten(f"{detail}. Pass {' or '.join(advice)}" if advice else detail)
