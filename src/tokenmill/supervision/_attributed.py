"""Strings that know which message each of their characters came from.

A chat template gets the strings of a conversation as `Attributed` strings. They behave like the strings they are, and
keep their sources through slicing, joining, stripping, splitting and replacing; so the rendered text says which of its
characters are the assistant's own, and which ones the template wrote. Other operations return plain strings, whose
characters count as the template's.

`Event`s have no characters: where a message begins in the output of a loop, and where a `{% generation %}` tag was.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

__all__ = [
    "Attributed",
    "AttributedDict",
    "AttributedList",
    "Event",
    "Guarded",
    "Part",
    "Source",
    "Unrecordable",
    "attach",
    "attribute",
    "concat",
    "join",
    "parts_of",
]


class Source(NamedTuple):
    """The number of a message, and its field: `content`, `tool_calls`, `reasoning_content`, ..."""

    message: int
    field: str


class Event(NamedTuple):
    """Something that happened at a place of the text.

    `begin`: the loop with this number got to a message. `end`: the loop ended. `open` and `close`: a generation tag.
    """

    kind: str
    loop: int = 0
    message: int = -1


class Part(NamedTuple):
    """Characters with one source, or an event between two characters."""

    start: int
    stop: int
    what: Any
    """A `Source` or an `Event`."""


make_part = partial(tuple.__new__, Part)
"""Makes a part of a tuple, in a third of the time of its constructor."""


class Attributed(str):
    """A string with the sources of its characters, in order.

    Its own attributes begin with an underscore, which templates cannot read.
    """

    __slots__ = ("_parts",)
    _parts: tuple[Part, ...]

    def _cut(self, start: int, stop: int) -> Attributed:
        parts = []
        for first, last, what in self._parts:
            if last < start or first > stop:
                continue
            begin, end = max(first, start) - start, min(last, stop) - start
            if begin < end or first == last:
                parts.append(Part(begin, end, what))
        return attach(str.__getitem__(self, slice(start, stop)), parts)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Attributed:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Attributed:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self._cut(at, at + 1)
        start, stop, step = key.indices(len(self))
        return self._cut(start, max(start, stop)) if step == 1 else str.__getitem__(self, key)

    def __iter__(self) -> Any:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix) if prefix and self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - len(suffix) if suffix and self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = str.splitlines(self, True)
        kept = self._locate(lines)
        bare = str.splitlines(self)
        return kept if keepends else [line[: len(end)] for line, end in zip(kept, bare, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._locate(list(str.partition(self, sep)))
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._locate(list(str.rpartition(self, sep)))
        return head, middle, tail

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old or old not in self:
            return self if old else str.replace(self, old, new, count)
        pieces: list[str] = []
        for piece in self.split(old, count):
            pieces += (new, piece)
        return concat(pieces[1:])

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))

    def join(self, values: Iterable[str], /) -> str:
        return join(values, self)

    def _changed(self, value: str) -> str:
        """Attach the parts to a string whose characters correspond to the old ones, if their number says so."""
        return attach(value, self._parts) if len(value) == len(self) else value

    def _locate(self, pieces: list[str], sep: str | None = None) -> list[str]:
        """Find pieces that follow each other in this string, with separators or white space between them."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            start = str.index(self, piece, at)
            at = start + len(piece) + (len(sep) if sep else 0)
            found.append(self._cut(start, start + len(piece)))
        return found


class Unrecordable(Exception):
    """A template does something with a guarded string that cannot be recorded."""


class Guarded(Attributed):
    """A string that stands for others. Only joining is allowed; a recorder refuses everything else (`_recorder.py`)."""

    __slots__ = ()


class AttributedDict(dict[Any, Any]):
    """An object of a message; filters that turn it into text ask for its source."""

    _source: Source


class AttributedList(list[Any]):
    """An array of a message."""

    _source: Source


def attach(value: str, parts: Iterable[Part]) -> Attributed:
    """Attach parts to a string."""
    made = Attributed(value)
    made._parts = tuple(parts)
    return made


def parts_of(value: str) -> tuple[Part, ...]:
    """Return the parts of a string; a plain one has none."""
    return value._parts if isinstance(value, Attributed) else ()


def attribute(value: Any, source: Source) -> Any:
    """Copy a value of a message, with all strings in it attributed to the source."""
    if type(value) is str:
        return attach(value, (Part(0, len(value), source),) if value else ())
    if isinstance(value, dict):
        object = AttributedDict((attribute(key, source), attribute(inner, source)) for key, inner in value.items())
        object._source = source
        return object
    if isinstance(value, (list, tuple)):
        array = AttributedList(attribute(inner, source) for inner in value)
        array._source = source
        return array
    return value


def concat(pieces: Iterable[str]) -> Attributed:
    """Join strings with their parts."""
    pieces = list(pieces)
    parts: list[Part] = []
    length = 0
    made_of: type[Attributed] = Attributed
    for piece in pieces:
        if type(piece) is not str and isinstance(piece, Attributed):
            if type(piece) is not Attributed:
                made_of = Guarded
            for start, stop, what in piece._parts:
                parts.append(make_part((start + length, stop + length, what)))
        length += str.__len__(piece)
    made = made_of("".join(pieces))
    made._parts = tuple(parts)
    return made


def join(values: Iterable[Any], separator: str = "") -> Attributed:
    """Join values with a separator, as the filter of Jinja does."""
    pieces: list[str] = []
    for value in values:
        pieces += (separator, str(value))
    return concat(pieces[1:])
