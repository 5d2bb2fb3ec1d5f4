"""Tokens on a terminal: their text in alternating colours, and their ids.

A document's text is untrusted: characters that would move the cursor or change the terminal
are shown as symbols. A byte-level token may be half a character, so tokens are grouped until
their bytes are whole characters. Tokens that are trained on are green; without colour, the bar before
them is double.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tokenmill.engines.decoding import Decoder
from tokenmill.progress import show_safely

__all__ = ["DrawnIds", "DrawnTokens", "TokenGroup", "group_tokens"]

PIECE_COLUMNS = 18
SHADES = ("color(16) on color(117)", "color(16) on color(222)")
"""Light blue and light gold; in a terminal of 16 colours they stay two different ones."""
SHADES_TRAINED = ("color(16) on color(120)", "color(16) on color(157)")
SPECIAL = "bold color(231) on color(90)"
SPECIAL_TRAINED = "bold color(231) on color(22)"


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens whose bytes together are whole characters; mostly a single one."""

    ids: tuple[int, ...]
    text: str
    special: bool = False
    trained: bool = False


def group_tokens(
    ids: Sequence[int], decoder: Decoder, specials: set[int], trained: Sequence[int] | None = None
) -> list[TokenGroup]:
    """Join tokens that share a character, so that it shows as itself and not as U+FFFD.

    `trained` says of each token whether it has a loss, in a supervised store.
    """
    groups: list[TokenGroup] = []
    make = codecs.getincrementaldecoder("utf-8")
    open_ids: list[int] = []
    text, state = "", make("replace")

    def flush() -> None:
        nonlocal text, state, open_ids
        if open_ids:
            groups.append(TokenGroup(tuple(open_ids), text + state.decode(b"", final=True), trained=is_trained))
        text, state, open_ids = "", make("replace"), []

    is_trained = False
    for number, token in enumerate(ids):
        if token in specials:
            flush()
        is_trained = bool(trained is not None and trained[number])
        if token in specials:
            groups.append(TokenGroup((token,), decoder.piece(token), special=True, trained=is_trained))
            continue
        open_ids.append(token)
        text += state.decode(decoder.token_bytes(token))
        if not state.getstate()[0]:
            flush()
    flush()
    return groups


class DrawnTokens:
    """The text of tokens; drawn according to what the console can do."""

    def __init__(self, head: list[TokenGroup], tail: list[TokenGroup], hidden: int) -> None:
        self._head, self._tail, self._hidden = head, tail, hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        yield self._draw(self._head, colour, options.max_width)
        if self._hidden:
            yield Text(f"... {self._hidden:,} more tokens ...", style="dim")
            yield self._draw(self._tail, colour, options.max_width)

    def _draw(self, groups: list[TokenGroup], colour: bool, width: int) -> Text:
        """Lines are broken between tokens, because breaking at a space would swallow it."""
        text, column = Text(no_wrap=True), 0
        for number, group in enumerate(groups):
            style = _style(group, number)
            for part, line in enumerate(_show_lines(group.text)):
                bar = ("║" if group.trained else "│") if number and not part and not colour else ""
                line = _with_base(line) if bar else line
                for piece in chop_cells(line, width - 1) or [""]:
                    if part or column + cell_len(bar + piece) > width:
                        text.append("\n")
                        column, part = 0, 0
                    text.append(bar).append(piece, style=style)
                    column += cell_len(bar + piece)
                    bar = ""
        return text


class DrawnIds:
    """Pieces with their ids below, as many to a line as fit."""

    def __init__(self, head: list[TokenGroup], tail: list[TokenGroup], hidden: int) -> None:
        self._head, self._tail, self._hidden = head, tail, hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._draw(self._head, options.max_width)
        if self._hidden:
            yield Text(f"... {self._hidden:,} more tokens ...", style="dim")
            yield from self._draw(self._tail, options.max_width)

    def _draw(self, groups: list[TokenGroup], width: int) -> Iterator[Text]:
        above, below = Text(no_wrap=True), Text(no_wrap=True, style="dim")
        for number, group in enumerate(groups):
            piece = _with_base("".join(_show_lines(group.text)).replace(" ", "␣"))
            piece = _shorten(piece, PIECE_COLUMNS) or "∅"
            numbers = " ".join(map(str, group.ids))
            columns = max(cell_len(piece), len(numbers))
            if above and cell_len(above.plain) + columns > width:
                yield from (above, below)
                above, below = Text(no_wrap=True), Text(no_wrap=True, style="dim")
            above.append(set_cell_size(piece, columns), _style(group, number))
            above.append(" ")
            below.append(f"{numbers:<{columns}} ")
        yield from (above, below)


def _style(group: TokenGroup, number: int) -> str:
    if group.special:
        return SPECIAL_TRAINED if group.trained else SPECIAL
    return (SHADES_TRAINED if group.trained else SHADES)[number % 2]


def _show_lines(text: str) -> list[str]:
    """As `show_safely`, line by line; a line end is marked where it stands."""
    *ended, last = map(show_safely, text.split("\n"))
    return [*(f"{line}↵" for line in ended), last]


def _with_base(text: str) -> str:
    """A combining mark at the start would fall on whatever stands before; it gets a circle of its own."""
    return f"◌{text}" if text and unicodedata.category(text[0]).startswith("M") else text


def _shorten(text: str, columns: int) -> str:
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1) + "…"
