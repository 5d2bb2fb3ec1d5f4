"""What a template does with the contents of a conversation, recorded once and repeated for others like it.

Rendering a chat template takes 20 to 250 us, tokenizing its output 5. But a template does the same with every
conversation of the same roles, except where it looks at a content. So contents are given to it as
`Recorded` strings, which write down every question that is asked of them (does it start with ..., is it
empty) and every change made to them (strip). The output is then a list of pieces, constants and contents, that
holds for every conversation whose contents answer the questions alike. An operation that is not known here
raises `Unrecordable`: such a template is rendered anew each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["OPEN", "Piece", "Question", "Recorder", "Slot", "Unrecordable", "value_of"]

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the number of a recorded string in rendered text: characters of no language."""
_MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Unrecordable(Exception):
    """The template does something with a content that is not followed here."""


class Slot(NamedTuple):
    """A content by its number, and the methods that were called on it one after the other."""

    number: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()


Piece = str | Slot
"""Of a rendered text: a constant, or a content."""


class Question(NamedTuple):
    """What was asked of a content, and the answer."""

    slot: Slot
    ask: Callable[..., Any]
    """A function of the content and the arguments: `str.startswith`, `bool`."""
    arguments: tuple[Any, ...]
    answer: bool


def value_of(slot: Slot, contents: list[str]) -> str:
    """The content of a slot, changed as it was when it was recorded."""
    value = contents[slot.number]
    for method, arguments in slot.changes:
        value = getattr(value, method)(*arguments)
    return value


class Recorder:
    """Hands out recorded strings, and reads rendered text as pieces."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self._slots: list[Slot] = []

    def record(self, slot: Slot, value: str) -> Recorded:
        """A string that stands for a content, whose value is used to answer questions."""
        self._slots.append(slot)
        recorded = Recorded(f"{OPEN}{len(self._slots) - 1}{CLOSE}")
        recorded.recorder, recorded.slot, recorded.value = self, slot, value
        return recorded

    def pieces(self, rendered: str) -> list[Piece]:
        """Constants and contents of a rendered text."""
        parts = _MARK.split(rendered)
        pieces: list[Piece] = []
        for number, part in enumerate(parts):
            if number % 2:
                pieces.append(self._slots[int(part)])
            elif part:
                pieces.append(part)
        return pieces


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: str, *_: Any, **__: Any) -> Any:
        raise Unrecordable(name)

    return method


class _Guarded(str):
    """A string with marks in it: nothing may be asked of it but what a subclass allows."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return _Guarded(str.__add__(self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _Guarded(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        return str.__str__(self)


_KEPT = {
    "__add__",
    "__class__",
    "__delattr__",
    "__dir__",
    "__doc__",
    "__getattribute__",
    "__getstate__",
    "__init__",
    "__init_subclass__",
    "__new__",
    "__radd__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__setattr__",
    "__sizeof__",
    "__str__",
    "__subclasshook__",
}
for _name in {*dir(str), "__bool__", "__rmod__", "__rmul__"} - _KEPT:
    setattr(_Guarded, _name, _refuse(_name))


class Recorded(_Guarded):
    """The content of a message: its text is a mark, and what is asked of it is written down."""

    recorder: Recorder
    slot: Slot
    value: str


def _is_plain(arguments: tuple[Any, ...]) -> bool:
    return all(type(a) is str or a is None or (type(a) is tuple and _is_plain(a)) for a in arguments)


def _asks(method: str) -> Callable[..., bool]:
    function = bool if method == "__bool__" else getattr(str, method)

    def ask(self: Recorded, *arguments: Any) -> bool:
        if not _is_plain(arguments):
            raise Unrecordable(method)
        answer = function(self.value, *arguments)
        if not isinstance(answer, bool):
            raise Unrecordable(method)
        self.recorder.questions.append(Question(self.slot, function, arguments, answer))
        return answer

    return ask


def _changes(method: str) -> Callable[..., Recorded]:
    def change(self: Recorded, *arguments: Any) -> Recorded:
        if not _is_plain(arguments):
            raise Unrecordable(method)
        slot = Slot(self.slot.number, (*self.slot.changes, (method, arguments)))
        return self.recorder.record(slot, getattr(self.value, method)(*arguments))

    return change


for _name in ("startswith", "endswith", "__contains__", "__eq__", "__ne__", "__bool__"):
    setattr(Recorded, _name, _asks(_name))
for _name in ("strip", "lstrip", "rstrip"):
    setattr(Recorded, _name, _changes(_name))
