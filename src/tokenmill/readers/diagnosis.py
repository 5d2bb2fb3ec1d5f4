"""Why a line of JSON is refused, said so that it can be mended.

The typed decoder is fast and terse. A line that it refuses is read again here, slowly and
with Python's own parser, which tells a lone surrogate from broken JSON and keeps the last of
two equal keys. Sometimes the text turns out to be sound: then the document is kept.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenmill.readers.fields import as_kept, find_value

__all__ = ["Refusal", "read_again", "read_record_again", "shorten"]

KEYS_SHOWN = 6


class Refusal(NamedTuple):
    """A reason from a small set, and one sentence of detail."""

    reason: str
    detail: str


def read_again(
    line: bytes | bytearray, text_parts: tuple[str, ...], keep_parts: tuple[tuple[str, ...], ...]
) -> tuple[str, tuple[str | None, ...]] | Refusal:
    """The text and kept values of a line that the typed decoder refused, or why there are none."""
    value = _parse(line)
    if isinstance(value, Refusal):
        return value
    if not isinstance(value, dict):
        return Refusal("not-an-object", f"the record is {_kind(value)}, not an object")
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


def read_record_again(line: bytes | bytearray) -> Refusal:
    """Why a line is no record."""
    value = _parse(line)
    if isinstance(value, Refusal):
        return value
    if not isinstance(value, dict):
        return Refusal("not-an-object", f"the record is {_kind(value)}, not an object")
    return Refusal("lone-surrogate", "a field of the record has a lone surrogate, which UTF-8 cannot hold")


def _parse(line: bytes | bytearray) -> Any:
    try:
        return json.loads(line.decode(), parse_constant=_refuse_constant)
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


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]


def _explain_no_text(record: dict[str, Any], parts: tuple[str, ...]) -> Refusal:
    key = ".".join(parts)
    value: Any = record
    for depth, name in enumerate(parts):
        if not isinstance(value, dict):
            held = f"{'.'.join(parts[:depth])!r} is {_kind(value)}"
            return Refusal("missing-field", shorten(f"no field {key!r}; {held}"))
        if name not in value:
            return Refusal("missing-field", _suggest(record, key))
        value = value[name]
    if value is None:
        return Refusal("null-text", shorten(f"field {key!r} is null"))
    return Refusal("not-a-string", shorten(f"field {key!r} is {_kind(value)}, not a string"))


def _suggest(record: dict[str, Any], key: str) -> str:
    """Name the fields there are, and the one with the longest string as the likely text."""
    if not record:
        return f"no field {key!r}; the record is empty"
    shown = ", ".join(repr(shorten(name, 24)) for name in list(record)[:KEYS_SHOWN])
    if len(record) > KEYS_SHOWN:
        shown += f" and {len(record) - KEYS_SHOWN} more"
    detail = f"no field {key!r}; the record has {shown}"
    strings = {
        f"{name}{inner}": text
        for name, value in record.items()
        for inner, text in ([("", value)] if not isinstance(value, dict) else ((f".{k}", v) for k, v in value.items()))
        if isinstance(text, str) and "." not in name
    }
    advice = [f"--messages-key {name} for conversations" for name, value in record.items() if _is_conversation(value)][
        :1
    ]
    if strings:
        advice.append(f"--text-key {max(strings, key=lambda name: len(strings[name]))}")
    return shorten(f"{detail}. Pass {' or '.join(advice)}" if advice else detail)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def shorten(text: str, limit: int = 190) -> str:
    """Keep a detail to one line that can be read."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
