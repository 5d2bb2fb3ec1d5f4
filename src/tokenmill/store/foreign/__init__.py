"""Formats of other projects that `tokenmill.open` reads as they are, each in a file of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.store.foreign.base import Format, TokenFile
from tokenmill.store.foreign.datatrove import Datatrove
from tokenmill.store.foreign.joining import SPLITS
from tokenmill.store.foreign.llmc import LlmC
from tokenmill.store.foreign.megatron import Megatron
from tokenmill.store.foreign.nanogpt import NanoGpt
from tokenmill.store.foreign.npy import Npy
from tokenmill.store.foreign.olmo import Olmo
from tokenmill.store.foreign.parquet import Parquet
from tokenmill.store.foreign.pt import Pt

__all__ = ["FORMATS", "Format", "TokenFile", "choose_format", "list_files", "recognise"]

FORMATS: Sequence[Format] = (Megatron(), LlmC(), NanoGpt(), Datatrove(), Npy(), Olmo(), Pt(), Parquet())
"""In the order in which they are asked: one that knows a file by its content comes before one that takes any."""


def recognise(path: Path) -> tuple[Format, Path] | None:
    """The format of a file, and the file of tokens that it stands for."""
    for format in FORMATS:
        tokens = format.recognise(path)
        if tokens is not None:
            return format, tokens
    return None


def list_files(folder: Path) -> list[Path]:
    """The files in a folder that are called as files of tokens are; if it has none, those in its folders of splits."""
    patterns = {format.pattern for format in FORMATS}
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = [path for path in inside if any(fnmatch(path.name, pattern) for pattern in patterns)]
    return found or [file for path in inside if path.name in SPLITS and path.is_dir() for file in list_files(path)]


def choose_format(place: Path, paths: Iterable[Path]) -> tuple[Format, list[Path]] | None:
    """The one format of some files, and their files of tokens in order of names; None where nothing is known."""
    found: dict[Path, Format] = {}
    for path in paths:
        known = recognise(path)
        if known is not None:
            found[known[1]] = known[0]
    formats = {format.name: path for path, format in found.items()}
    if len(formats) > 1:
        named = " and ".join(f"{name} ({path.name})" for name, path in sorted(formats.items()))
        raise UsageError(f"{place} has tokens of several formats, {named}; name the files you want")
    return (next(iter(found.values())), sorted(found)) if found else None
