"""Globs as regular expressions, for names that are not on this machine's disk (`glob.translate` needs Python 3.13)."""

from __future__ import annotations

import fnmatch
import re

__all__ = ["translate"]

WILDCARDS = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def translate(pattern: str) -> re.Pattern[str]:
    """Compile a glob: `*` stays within a folder, `**` reaches everything below one."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])", pattern)
    return re.compile("".join(WILDCARDS.get(piece) or _translate_piece(piece) for piece in pieces))


def _translate_piece(piece: str) -> str:
    """Translate plain characters, or a set such as `[!a-c]`, which matches no slash."""
    regex = fnmatch.translate(piece).removeprefix("(?s:").rpartition(")")[0]
    return f"(?!/){regex}" if piece.startswith("[") else regex
