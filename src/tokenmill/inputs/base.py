"""What a kind of input is: it turns what a user names into the files that stand behind it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from tokenmill.progress import Display

__all__ = ["Backend", "Expansion", "Input"]


class Input(msgspec.Struct, frozen=True):
    """One input: where it is read, and what a store calls it."""

    path: str
    """A file of this machine, or the URL of one that is read where it is."""
    name: str | None = None
    """Its name in the manifest; None: its path below the folder that all such inputs have in common."""
    text_key: str | None = None
    """The field that holds the text, where whoever publishes the input says so."""
    origin: str | None = None
    """What it was fetched from, down to the revision: `hf://datasets/owner/name@5f2c91...`."""


class Expansion(NamedTuple):
    """The files behind one thing that a user named."""

    inputs: list[Input]
    is_named: bool
    """Whether the user named this very file; one that is named twice is refused, one that is found twice is not."""


class Backend(Protocol):
    """A module of this folder: files of one kind."""

    def expand(self, item: str, display: Display, limit: int | None) -> Expansion:
        """The files that an item stands for, sorted; a `UsageError` where there is none.

        With a limit, those suffice that have so many documents; who does not know may give all.
        """
