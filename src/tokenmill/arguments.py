"""Checks of what a user passes: each returns the value as it should be, or says in a sentence what is wrong with it.

Numbers of numpy are numbers here and bools are not: `rank=True` is a mistake, and `rank=np.int64(1)` is none.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError

__all__ = ["MOST_ROWS", "flag", "local_path", "name_kind", "one_of", "path_of", "positive", "show", "whole_number"]

LARGEST = 1 << 64
"""What is larger is no number of anything here, and might be too long to be shown."""
MOST_ROWS = 1 << 62
"""Rows are counted over all epochs in 64 bits, with some to spare for a batch behind the last one."""


def show(value: Any, most: int = 80) -> str:
    """A value in an error message: on one line, cut where it is long, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python shows neither a number of 5,000 digits nor lists 5,000 deep.
        return f"a very large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def name_kind(value: Any) -> str:
    """A value and its type, for one that should have another."""
    return f"{show(value)} ({type(value).__name__})"


def whole_number(value: Any, name: str, least: int = -LARGEST, most: int = LARGEST) -> int:
    """A plain integer, from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        is_large = number is not None and number > most
        bound = f", at most {most}" if is_large else f", at least {least}" if least > -LARGEST else ""
        raise UsageError(f"{name} {show(value)} must be a whole number{bound}")
    return number


def positive(value: Any, name: str, most: float = LARGEST) -> Any:
    """A number above 0, whole or not, up to `most`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        bound = f", at most {most}" if is_number and value > most else ""
        raise UsageError(f"{name} {show(value)} must be a number above 0{bound}")
    return value


def flag(value: Any, name: str) -> bool:
    """True or False, numpy's included."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise UsageError(f"{name} {show(value)} must be True or False")
    return bool(value)


def one_of(value: Any, choices: Iterable[str], name: str) -> str:
    """One of some words."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} {show(value)} is unknown; expected {', '.join(known)}")
    return value


def path_of(value: Any, what: str) -> str:
    """A path as text; anything else is said not to be `what`."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise UsageError(f"{name_kind(value)} is not {what}")
    if not path or "\0" in path:
        raise UsageError(f"{show(value)} is not {what}: no file can have this name")
    return path


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(value: str | os.PathLike[str], name: str) -> Path:
    """A path of this machine; a URL would become a folder that is called `s3:`."""
    found = _URL.match(os.fspath(value))
    if found:
        raise UsageError(f"{name} {value}: {found[1]}:// is not written to; expected a path of this machine")
    return Path(value)
