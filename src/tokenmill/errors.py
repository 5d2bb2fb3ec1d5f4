"""The exceptions that tokenmill raises for mistakes and damage that a user can cause.

    TokenmillError
    ├── UsageError                  a flag, argument or combination that cannot work
    ├── DataError                   an input that cannot be read: has a path and a position
    ├── StoreError                  a store that is damaged, foreign, locked or unfinished
    └── MissingDependencyError      a package that an extra would install

Every message is one sentence with the value, what was expected and what to do next. The
command line prints it without a traceback.
"""

from __future__ import annotations

__all__ = ["DataError", "MissingDependencyError", "StoreError", "TokenmillError", "UsageError"]


class TokenmillError(Exception):
    """Base class of all errors of tokenmill; the message is one sentence."""


class UsageError(TokenmillError):
    """A flag, an argument or a combination of them that cannot work."""


class DataError(TokenmillError):
    """An input that cannot be read or holds a document that cannot be tokenized.

    `place` is where in the input: `line 4`, `row 4` of Parquet, `element 4` of a JSON array, or `byte 81`.
    """

    def __init__(self, path: str, reason: str, place: str | None = None) -> None:
        self.path = path
        self.reason = reason
        self.place = place
        where = path if place is None else f"{path} {place}"
        super().__init__(f"{where}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (DataError, (self.path, self.reason, self.place))


class StoreError(TokenmillError):
    """A store that is damaged, locked, unfinished or of another format."""


class MissingDependencyError(TokenmillError):
    """A package that is not installed; the message names the extra that has it."""

    def __init__(self, what: str, extra: str) -> None:
        self.what = what
        self.extra = extra
        super().__init__(f"{what} needs a package that is not installed: pip install 'tokenmill[{extra}]'")

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingDependencyError, (self.what, self.extra))
