"""Tokens on a terminal: their text in alternating colours, and their ids.

The text of a document is untrusted: characters that would move the cursor or change the terminal are shown as
symbols. A byte-level token may be a part of a character, so tokens are grouped until their bytes are whole characters.
Tokens that are trained on are green; without colour, a double bar precedes them.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tokenmill.engines.decoder import Decoder
from tokenmill.formatting import plural, show_safely

__all__ = ["DrawnIds", "DrawnTokens", "Excerpt", "TokenGroup", "group_tokens"]

PIECE_COLUMNS = 18
LAST_GROUPS = 2
MARGIN = 4 * LAST_GROUPS
"""A character has up to four bytes, so up to four tokens: among this many are as many whole groups."""
SHADES = ("color(16) on color(117)", "color(16) on color(222)")
"""Light blue and light gold; a terminal of 16 colours shows two different ones, too."""
SHADES_TRAINED = ("color(16) on color(120)", "color(16) on color(157)")
SPECIAL = "bold color(231) on color(90)"
SPECIAL_TRAINED = "bold color(231) on color(22)"


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens whose bytes together are whole characters; mostly a single token."""

    ids: tuple[int, ...]
    text: str
    special: bool = False
    trained: bool = False


def group_tokens(
    ids: Sequence[int], decoder: Decoder, specials: set[int], trained: Sequence[int] | None = None
) -> list[TokenGroup]:
    """Join tokens that share a character, so that it shows as itself and not as U+FFFD.

    `trained` is the loss mask of a supervised store.
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


@dataclass(frozen=True)
class Excerpt:
    """The first tokens of a document, the last ones, and how many are hidden between them."""

    head: list[TokenGroup]
    tail: list[TokenGroup]
    hidden: int

    @classmethod
    def cut(cls, group: Callable[[int, int], list[TokenGroup]], num_tokens: int, most: int) -> Excerpt:
        """Keep about `most` tokens; `group` groups a range of the document, which is never read whole."""
        if num_tokens <= most + MARGIN:
            return cls(group(0, num_tokens), [], 0)
        head = group(0, most + MARGIN)
        ends = accumulate(len(some.ids) for some in head)
        head = head[: sum(end <= most for end in ends)]
        tail = group(num_tokens - MARGIN, num_tokens)[-LAST_GROUPS:]
        return cls(head, tail, num_tokens - sum(len(some.ids) for some in (*head, *tail)))


class DrawnTokens:
    """The text of tokens, drawn with the colours that the console has."""

    def __init__(self, excerpt: Excerpt) -> None:
        self._excerpt = excerpt

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        yield from self._draw(self._excerpt.head, colour, options.max_width)
        if self._excerpt.hidden:
            yield Text(f"... {plural(self._excerpt.hidden, 'more token')} ...", style="dim")
            yield from self._draw(self._excerpt.tail, colour, options.max_width)

    def _draw(self, groups: list[TokenGroup], colour: bool, width: int) -> Iterator[Text]:
        """Break lines between tokens, because breaking them at spaces would hide the spaces."""
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
        yield text


class DrawnIds(DrawnTokens):
    """Tokens with their ids below, as many per line as fit."""

    def _draw(self, groups: list[TokenGroup], colour: bool, width: int) -> Iterator[Text]:
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
    """The lines of a text, safe for a terminal, with a symbol at each line end."""
    *ended, last = map(show_safely, text.split("\n"))
    return [*(f"{line}↵" for line in ended), last]


def _with_base(text: str) -> str:
    """Put a circle before a combining mark, which would otherwise combine with the bar before it."""
    return f"◌{text}" if text and unicodedata.category(text[0]).startswith("M") else text


def _shorten(text: str, columns: int) -> str:
    """Cut a text by its width on a terminal, where some characters take two columns."""
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1) + "…"
