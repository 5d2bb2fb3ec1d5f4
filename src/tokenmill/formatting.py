"""Format numbers and texts for people: bytes, counts, seconds, plain tables, and text that is safe for a terminal."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable

__all__ = ["format_bytes", "format_count", "format_facts", "format_seconds", "plural", "shorten", "show_safely"]

JOINERS = "\u200c\u200d"
NAME_COLUMNS, COLUMNS = 12, 80


def format_bytes(size: float) -> str:
    """`1.4 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_count(count: float) -> str:
    """`12.3M`."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 999.5:
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def format_seconds(seconds: float) -> str:
    """`1:02:03`, or `02:03` below an hour."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def plural(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten(text: str, most: int) -> str:
    """Shorten a text to `most` characters; a shortened one ends in an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def format_facts(rows: Iterable[tuple[str, str]], notes: Iterable[str] = ()) -> str:
    """Names and values in two columns of plain text; notes are wrapped at 80 columns."""
    lines = [f"{name:<{NAME_COLUMNS}} {value}" for name, value in rows]
    indent = " " * (NAME_COLUMNS + 1)
    first = f"{'note':<{NAME_COLUMNS}} "
    lines += [textwrap.fill(note, COLUMNS, initial_indent=first, subsequent_indent=indent) for note in notes]
    return "\n".join(lines)


def show_safely(text: str) -> str:
    """Replace control and direction characters by visible symbols, so that no text can take over a terminal."""
    return text if text.isprintable() else "".join(_symbol(character) for character in text)


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs":
        return character
    return f"<{code:04X}>"
