"""Patterns of paths in a repository, which mean what they mean to the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

__all__ = ["fixed_folder", "has_magic", "is_hidden", "match"]


def has_magic(path: str) -> bool:
    """Whether a path is a pattern."""
    return any(character in path for character in "*?[")


def fixed_folder(pattern: str) -> str:
    """The folder that a pattern does not leave, so that no more than this has to be listed."""
    fixed = []
    for part in pattern.split("/")[:-1]:
        if has_magic(part):
            break
        fixed.append(part)
    return "/".join(fixed)


def is_hidden(path: str) -> bool:
    """Whether a path, or a folder on it, begins with a dot, or a folder with two underscores."""
    return _num_hidden(path.split("/")) > 0


def match(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern means: `*` within one name, `**` for any folders, a folder for all that is in it.

    What is hidden has to be asked for: a pattern has as many parts that begin with a dot as the path.
    """
    parts = pattern.split("/")
    asked = _num_hidden(parts)
    found = []
    for path in paths:
        names = path.split("/")
        if (path.startswith(f"{pattern}/") or _matches(names, parts)) and _num_hidden(names) == asked:
            found.append(path)
    return found


def _num_hidden(parts: Sequence[str]) -> int:
    return sum(part.startswith(".") for part in parts) + sum(part.startswith("__") for part in parts[:-1])


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        if len(parts) == 1:
            return True
        return _matches(names, parts[1:]) or _matches(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
