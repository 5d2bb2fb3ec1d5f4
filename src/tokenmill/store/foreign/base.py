"""What a format of another project answers: is this file mine, and where in it are tokens and documents?

A format never reads tokens. It describes files, checked against their sizes; the shard table
that reads tokenmill's own shards then maps them as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.store.table import Integers

__all__ = ["ID_TYPES", "Format", "TokenFile", "bare_file", "id_type", "one_document", "starts_of"]

ID_TYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int16": "<i2", "int32": "<i4", "int64": "<i8"}


class TokenFile(NamedTuple):
    """A file of tokens: `size` bytes in all, of which the tokens are in one piece from byte `offset` on.

    `starts` is the first byte of each document, counted from the first token. `mask` is the ending, behind that
    of the tokens, of a file with a byte for each token, 1 where it is trained on.
    """

    path: str
    dtype: np.dtype[Any]
    num_tokens: int
    starts: Integers
    size: int
    offset: int = 0
    mask: str = ""


class Format(Protocol):
    """One format; `pattern` is what its files of tokens are called in a folder."""

    name: str
    pattern: str

    def recognise(self, path: Path) -> Path | None:
        """The file of tokens that a path stands for if it is of this format: itself, or the one it lies beside."""
        ...

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Where the tokens of files are, in order; `dtype` is what the user says that the ids are."""
        ...


def id_type(dtype: str | None) -> np.dtype[Any]:
    """The type of bare ids: what the user says, or what nanoGPT writes."""
    name = "uint16" if dtype is None else str(dtype)
    if name not in ID_TYPES:
        raise UsageError(f"dtype {dtype!r} is not one of ids; expected {', '.join(ID_TYPES)}")
    return np.dtype(ID_TYPES[name])


def one_document() -> Integers:
    """The starts of a file of which nobody knows the documents: it counts as one."""
    return np.zeros(1, np.int64)


def bare_file(path: Path, kind: np.dtype[Any], starts: Integers, mask: str = "") -> TokenFile:
    """A file of nothing but tokens."""
    size = path.stat().st_size
    if size % kind.itemsize:
        raise StoreError(f"{path} has {size} bytes, which is no whole number of {kind} ids")
    return TokenFile(os.fspath(path), kind, size // kind.itemsize, starts, size, mask=mask)


def starts_of(ends: Integers, kind: np.dtype[Any]) -> Integers:
    """The first byte of each document from the tokens that end them."""
    return (np.concatenate([np.zeros(1, np.int64), ends[:-1]]) * kind.itemsize)[: len(ends)]
