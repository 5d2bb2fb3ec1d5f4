"""Trace what a template does with the contents of a conversation, to replay it for similar conversations.

Rendering a chat template takes 20 to 250 us, tokenizing its output 5. But a template does the same with every
conversation of the same roles, unless it looks at a content. So it gets contents as `Recorded` strings. These record
every test of a content (`startswith`, emptiness) as a guard, and every change (`strip`). The output, with marks for the
contents, is valid for every conversation whose contents give the same results in all guards. Any other operation
raises `Unrecordable`; such a template is rendered each time.

The same content after the same changes has the same mark. So comparing two texts with marks compares all texts that
they stand for.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from tokenmill.supervision._attributed import Part, Source
from tokenmill.supervision._template import TAG, PassThrough
from tokenmill.supervision._turns import BLANK, Turn

__all__ = ["MARKS", "Recorder", "Trace", "Unrecordable", "is_recordable", "refuse_recorded"]

OPEN, CLOSE = "\ue000", "\ue001"
"""Private characters around the number of a recorded string in rendered text."""
MARKS = re.compile(f"[{OPEN}-{BLANK}]")
"""The private characters that stand for contents."""
FILTERS = {"trim", "length", "count", "default", "d", "string", "tojson"}
TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number"}
METHODS = {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "items", "get", "keys", "values"}
GLOBALS = {"namespace", "raise_exception", "range", TAG}
_MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Unrecordable(PassThrough):
    """The template does something with a content that cannot be recorded."""


class ContentSlot(NamedTuple):
    """The number of a content, and the methods that were called on it, in order."""

    number: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()


class Guard(NamedTuple):
    """A test of a content, and its result. A trace is valid for contents with the same results."""

    slot: ContentSlot
    test: Callable[..., Any]
    """A function of the content and the arguments: `str.startswith`, `bool`."""
    arguments: tuple[Any, ...]
    result: bool


def _value_of(slot: ContentSlot, contents: list[str]) -> str:
    """Return the content of a slot after the recorded method calls."""
    value = contents[slot.number]
    for method, arguments in slot.changes:
        value = getattr(value, method)(*arguments)
    return value


class Trace:
    """A rendered text with marks and the turns in it, split at the marks into constants and contents."""

    def __init__(self, recorder: Recorder, text: str, turns: list[Turn]) -> None:
        self._guards = list(dict.fromkeys(recorder.guards))
        slots, parts = list(recorder.slots), _MARK.split(text)
        self._pieces = [slots[int(part)] if number % 2 else part for number, part in enumerate(parts)]
        starts = [0, *accumulate(len(part) + 2 * (number % 2) for number, part in enumerate(parts))]

        def locate(place: int) -> tuple[int, int]:
            """Return the piece in which a place is, and the characters of that piece before it."""
            piece = bisect_right(starts, place, hi=len(parts)) - 1
            return piece, place - starts[piece]

        self._turns = [(turn, [(*locate(start), *locate(stop)) for start, stop in turn.spans]) for turn in turns]

    def fits(self, contents: list[str]) -> bool:
        """Whether the template would do the same with other contents."""
        for slot, test, arguments, result in self._guards:
            value = _value_of(slot, contents) if slot.changes else contents[slot.number]
            if test(value, *arguments) != result:
                return False
        return True

    def replay(self, contents: list[str]) -> tuple[str, list[Turn]]:
        """Return the text with other contents, and the turns in it."""
        values = [piece if type(piece) is str else _value_of(piece, contents) for piece in self._pieces]  # type: ignore[arg-type]
        starts = [0, *accumulate(map(len, values))]
        turns = [
            turn._replace(
                spans=tuple((starts[first] + begin, starts[last] + end) for first, begin, last, end in places)
            )
            for turn, places in self._turns
        ]
        return "".join(values), turns


class Recorder:
    """Creates recorded strings, and keeps what happens to them."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self.slots: dict[ContentSlot, int] = {}

    def record(self, value: str, number: int, *changes: tuple[str, tuple[Any, ...]]) -> Recorded:
        """Create a string that stands for a content after some changes; tests are applied to `value`."""
        slot = ContentSlot(number, changes)
        recorded = Recorded(f"{OPEN}{self.slots.setdefault(slot, len(self.slots))}{CLOSE}")
        recorded.recorder, recorded.slot, recorded.value = self, slot, value
        return recorded

    def find_marks(self, text: str) -> list[Part]:
        """Return where contents are in a rendered text."""
        slots = list(self.slots)
        return [
            Part(mark.start(), mark.end(), Source(slots[int(mark[1])].number, "content"))
            for mark in _MARK.finditer(text)
        ]


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: str, *_: Any, **__: Any) -> Any:
        raise Unrecordable(name)

    return method


class _Guarded(str):
    """A string with marks in it, which allows only the operations of its subclass."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return _Guarded(str.__add__(self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _Guarded(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        return str.__str__(self)


_REFUSED_OF_OBJECT = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__format__"}
_KEPT = {*dir(object), "__add__", "__radd__"} - _REFUSED_OF_OBJECT
for _name in {*dir(str), "__bool__", "__rmod__", "__rmul__"} - _KEPT:
    setattr(_Guarded, _name, _refuse(_name))


class Recorded(_Guarded):
    """The content of a message: its text is a mark, and it records the operations on it."""

    recorder: Recorder
    slot: ContentSlot
    value: str


def _is_plain(arguments: tuple[Any, ...]) -> bool:
    return all(type(a) is str or a is None or (type(a) is tuple and _is_plain(a)) for a in arguments)


def _recorded_test(method: str) -> Callable[..., bool]:
    function = bool if method == "__bool__" else getattr(str, method)

    def test(self: Recorded, *arguments: Any) -> bool:
        result = function(self.value, *arguments) if _is_plain(arguments) else None
        if not isinstance(result, bool):
            raise Unrecordable(method)
        self.recorder.guards.append(Guard(self.slot, function, arguments, result))
        return result

    return test


def _recorded_change(method: str) -> Callable[..., Recorded]:
    def change(self: Recorded, *arguments: Any) -> Recorded:
        if not _is_plain(arguments):
            raise Unrecordable(method)
        number, changes = self.slot
        return self.recorder.record(getattr(self.value, method)(*arguments), number, *changes, (method, arguments))

    return change


for _name in ("startswith", "endswith", "__contains__", "__eq__", "__ne__", "__bool__"):
    setattr(Recorded, _name, _recorded_test(_name))
for _name in ("strip", "lstrip", "rstrip"):
    setattr(Recorded, _name, _recorded_change(_name))


def is_recordable(tree: Any) -> bool:
    """Whether a recorder can follow contents through all operations of a template."""
    from jinja2 import nodes

    def calls_known(call: Any) -> bool:
        called = call.node
        return called.attr in METHODS if isinstance(called, nodes.Getattr) else getattr(called, "name", "") in GLOBALS

    opaque = (nodes.Concat, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)
    return (
        tree.find(opaque) is None
        and all(node.name in FILTERS for node in tree.find_all(nodes.Filter))
        and all(node.name in TESTS for node in tree.find_all(nodes.Test))
        and all(isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod))
        and all(map(calls_known, tree.find_all(nodes.Call)))
    )


def refuse_recorded(value: Any) -> None:
    """Raise if a value has a content in it, because what becomes of it as JSON is not recorded."""
    if isinstance(value, Recorded):
        raise Unrecordable("tojson")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        refuse_recorded(one)
