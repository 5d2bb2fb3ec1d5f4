"""The messages and tools of a record, cleaned of what data formats add to them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenmill.text_batch import Refusal, shorten

__all__ = ["clean_messages", "collect_strings", "read_tools"]


def clean_messages(messages: Any, *, fills_content: bool = False) -> list[dict[str, Any]] | Refusal:
    """Return messages as templates expect them, without the nulls that Parquet has for missing fields.

    By choice, a message that has calls of tools and no content gets an empty one.
    """
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else f"{type(messages).__name__}, not a list"
        return Refusal("bad-messages", f"the messages are {what}; expected objects with role and content")
    cleaned: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if (
            type(message) is dict
            and type(message.get("role")) is str
            and type(message.get("content")) is str
            and None not in message.values()
        ):
            # Most messages need nothing.
            cleaned.append(message)
            continue
        if not isinstance(message, dict) or type(message.get("role")) is not str:
            keys = ", ".join(map(repr, message)) if isinstance(message, dict) else type(message).__name__
            return Refusal("bad-messages", shorten(f"message {number} has no role; it has {keys}"))
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if isinstance(message.get("content"), list):
            parts = [_drop_nulls(part) for part in message["content"]]
            kinds = [part.get("type", "text") if isinstance(part, dict) else "text" for part in parts]
            if other := next((kind for kind in kinds if kind != "text"), None):
                return Refusal(
                    "not-text", shorten(f"message {number} has a part of type {other!r}; only text is stored")
                )
            message = {**message, "content": parts}
        if fills_content and "content" not in message and message.get("tool_calls"):
            message = {**message, "content": ""}
        cleaned.append(message)
    return cleaned


def _drop_nulls(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def read_tools(tools: Any) -> Any:
    """Return the tools of a record, which data sets may hold as the text of JSON; None if there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            return Refusal("bad-tools", "field 'tools' is text that is not JSON; expected a list of tools")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        what = f"{type(tools).__name__}" if not isinstance(tools, list) else "a list of other things"
        return Refusal("bad-tools", f"field 'tools' is {what}; expected a list of objects, each a tool's JSON schema")
    return tools or None


def collect_strings(values: Iterable[Any]) -> list[str]:
    """Collect all strings in values, with the names of fields in objects."""
    found: list[str] = []
    for value in values:
        if type(value) is str:
            found.append(value)
        elif isinstance(value, dict):
            found += value
            found += collect_strings(value.values())
        elif isinstance(value, (list, tuple)):
            found += collect_strings(value)
    return found
