"""Checks of arguments: each returns the value in the right type, or raises a `UsageError`.

NumPy numbers are accepted, and bools are not: `rank=True` is an error, `rank=np.int64(1)` is not.
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

__all__ = [
    "MOST_ROWS",
    "flag",
    "is_remote",
    "local_path",
    "name_kind",
    "one_of",
    "path_of",
    "positive",
    "show",
    "whole_number",
]

LARGEST = 1 << 64
"""The largest count or size that is accepted; a much larger number would be too long to print."""
MOST_ROWS = 1 << 62
"""Rows are counted over all epochs in 64 bits, with space for a batch after the last one."""


def show(value: Any, most: int = 80) -> str:
    """Format any value for an error message: on one line, shortened if it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # repr fails for a number of 5,000 digits and for lists nested 5,000 deep
        return f"a very large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def name_kind(value: Any) -> str:
    """Format a value and its type, for a value of the wrong type."""
    return f"{show(value)} ({type(value).__name__})"


def whole_number(value: Any, name: str, least: int = -LARGEST, most: int = LARGEST) -> int:
    """Check for a whole number from `least` to `most`, and return it as an int."""
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
    """Check for a number above 0 and up to `most`, whole or not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        bound = f", at most {most}" if is_number and value > most else ""
        raise UsageError(f"{name} {show(value)} must be a number above 0{bound}")
    return value


def flag(value: Any, name: str) -> bool:
    """Check for True or False, as a bool of Python or NumPy."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise UsageError(f"{name} {show(value)} must be True or False")
    return bool(value)


def one_of(value: Any, choices: Iterable[str], name: str) -> str:
    """Check for one of some strings."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} {show(value)} is unknown; expected {', '.join(known)}")
    return value


def path_of(value: Any, what: str) -> str:
    """Check for a path and return it as text; an error says that the value is not `what`."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise UsageError(f"{name_kind(value)} is not {what}")
    if not path or "\0" in path:
        raise UsageError(f"{show(value)} is not {what}: no file can have this name")
    return path


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def is_remote(path: object) -> bool:
    """Return whether a path is the URL of an object store."""
    return isinstance(path, str) and path.startswith(("s3://", "gs://", "az://"))


def local_path(value: str | os.PathLike[str], name: str) -> Path:
    """Check for a local path; a URL would become a folder named `s3:`."""
    found = _URL.match(os.fspath(value))
    if found:
        raise UsageError(f"{name} {value}: {found[1]}:// is not written to; expected a path of this machine")
    return Path(value)
