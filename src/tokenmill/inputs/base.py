"""The seam of inputs: a backend turns an item that a user names into the files that a run reads."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from tokenmill.display import Display

__all__ = ["Backend", "Expansion", "Extent", "Input"]


class Extent(msgspec.Struct, frozen=True):
    """How much of the inputs a command needs. A backend that fetches nothing may ignore it and return all files."""

    documents: int | None = None
    """Files with this many documents suffice."""
    is_sample: bool = False
    """A few files that represent all of them suffice."""


class Input(msgspec.Struct, frozen=True):
    """One input file."""

    path: str
    """A file of this machine, or the URL of an object that is read in place."""
    name: str | None = None
    """Its name in the manifest; None: its path below the folder that all such inputs have in common."""
    text_key: str | None = None
    """The field that holds the text, if the publisher of the data says so."""
    origin: str | None = None
    """Where the file was fetched from, with the revision: `hf://datasets/owner/name@5f2c91...`."""
    weight: float = 1.0
    """In a sample: how many times its own size it represents."""
    folder: str | None = None
    """The directory that was searched for it; None if it was named, or a glob matches it."""
    is_chosen: bool = False
    """Whether it was found in a directory, and also named or matched by a glob."""


class Expansion(NamedTuple):
    """The files that one item stands for."""

    inputs: list[Input]
    is_named: bool
    """Whether the item is the name of a single file. Naming a file twice is an error; finding it twice is not."""


class Backend(Protocol):
    """A module of this folder that finds one kind of files."""

    def expand(self, item: str, display: Display, extent: Extent) -> Expansion:
        """The files that an item stands for, sorted; raises a `UsageError` if there is none."""
