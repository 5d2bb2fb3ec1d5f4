"""Split a conversation into its shape and its leaves.

The leaves are the strings and objects that differ from one conversation to the next: contents, names, the arguments of
a call, the definition of a tool. The shape is the rest: roles, the names of fields, how many calls there are, and which
strings are empty. What a template did with one conversation can be repeated for another of the same shape
(`_recorder.py`).
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenmill.supervision._attributed import AttributedDict, AttributedList, Source, attribute
from tokenmill.supervision._template_json import know_tools
from tokenmill.supervision.options import REASONING_FIELDS
from tokenmill.supervision.record_messages import collect_strings

__all__ = ["FIELDS", "HEADERS", "Conversation", "LeafRules", "name_reasoning", "read_conversation", "rebuild"]

Message = dict[str, Any]
HEADERS = ("role", "name", "tool_call_id")
"""Fields that say who speaks; they are never what a model has to write."""
FIELDS = dict.fromkeys(REASONING_FIELDS, "reasoning")
STRING, OBJECT = 0, 1
MOST_BLANK = 8
"""White space of at most so many characters is in the shape."""
SCALARS = (int, float, bool, type(None))


class LeafRules(NamedTuple):
    """Which objects are leaves. Some templates look inside them; then they are part of the shape."""

    has_whole_tools: bool = True
    has_whole_arguments: bool = True


class Conversation(NamedTuple):
    """The shape of a conversation, which can be a key, and its leaves in order."""

    shape: tuple[Any, ...]
    leaves: list[Any]
    others: list[str]
    """The roles, and the strings of tools."""

    @property
    def strings(self) -> list[str]:
        """All strings."""
        found = self.others.copy()
        for leaf in self.leaves:
            if type(leaf) is str:
                found.append(leaf)
            elif type(leaf) is dict:
                found += collect_strings([leaf])
        return found


class _Irregular(Exception):
    """A value of a kind that only a rendering of its own can do justice."""


def read_conversation(messages: list[Message], tools: Any, layout: LeafRules) -> Conversation | None:
    """Return the shape and the leaves of messages and tools, or None if there is a value that cannot be a leaf."""
    shape: list[Any] = []
    leaves: list[Any] = []
    others = [message["role"] for message in messages]
    whole = layout.has_whole_arguments
    try:
        for message in messages:
            content = message.get("content")
            if len(message) == 2 and type(content) is str and content and not content.isspace():
                leaves.append(content)
                shape.append(message["role"])
                continue
            fields: list[Any] = []
            for key, value in message.items():
                fields.append(key)
                if key == "role":
                    fields.append(value)
                elif type(value) is str and value and not value.isspace():
                    leaves.append(value)
                    fields.append(STRING)
                else:
                    fields.append(_split(value, key, leaves, whole))
            shape.append(tuple(fields))
        if tools is not None:
            shape.append(_split_tools(tools, leaves, others, layout.has_whole_tools))
    except (_Irregular, TypeError, ValueError, RecursionError):
        return None
    return Conversation(tuple(shape), leaves, others)


def _split(value: Any, key: str, leaves: list[Any], whole: bool) -> Any:
    """Append the leaves of a value, and return its shape."""
    kind = type(value)
    if kind is str:
        # A template may remove all of a blank string, and what is empty has no place in the text.
        if not value or value.isspace():
            if len(value) > MOST_BLANK:
                raise _Irregular
            return value
        leaves.append(value)
        return STRING
    if kind is dict:
        if whole and key == "arguments" and value:
            leaves.append(value)
            return OBJECT
        if not all(map(str.isidentifier, value)):
            raise _Irregular
        return ("{", *[(name, _split(inner, name, leaves, whole)) for name, inner in value.items()])
    if kind is list:
        return ("[", *[_split(inner, "", leaves, whole) for inner in value])
    if kind not in SCALARS:
        raise _Irregular
    return repr(value)


def _split_tools(tools: Any, leaves: list[Any], others: list[str], whole: bool) -> Any:
    if type(tools) is not list or not all(type(tool) is dict and tool for tool in tools):
        raise _Irregular
    known, strings = know_tools(tools)
    others += strings
    if not whole:
        return marshal.dumps(tools, 0)
    leaves += known
    return len(tools)


Leaf = Callable[[Any, Source | None], Any]


def rebuild(messages: list[Message], tools: Any, layout: LeafRules, make_leaf: Leaf) -> tuple[list[Message], Any]:
    """Copy a conversation with its leaves replaced, in the same order; everything else is as `attribute` makes it."""

    def copy(value: Any, key: str, source: Source | None) -> Any:
        if type(value) is str:
            return make_leaf(value, source) if value.strip() else _attributed(value, source)
        if type(value) is dict and not (layout.has_whole_arguments and key == "arguments" and value):
            inner = {_attributed(name, source): copy(one, name, source) for name, one in value.items()}
            return _with_source(AttributedDict(inner), source) if source else inner
        if type(value) is dict:
            return make_leaf(value, source)
        if type(value) is list:
            items = [copy(one, "", source) for one in value]
            return _with_source(AttributedList(items), source) if source else items
        return value

    copied = []
    for number, message in enumerate(messages):
        made: Message = {}
        for key, value in message.items():
            source = None if key in HEADERS else Source(number, FIELDS.get(key, key))
            made[key] = value if key == "role" else copy(value, key, source)
        copied.append(name_reasoning(made))
    if tools is not None and layout.has_whole_tools:
        tools = [make_leaf(tool, None) for tool in tools]
    return copied, tools


def _attributed(value: Any, source: Source | None) -> Any:
    return attribute(value, source) if source else value


def _with_source(value: Any, source: Source) -> Any:
    value._source = source
    return value


def name_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under all names that templates use; Transformers fills them in, too."""
    reasoning = next((message[field] for field in REASONING_FIELDS if message.get(field) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
