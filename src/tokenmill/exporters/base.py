"""What a format is told of a split, and what it must be able to do with it.

A format writes a split into a folder and reads its own files back as a stream of ids; `export` does
everything else: it refuses what cannot work before anything is written, compares what was read
back with the store, and gives the folder its name last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.store.documents import Documents

__all__ = ["Array", "Exporter", "Shape", "SplitSource", "check_rows", "is_narrow"]

Array = npt.NDArray[Any]
Shape = Literal["documents", "rows", "padded rows"]
"""Whole documents; rows of the stream of all tokens; or a row for each document, padded."""


@dataclass(frozen=True, kw_only=True)
class SplitSource:
    """One split that is to be exported, and what is known of it."""

    name: str
    names: tuple[str, ...]
    """All splits that are exported together."""
    documents: Documents
    stems: tuple[str, ...]
    """Shards of the store that the split consists of, in order; none where the files are of another maker."""
    seq_len: int
    links: bool
    path: Path
    tokenizer: str
    vocab_size: int | None
    bos_id: int | None
    eos_id: int | None
    inputs: tuple[str, ...]
    """Inputs of the store by number, for formats that say where a document came from."""
    advance: Callable[[int], None]
    """Told how many tokens more have been written."""
    note: Callable[[str], None]
    """Tells the user something that is no error."""

    @property
    def num_rows(self) -> int:
        """Full rows of the stream of all tokens."""
        return self.documents.num_tokens // self.seq_len


class Exporter(Protocol):
    """One format."""

    shape: Shape
    is_folder: bool
    """Whether readers take a whole folder, so that splits must not share one."""
    carries_mask: bool
    """Whether it can hold which tokens are trained on."""
    can_link: bool
    """Whether its files of tokens can be links to the shards."""

    def check(self, split: SplitSource) -> None:
        """Refuse a split that this format cannot hold."""
        ...

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write the split's files into a folder."""
        ...

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The ids in the files, in the order of the store and without padding; blocks may share memory."""
        ...


def is_narrow(split: SplitSource) -> bool:
    """Whether every id fits two bytes without a sign."""
    if split.vocab_size is not None:
        return split.vocab_size <= 1 << 16
    return split.documents.dtype in (np.dtype("u1"), np.dtype("<u2"))


def check_rows(split: SplitSource) -> None:
    """Refuse a split that does not fill a single row."""
    if split.num_rows < 1:
        raise UsageError(
            f"split {split.name} has {split.documents.num_tokens:,} tokens, which fill no row of {split.seq_len:,}; "
            "use a smaller --seq-len, or choose another split with --split"
        )
