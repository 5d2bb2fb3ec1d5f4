"""Texts as pieces, constants and contents: comparing them says something of all texts of the same pieces.

A text that is known is one constant, so everything here holds for plain strings too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from tokenmill.supervision.recording import Piece, Slot, value_of

__all__ = ["Place", "Rope"]


class Place(NamedTuple):
    """A place between characters: a piece, and characters of it before the place."""

    piece: int
    offset: int


class Rope:
    """A text in pieces, no two constants side by side."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Piece]) -> None:
        merged: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            elif piece != "":
                merged.append(piece)
        self.pieces = merged

    def find_end_of(self, prefix: Rope) -> Place | None:
        """Where another text ends in this one; None if this one does not start with it."""
        if not prefix.pieces:
            return Place(0, 0)
        *whole, last = prefix.pieces
        if self.pieces[: len(whole)] != whole or len(self.pieces) <= len(whole):
            return None
        here = self.pieces[len(whole)]
        if isinstance(last, str) and isinstance(here, str) and here.startswith(last):
            return Place(len(whole), len(last))
        return Place(len(whole) + 1, 0) if last == here else None

    def without_end(self, end: str) -> Rope | None:
        """The text without a constant at its end; None if it does not end so."""
        if not end:
            return self
        last = self.pieces[-1] if self.pieces else None
        if not isinstance(last, str) or not last.endswith(end):
            return None
        return Rope([*self.pieces[:-1], last[: -len(end)]])

    def before(self, place: Place) -> str:
        """The constant characters right before a place, as far as they go."""
        piece, offset = place
        if offset == 0:
            piece, offset = piece - 1, -1
        text = self.pieces[piece] if piece >= 0 else ""
        if isinstance(text, Slot):
            return ""
        return text if offset < 0 else text[:offset]

    def back(self, place: Place, count: int) -> Place:
        """The place that many constant characters earlier."""
        if place.offset:
            return Place(place.piece, place.offset - count)
        return Place(place.piece - 1, len(self.pieces[place.piece - 1]) - count)

    def fill(self, contents: list[str]) -> tuple[str, list[int]]:
        """The text with contents in their places, and where each piece starts."""
        values = [piece if type(piece) is str else value_of(piece, contents) for piece in self.pieces]  # type: ignore[arg-type]
        return "".join(values), [0, *accumulate(map(len, values))]
