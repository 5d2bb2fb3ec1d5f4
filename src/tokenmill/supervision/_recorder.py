"""Trace what a template does with the leaves of a conversation, to replay it for similar conversations.

Rendering a chat template takes 20 to 1000 us, tokenizing its output 5 to 50. But a template does the same with every
conversation of the same shape, unless it looks at a leaf (`_conversation.py`). So it gets leaves as `Recorded` strings
and objects. These record every test of a leaf (`startswith`, emptiness) as a guard, and every change (`strip`, JSON).
The output, with marks for the leaves, is valid for every conversation whose leaves give the same results in all guards.
Any other operation raises `Unrecordable`; such a template is rendered each time.

The same leaf after the same changes has the same mark. So comparing two texts with marks compares all texts that they
stand for.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from tokenmill.supervision._attributed import Attributed, Guarded, Part, Source, Unrecordable, attach
from tokenmill.supervision._template import TAG
from tokenmill.supervision._template_json import Options, encode_json
from tokenmill.supervision._turns import BLANK, Turn

__all__ = ["MARKS", "LooksInside", "Recorder", "Trace", "Unrecordable", "is_recordable"]

OPEN, CLOSE = "\ue000", "\ue001"
"""Private characters around the number of a recorded leaf in rendered text."""
MARKS = re.compile(f"[{OPEN}-{BLANK}]")
"""The private characters that stand for contents."""
FILTERS = {"trim", "length", "count", "default", "d", "string", "tojson"}
CONSTANT_FILTERS = {"join", "first", "last", "items", "list", "selectattr", "rejectattr", "map", "reject", "select"}
"""Filters that may only have constants as arguments; values with marks refuse what these do with them."""
TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number"}
CONSTANT_TESTS = {"sequence", "equalto", "eq", "=="}
METHODS = {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "items", "get", "keys", "values"}
GLOBALS = {"namespace", "raise_exception", "range", "strftime_now", TAG}
_MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class LooksInside(Unrecordable):
    """The template looks inside an object that is a leaf: a tool, or the arguments of a call."""

    def __init__(self, is_tool: bool) -> None:
        self.is_tool = is_tool


class Slot(NamedTuple):
    """The number of a leaf, and the changes that were made to it, in order."""

    number: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()


class Guard(NamedTuple):
    """A test of a leaf, and its result. A trace is valid for leaves with the same results."""

    slot: Slot
    test: Callable[..., Any]
    """A function of the leaf and the arguments: `str.startswith`, `bool`."""
    arguments: tuple[Any, ...]
    result: bool


def _change(value: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    """Make a change: a method of a string, one piece of a string that is split, or JSON."""
    if name == "tojson":
        return encode_json(value, Options(*arguments))
    if name == "split":
        return value.split(*arguments[1:])[arguments[0]]
    return getattr(value, name)(*arguments)


def _value_of(slot: Slot, leaves: list[Any]) -> Any:
    """Return the leaf of a slot after the recorded changes."""
    value = leaves[slot.number]
    for name, arguments in slot.changes:
        value = _change(value, name, arguments)
    return value


class Trace:
    """A rendered text with marks and the turns in it, split at the marks into constants and leaves."""

    def __init__(self, recorder: Recorder, text: str, turns: list[Turn]) -> None:
        self.num_leaves = recorder.num_leaves
        guards = list(dict.fromkeys(recorder.guards))
        self._guards = [(*guard, guard.slot.number, bool(guard.slot.changes)) for guard in guards]
        slots, parts = list(recorder.slots), _MARK.split(text)
        self._constants: list[Any] = [None if number % 2 else part for number, part in enumerate(parts)]
        pieces = [(number, slots[int(part)]) for number, part in enumerate(parts) if number % 2]
        self._plain = [(number, slot.number) for number, slot in pieces if not slot.changes]
        self._changed = [(number, slot) for number, slot in pieces if slot.changes]
        starts = [0, *accumulate(len(part) + 2 * (number % 2) for number, part in enumerate(parts))]

        def locate(place: int) -> tuple[int, int]:
            """Return the piece in which a place is, and the characters of that piece before it."""
            piece = bisect_right(starts, place, hi=len(parts)) - 1
            return piece, place - starts[piece]

        self._turns = [(turn, [(*locate(start), *locate(stop)) for start, stop in turn.spans]) for turn in turns]

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the template would do the same with other leaves."""
        for slot, test, arguments, result, number, is_changed in self._guards:
            value = _value_of(slot, leaves) if is_changed else leaves[number]
            if test(value, *arguments) != result:
                return False
        return True

    def replay(self, leaves: list[Any]) -> tuple[str, list[Turn]]:
        """Return the text with other leaves, and the turns in it."""
        values = self._constants.copy()
        for place, number in self._plain:
            values[place] = leaves[number]
        for place, slot in self._changed:
            values[place] = _value_of(slot, leaves)
        starts = [0, *accumulate(map(len, values))]
        turns = [
            Turn(
                turn.message,
                tuple([(starts[first] + begin, starts[last] + end) for first, begin, last, end in places]),
                turn.has_stop,
            )
            for turn, places in self._turns
        ]
        return "".join(values), turns


