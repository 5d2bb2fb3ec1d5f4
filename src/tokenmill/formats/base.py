"""What a format must offer to be opened and to be exported, and the two records it works with.

To be opened, a format says where in its files the tokens and documents are. It reads no tokens: the table that maps the
shards of a store maps these files, too. To be exported, it writes a split into a folder and reads its files back as a
stream of ids; `export` compares them with the store and gives the folder its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError, UsageError
from tokenmill.regular_files import open_regular
from tokenmill.store.documents import Documents
from tokenmill.store.table import Integers

__all__ = [
    "ID_TYPES",
    "ONE_DOCUMENT",
    "Array",
    "ExportRows",
    "Exporter",
    "Opener",
    "Shape",
    "SplitSource",
    "TokenFile",
    "bare_file",
    "id_type",
    "starts_of",
]

Array = npt.NDArray[Any]
Shape = Literal["documents", "rows", "padded rows", "table"]
"""Whole documents; rows of the stream of all tokens; rows of one document each, padded; or rows of any length."""
ID_TYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
ONE_DOCUMENT: Integers = np.zeros(1, np.int64)
"""The starts of a file that does not say where its documents are: the whole file counts as one."""
ONE_DOCUMENT.setflags(write=False)


class TokenFile(NamedTuple):
    """A file of `size` bytes whose tokens lie in one piece from byte `offset` on.

    `starts` has the first byte of each document, counted from the first token. `mask` is the suffix, added to the path
    of the tokens, of a file with one byte per token: 1 where it is trained on.
    """

    path: str
    dtype: np.dtype[Any]
    num_tokens: int
    size: int
    starts: Integers = ONE_DOCUMENT
    offset: int = 0
    mask: str = ""


@runtime_checkable
class Opener(Protocol):
    """A format that `tokenmill.open` recognises."""

    label: str
    """The name of the format in messages."""
    pattern: str
    """The names of its files of tokens in a folder, as a glob."""
    magics: tuple[bytes, ...] = ()
    """What its files begin with; empty if that does not tell."""

    def recognise(self, path: Path) -> Path | None:
        """Return the file of tokens if the path is of this format: the path itself, or a file that belongs to it.

        By default, take any file that has the suffix of the pattern and begins with one of the magic bytes.
        """
        if path.suffix != PurePath(self.pattern).suffix or not path.is_file():
            return None
        if not self.magics:
            return path
        with open_regular(path) as file:
            return path if file.read(len(self.magics[0])) in self.magics else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Say where the tokens of files are, in order; `dtype` is the type of ids that the user named, if any."""
        return [self.describe_file(path, dtype) for path in paths]

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """The same for one file of a format that describes each file by itself."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExportRows:
    """Which rows a format gets, and what it stores beside their ids."""

    seq_len: int = 0
    """0 for whole documents."""
    packing: str = "concat"
    """`documents`, or a packing of `tm.pack`."""
    long_documents: str = "split"
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitSource:
    """One split to export, and what is known about it."""

    name: str
    names: tuple[str, ...]
    """All splits of this export."""
    documents: Documents
    stems: tuple[str, ...]
    """The split's shards, in order; empty unless the source is a store of tokenmill."""
    suffix: str = ".bin"
    """The suffix of the files of the shards to read."""
    rows: ExportRows
    links: bool
    path: Path
    tokenizer: str
    vocab_size: int | None
    bos_id: int | None
    eos_id: int | None
    inputs: tuple[str, ...]
    """Inputs of the store by number, for formats that say where a document came from."""
    advance: Callable[[int], None]
    """Called with the number of tokens that have been written since the last call."""
    note: Callable[[str], None]
    """Called with messages to the user that are no errors."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.rows.seq_len

    @property
    def num_rows(self) -> int:
        """Full rows of the stream of all tokens."""
        return self.documents.num_tokens // self.seq_len

    @property
    def is_narrow(self) -> bool:
        """Whether every id fits into uint16."""
        if self.vocab_size is not None:
            return self.vocab_size <= 1 << 16
        return self.documents.dtype in (np.dtype("u1"), np.dtype("<u2"))

    @property
    def mask(self) -> SplitSource | None:
        """The loss mask as a source of its own, with a byte in place of each token; None if there is no mask."""
        return self._beside(".mask")

    @property
    def weight(self) -> SplitSource | None:
        """The weights of the loss as a source of its own, with a number in place of each token; None if all are 1."""
        return self._beside(".weight")

    def _beside(self, suffix: str) -> SplitSource | None:
        values = self.documents.view(suffix)
        if values is None:
            return None
        return replace(self, documents=values, suffix=suffix, advance=lambda _count: None)


class Exporter(Protocol):
    """A format that `tokenmill.export` writes."""

    shape: Shape
    is_folder: bool = False
    """Whether its readers take a whole folder, so that splits cannot share one."""
    carries_mask: bool = False
    """Whether it can store which tokens are trained on."""
    carries_weights: bool = False
    """Whether it can store the weight of each token's loss."""
    boundary_reader: str = ""
    """Who finds documents in its files by a token alone; empty if no one does."""
    can_link: bool = False
    """Whether its files of tokens can be hard links to the shards."""

    def check(self, split: SplitSource) -> None:
        """Refuse a split that this format cannot hold; called before anything is written."""

    def check_documents(self, split: SplitSource) -> None:
        """Refuse a store in whose files the format's readers would find other documents than it has."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write the split's files into a folder."""
        ...

    def read(self, split: SplitSource, folder: Path) -> Iterator[Any]:
        """Yield the ids in the files, in store order and without padding; blocks may share memory.

        A table yields dicts of all its columns, see `expect`.
        """
        ...

    def expect(self, split: SplitSource) -> Iterator[Any]:
        """Yield what `read` must find, from the store."""
        raise NotImplementedError


def id_type(dtype: str | None) -> np.dtype[Any]:
    """Return the type of bare ids: the one that the user named, or uint16, which nanoGPT writes."""
    name = "uint16" if dtype is None else str(dtype)
    if name not in ID_TYPES:
        raise UsageError(f"dtype {dtype!r} is not a type of ids; expected {', '.join(ID_TYPES)}")
    return np.dtype(ID_TYPES[name])


def bare_file(path: Path, kind: np.dtype[Any], starts: Integers = ONE_DOCUMENT, mask: str = "") -> TokenFile:
    """Describe a file that holds tokens and nothing else."""
    size = path.stat().st_size
    if size % kind.itemsize:
        raise StoreError(f"{path} has {size} bytes, which is not a whole number of {kind} ids")
    return TokenFile(os.fspath(path), kind, size // kind.itemsize, size, starts, mask=mask)


def starts_of(ends: Integers, kind: np.dtype[Any]) -> Integers:
    """Convert the tokens at which documents end into the first byte of each document."""
    return (np.concatenate([np.zeros(1, np.int64), ends[:-1]]) * kind.itemsize)[: len(ends)]
