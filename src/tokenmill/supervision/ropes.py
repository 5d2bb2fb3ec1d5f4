"""Texts as pieces, constants and contents: comparing them says something of all texts of the same pieces.

A text that is known is one constant, so everything here holds for plain strings too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from tokenmill.supervision.recording import Piece, value_of

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

    def fill(self, contents: list[str]) -> tuple[str, list[int]]:
        """The text with contents in their places, and where each piece starts."""
        values = [piece if type(piece) is str else value_of(piece, contents) for piece in self.pieces]  # type: ignore[arg-type]
        return "".join(values), [0, *accumulate(map(len, values))]
