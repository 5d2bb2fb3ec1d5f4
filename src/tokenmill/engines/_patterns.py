"""Which characters a split pattern can match one after the other.

A pattern is read as an automaton with a state for each place that matches one character (Glushkov's construction). If
no state that matches `a` can be followed by one that matches `b`, no match contains `ab`. Repetitions are taken as
unbounded, so the answer errs towards more pairs. Whatever is not understood raises `UnknownPatternError`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.engines._characters import (
    HAN,
    LETTERS,
    LOWER,
    MARKS,
    NUM_GROUPS,
    OTHER,
    REMOTE,
    SIGNS,
    SPACES,
    UPPER,
    WILD,
)

__all__ = ["Pairs", "UnknownPatternError", "read_pattern"]

LONGEST = 2000
"""The time to read a pattern can grow with the square of its length."""
Group = frozenset[int]
Pairs = npt.NDArray[np.bool_]
"""A table of two groups, the first and the second character."""

_UNKNOWN: Group = frozenset([WILD, REMOTE])
_FOREIGN: Group = frozenset([LOWER, UPPER, OTHER, HAN, MARKS, SIGNS, WILD, REMOTE])
ALL: Group = frozenset(range(128)) | _FOREIGN
_DIGITS, _WORD = frozenset(b"0123456789"), frozenset(b"_0123456789")
_FLAGS = {"(?:": False, "(?i:": True}
_LOOKS = ("(?!", "(?=")


class UnknownPatternError(ValueError):
    """A pattern with something that this module does not understand."""


class _Set(NamedTuple):
    """The groups of a class of characters: those it may have members of, and those it has all members of."""

    may: Group
    must: Group

    def __or__(self, other: _Set) -> _Set:
        return _Set(self.may | other.may, self.must | other.must)

    def inverted(self) -> _Set:
        return _Set(ALL - self.must, ALL - self.may)


class _Place(NamedTuple):
    """A place of a pattern that matches one character, or looks at the next one if `looks`."""

    characters: _Set
    looks: bool
    branch: int


@dataclass
class _Fragment:
    """A part of a pattern: the places where a match of it begins and ends, and whether it can be empty."""

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    is_empty: bool = True


class _Pattern(NamedTuple):
    """What one split pattern does: `joins[a, b]` if a match can contain ab; `covers` has what is always matched."""

    joins: Pairs
    covers: Group


@lru_cache(maxsize=64)
def read_pattern(pattern: str) -> _Pattern:
    """Read a regular expression as Oniguruma, fancy-regex and tiktoken understand it."""
    if len(pattern) > LONGEST:
        raise UnknownPatternError(f"it has more than {LONGEST:,} characters")
    try:
        return _PatternReader(pattern).read()
    except RecursionError:
        raise UnknownPatternError("it is nested too deeply") from None


class _PatternReader:
    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0
        self._places: list[_Place] = []
        self._follow: set[tuple[int, int]] = set()
        self._possessive: set[int] = set()
        self._branch = 0

    def read(self) -> _Pattern:
        whole = self._choice(folds=False, is_top=True)
        if self._at < len(self._text):
            raise UnknownPatternError(f"{self._text[self._at]!r} is not expected")
        looking = {i for i, place in enumerate(self._places) if place.looks}
        if whole.is_empty or whole.first & looking:
            raise UnknownPatternError("it can match nothing, or looks ahead first")
        joins = np.zeros((NUM_GROUPS, NUM_GROUPS), np.bool_)
        for left, right in self._follow:
            if left in looking:
                raise UnknownPatternError("it goes on after looking ahead")
            # Where the next character decides, a match may be another one if the text ends there.
            after = ALL if right in looking else self._places[right].characters.may
            joins[np.ix_(sorted(self._places[left].characters.may), sorted(after))] = True
        return _Pattern(joins, self._covered(whole))

    def _covered(self, whole: _Fragment) -> Group:
        """Return what is matched wherever it stands, if only by itself."""
        covered: set[int] = set()
        for place in whole.first & whole.last:
            greedy = [i for i in self._possessive - {place} if self._places[i].branch == self._places[place].branch]
            taken = frozenset().union(*(self._places[i].characters.may for i in greedy))
            covered |= self._places[place].characters.must - taken
        return frozenset(covered)

    def _choice(self, *, folds: bool, is_top: bool = False) -> _Fragment:
        branches = [self._row(folds)]
        while self._take("|"):
            self._branch += is_top
            branches.append(self._row(folds))
        return _Fragment(
            set().union(*(branch.first for branch in branches)),
            set().union(*(branch.last for branch in branches)),
            any(branch.is_empty for branch in branches),
        )

    def _row(self, folds: bool) -> _Fragment:
        row = _Fragment()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._repeated(folds)
            self._follow |= {(left, right) for left in row.last for right in part.first}
            if row.is_empty:
                row.first |= part.first
            row.last = row.last | part.last if part.is_empty else part.last
            row.is_empty &= part.is_empty
        return row

    def _repeated(self, folds: bool) -> _Fragment:
        start = len(self._places)
        part = self._atom(folds)
        found = re.compile(r"([?*+]|\{(\d+)(,?)(\d*)\})([?+]?)").match(self._text, self._at)
        if not found:
            return part
        self._at = found.end()
        sign, least, comma, most, mode = found.groups()
        if least is not None and mode:
            raise UnknownPatternError(f"{found[0]!r} means different things to different libraries")
        if sign in ("*", "+") or comma or (least is not None and int(least) > 1) or most:
            self._follow |= {(left, right) for left in part.last for right in part.first}
        if mode == "+":
            self._possessive |= set(range(start, len(self._places)))
        return _Fragment(part.first, part.last, part.is_empty or sign in ("?", "*") or least == "0")

    def _atom(self, folds: bool) -> _Fragment:
        for opening, inner in _FLAGS.items():
            if self._take(opening):
                part = self._choice(folds=folds or inner)
                self._expect(")")
                return part
        if self._take("("):
            if not self._text.startswith("?", self._at):
                part = self._choice(folds=folds)
                self._expect(")")
                return part
            self._at -= 1
            for opening in _LOOKS:
                if self._take(opening):
                    characters = self._characters(folds)
                    self._expect(")")
                    return self._place(characters, looks=True)
            raise UnknownPatternError(f"{self._text[self._at : self._at + 4]!r} is not known")
        if self._take("$"):
            return self._place(_Set(ALL, frozenset()), looks=True)
        return self._place(self._characters(folds))

    def _place(self, characters: _Set, *, looks: bool = False) -> _Fragment:
        self._places.append(_Place(characters, looks, self._branch))
        number = len(self._places) - 1
        return _Fragment({number}, {number}, False)

    def _characters(self, folds: bool) -> _Set:
        """Read what matches one character."""
        if self._take("["):
            is_inverted = self._take("^")
            found = _Set(frozenset(), frozenset())
            while not self._take("]"):
                found |= self._member(folds)
            if not found.may:
                raise UnknownPatternError("it has an empty class")
            return found.inverted() if is_inverted else found
        if self._take("."):
            return _Set(ALL - {10}, ALL - {10})
        if self._text[self._at : self._at + 1] in tuple("^*+?{}])"):
            raise UnknownPatternError(f"{self._text[self._at]!r} is not expected")
        return self._class_or_literal(folds)

    def _member(self, folds: bool) -> _Set:
        """Read a member of a class: a character, a range, or another class."""
        if self._at >= len(self._text) or self._text[self._at] == "[" or self._text.startswith("&&", self._at):
            raise UnknownPatternError("a class ends without ], or has a class or && inside")
        started = self._at
        first = self._class_or_literal(folds)
        if self._text[self._at : self._at + 1] != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return first
        low = self._literal_at(started)
        self._at += 1
        started = self._at
        self._class_or_literal(folds)
        high = self._literal_at(started)
        if ord(high) < 128:
            return _literals(map(chr, range(ord(low), ord(high) + 1)), folds)
        ascii = _literals(map(chr, range(ord(low), 128)), folds)
        return _Set(ascii.may | _FOREIGN, ascii.must)

    def _literal_at(self, at: int) -> str:
        text = self._text[at : self._at]
        literal = {r"\r": "\r", r"\n": "\n", r"\t": "\t"}.get(text, text.removeprefix("\\"))
        if len(literal) != 1 or (text[0] == "\\" and literal.isalnum() and ord(literal) < 128 and text[1] not in "rnt"):
            raise UnknownPatternError(f"{text!r} cannot be the end of a range")
        return literal

    def _class_or_literal(self, folds: bool) -> _Set:
        if not self._take("\\"):
            character = self._text[self._at : self._at + 1]
            if not character:
                raise UnknownPatternError("it ends too early")
            self._at += 1
            return _literals([character], folds)
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in ("p", "P"):
            found = re.compile(r"\{(\w+)\}").match(self._text, self._at)
            if not found or found[1] not in _CATEGORIES:
                raise UnknownPatternError(f"{self._text[self._at - 2 : self._at + 8]!r} is not known")
            self._at = found.end()
            named = _CATEGORIES[found[1]]
            return named if letter == "p" else named.inverted()
        if letter.lower() in _CLASSES:
            named = _CLASSES[letter.lower()]
            return named if letter.islower() else named.inverted()
        if letter in ("r", "n", "t"):
            return _literals([{"r": "\r", "n": "\n", "t": "\t"}[letter]], folds)
        if not letter or letter.isalnum():
            raise UnknownPatternError(f"'\\{letter}' is not known")
        return _literals([letter], folds)

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) * is_there
        return is_there

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise UnknownPatternError(f"{text!r} is missing")


def _literals(characters: Iterable[str], folds: bool) -> _Set:
    may: set[int] = set()
    must: set[int] = set()
    for character in characters:
        spellings = {character, character.lower(), character.upper()} if folds else {character}
        if any(ord(letter) >= 128 for one in spellings for letter in one):
            if folds:
                raise UnknownPatternError(f"{character!r} is matched in either case")
            may |= _FOREIGN
            continue
        must |= {ord(one) for one in spellings}
        # In either case, U+017F is an s and U+212A a k.
        may |= {WILD} if folds else set()
    return _Set(frozenset(may | must), frozenset(must))


def _category(*prefixes: str, groups: Group = frozenset()) -> _Set:
    must = frozenset(c for c in range(128) if unicodedata.category(chr(c)).startswith(prefixes)) | groups
    return _Set(must | _UNKNOWN, must)


_CATEGORIES = {
    "L": _category("L", groups=frozenset(LETTERS)),
    "Lu": _category("Lu", groups=frozenset([UPPER])),
    "Ll": _category("Ll", groups=frozenset([LOWER])),
    "Lo": _category("Lo", groups=frozenset([OTHER, HAN])),
    "Lt": _category("Lt"),
    "Lm": _category("Lm"),
    "M": _category("M"),
    "N": _category("N"),
    "P": _category("P", groups=frozenset([MARKS])),
    "S": _category("S", groups=frozenset([SIGNS])),
    "Han": _Set(_FOREIGN, frozenset([HAN])),
}
_CLASSES = {
    "s": _Set(SPACES, SPACES),
    "d": _Set(_DIGITS | _UNKNOWN, _DIGITS),
    "w": _category("L", groups=frozenset(LETTERS) | _WORD),
}
