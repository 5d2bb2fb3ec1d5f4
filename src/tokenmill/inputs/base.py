"""What a kind of input is: it turns what a user names into the files that stand behind it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from tokenmill.progress import Display

__all__ = ["ALL", "Backend", "Expansion", "Extent", "Input"]


class Extent(msgspec.Struct, frozen=True):
    """How much of the inputs is wanted; who does not know how to give less gives all."""

    documents: int | None = None
    """Files that have so many documents suffice."""
    is_sample: bool = False
    """A few files that stand for all suffice."""


ALL = Extent()


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
    weight: float = 1.0
    """In a sample: how many times its own size it stands for."""


class Expansion(NamedTuple):
    """The files behind one thing that a user named."""

    inputs: list[Input]
    is_named: bool
    """Whether the user named this very file; one that is named twice is refused, one that is found twice is not."""


class Backend(Protocol):
    """A module of this folder: files of one kind."""

    def expand(self, item: str, display: Display, extent: Extent) -> Expansion:
        """The files that an item stands for, sorted; a `UsageError` where there is none."""
