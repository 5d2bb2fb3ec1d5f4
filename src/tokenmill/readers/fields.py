"""Which fields make a document: the text, and what is kept beside it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tokenmill.errors import UsageError

__all__ = ["as_kept", "find_value", "split_key"]


def split_key(key: str) -> tuple[str, ...]:
    """`meta.url` is the field `url` of the object in the field `meta`."""
    parts = tuple(key.split("."))
    if not all(parts):
        raise UsageError(f"{key!r} is not a field; expected a name, or names joined by single dots")
    return parts


def find_value(value: Any, parts: tuple[str, ...]) -> Any:
    """The value that a path of names leads to, None if it leads nowhere."""
    for name in parts:
        value = value.get(name) if type(value) is dict else None
    return value


def as_kept(value: Any) -> str | None:
    """A value as a Parquet string column holds it: text as it is, anything else as compact JSON."""
    if value is None or type(value) is str:
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError):
        # Integers beyond 64 bits, lone surrogates and types that only Parquet has.
        return json.dumps(value, separators=(",", ":"), default=str)