class Recorder:
    """Creates recorded leaves, and keeps what happens to them."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self.slots: dict[Slot, int] = {}
        self.num_leaves = 0

    def make_leaf(self, value: Any, source: Source | None) -> Any:
        """Create what stands for the next leaf."""
        self.num_leaves += 1
        slot = Slot(self.num_leaves - 1)
        if isinstance(value, dict):
            return RecordedObject(self, value, slot, source)
        return self.record(value, slot, source)

    def record(self, value: str, slot: Slot, source: Source | None) -> Recorded:
        """Create a string that stands for a leaf after some changes; tests are applied to `value`."""
        recorded = Recorded(f"{OPEN}{self.slots.setdefault(slot, len(self.slots))}{CLOSE}")
        recorded._parts = (Part(0, str.__len__(recorded), source),) if source else ()
        recorded._recorder, recorded._slot, recorded._value, recorded._source = self, slot, value, source
        return recorded

    def to_json(self, value: Any, options: Options) -> Any:
        """Record that a leaf becomes JSON. Of a value that only has leaves inside, that is refused."""
        if isinstance(value, (Recorded, RecordedObject)):
            slot = Slot(value._slot.number, (*value._slot.changes, ("tojson", options)))
            return self.record(encode_json(value._value, options), slot, value._source)
        _refuse_inside(value)
        return None


def _refuse_inside(value: Any) -> None:
    if isinstance(value, (Guarded, RecordedObject)):
        raise Unrecordable("tojson")
    for one in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_inside(one)


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: Any, *_: Any, **__: Any) -> Any:
        raise Unrecordable(name)

    return method


def _refuse_looking(self: RecordedObject, *_: Any, **__: Any) -> Any:
    raise LooksInside(self._source is None)


_REFUSED_OF_OBJECT = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__format__", "__repr__"}
_KEPT = {*dir(object), "__add__", "__radd__"} - _REFUSED_OF_OBJECT
_OPERATIONS = {name for name in dir(Attributed) if callable(getattr(Attributed, name))}
for _name in (_OPERATIONS | {"__bool__", "__rmod__", "__rmul__"}) - _KEPT:
    setattr(Guarded, _name, _refuse(_name))


class Recorded(Guarded):
    """A string of a conversation: its text is a mark, and it records the operations on it."""

    _recorder: Recorder
    _slot: Slot
    _value: str
    _source: Source | None

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> Any:
        """Return the pieces, each of which can be taken by its number."""
        if not _is_plain((sep,)) or type(maxsplit) is not int:
            raise Unrecordable("split")
        return RecordedPieces(self, (sep, maxsplit))


class RecordedPieces:
    """What `split` makes of a recorded string: the first and the last piece can be taken."""

    def __init__(self, of: Recorded, arguments: tuple[Any, ...]) -> None:
        self._of, self._arguments = of, arguments

    def __getitem__(self, key: Any) -> str:
        separator = self._arguments[0]
        # A split by a separator has a first and a last piece, whatever the string.
        if key not in (0, -1) or type(key) is not int or separator is None:
            raise Unrecordable("split")
        return _changed(self._of, "split", (key, *self._arguments))

    __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __str__ = __contains__ = _refuse("split")


class RecordedObject(dict[Any, Any]):
    """An object of a conversation, which may only become JSON."""

    def __init__(self, recorder: Recorder, value: dict[Any, Any], slot: Slot, source: Source | None) -> None:
        super().__init__()
        self._recorder, self._value, self._slot, self._source = recorder, value, slot, source

    def __bool__(self) -> bool:
        # Empty objects are no leaves.
        return True


for _name in {*dir(dict), "__bool__"} - {*dir(object), "__bool__"} | _REFUSED_OF_OBJECT | {"__str__"}:
    setattr(RecordedObject, _name, _refuse_looking)


def _is_plain(arguments: tuple[Any, ...]) -> bool:
    return all(type(a) is str or a is None or (type(a) is tuple and _is_plain(a)) for a in arguments)


def _recorded_test(method: str) -> Callable[..., bool]:
    function = bool if method == "__bool__" else getattr(str, method)

    def test(self: Recorded, *arguments: Any) -> bool:
        result = function(self._value, *arguments) if _is_plain(arguments) else None
        if not isinstance(result, bool):
            raise Unrecordable(method)
        self._recorder.guards.append(Guard(self._slot, function, arguments, result))
        return result

    return test


def _changed(value: Recorded, name: str, arguments: tuple[Any, ...]) -> str:
    """Record a change. What it makes is a leaf only if it is not empty: nothing has no place in the text."""
    number, changes = value._slot
    slot, made = Slot(number, (*changes, (name, arguments))), _change(value._value, name, arguments)
    # A leaf has more than white space, so `strip` leaves some of it.
    if changes or name == "split" or any(arguments):
        value._recorder.guards.append(Guard(slot, bool, (), bool(made)))
    return value._recorder.record(made, slot, value._source) if made else attach("", ())


def _recorded_change(method: str) -> Callable[..., str]:
    def change(self: Recorded, *arguments: Any) -> str:
        if not _is_plain(arguments):
            raise Unrecordable(method)
        return _changed(self, method, arguments)

    return change


for _name in ("startswith", "endswith", "__contains__", "__eq__", "__ne__", "__bool__"):
    setattr(Recorded, _name, _recorded_test(_name))
for _name in ("strip", "lstrip", "rstrip"):
    setattr(Recorded, _name, _recorded_change(_name))


def is_recordable(tree: Any) -> bool:
    """Whether a recorder can follow leaves through all operations of a template."""
    from jinja2 import nodes

    macros = {macro.name for macro in tree.find_all(nodes.Macro)}

    def calls_known(call: Any) -> bool:
        called = call.node
        if isinstance(called, nodes.Getattr):
            return called.attr in METHODS
        return getattr(called, "name", "") in GLOBALS | macros

    def is_constant(node: Any) -> bool:
        given = [*node.args, *(keyword.value for keyword in node.kwargs)]
        return node.dyn_args is None and node.dyn_kwargs is None and all(isinstance(g, nodes.Const) for g in given)

    def is_known_filter(node: Any) -> bool:
        return node.name in FILTERS or (node.name in CONSTANT_FILTERS and is_constant(node))

    return (
        tree.find((nodes.FilterBlock, nodes.CallBlock)) is None
        and all(
            f.name in FILTERS or (f.name in CONSTANT_FILTERS and is_constant(f)) for f in tree.find_all(nodes.Filter)
        )
        and all(t.name in TESTS or (t.name in CONSTANT_TESTS and is_constant(t)) for t in tree.find_all(nodes.Test))
        and all(isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod))
        and all(map(calls_known, tree.find_all(nodes.Call)))
    )
