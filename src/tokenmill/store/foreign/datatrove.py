"""datatrove and nanotron: bare tokens in `.ds`, with files beside it whose names are longer.

`.ds.index` has the end of each document in tokens; together with the size of the `.ds` it tells how wide ids
are. `.ds.metadata` says so too, and how many tokens there are. `.ds.loss` has a byte for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import TokenFile, bare_file, id_type, one_document, starts_of
from tokenmill.store.table import Integers

__all__ = ["Datatrove"]

INDEX, METADATA, LOSS = ".index", ".metadata", ".loss"
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
METADATA_BYTES = 1 << 16


class Datatrove:
    """Files of `.ds`, such as `00000_shuffled.ds`."""

    name = "datatrove"
    pattern = "*.ds"

    def recognise(self, path: Path) -> Path | None:
        """A `.ds`, also by the name of a file beside it."""
        tokens = path.with_suffix("") if path.suffix in {INDEX, METADATA, LOSS} else path
        return tokens if tokens.suffix == ".ds" and tokens.is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Index, metadata, loss and `dtype` must not contradict the size of the tokens."""
        return [_describe(path, dtype) for path in paths]


def _describe(path: Path, dtype: str | None) -> TokenFile:
    size = path.stat().st_size
    ends = _read_ends(path)
    width, count = _read_metadata(path)
    kind = id_type(dtype) if dtype is not None else _find_type(path, size, ends, width)
    num_tokens = size // kind.itemsize
    if ends is not None and (ends[-1] if len(ends) else 0) != num_tokens:
        raise StoreError(f"{_beside(path, INDEX)} does not describe the {size} bytes of its .ds as {kind} ids")
    if count not in (None, num_tokens):
        raise StoreError(f"{_beside(path, METADATA)} says {count} tokens and {path.name} has {num_tokens}")
    loss = _beside(path, LOSS)
    if loss.is_file() and loss.stat().st_size != num_tokens:
        raise StoreError(f"{loss} has {loss.stat().st_size} bytes and {path.name} has {num_tokens} tokens")
    starts = one_document() if ends is None else starts_of(ends, kind)
    return bare_file(path, kind, starts, LOSS if loss.is_file() else "")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _read_ends(path: Path) -> Integers | None:
    """The token behind each document's last; None where no index was saved."""
    index = _beside(path, INDEX)
    if not index.is_file():
        return None
    data = index.read_bytes()
    ends = np.frombuffer(data, "<i8", len(data) // 8).astype(np.int64, copy=False)
    # Ends are unsigned, so one above 2**63 shows as a negative number.
    if len(data) % 8 or (np.diff(ends, prepend=0) < 0).any():
        raise StoreError(f"{index} is not an index of datatrove: ends of documents must grow, 8 bytes each")
    return ends


def _find_type(path: Path, size: int, ends: Integers | None, width: int | None) -> np.dtype[Any]:
    """What the metadata says, else what makes index and size agree, else uint16."""
    if width is None and ends is not None and len(ends) and ends[-1]:
        width = size // int(ends[-1])
    if width is not None and width not in WIDTHS:
        raise StoreError(f"{path} has ids of {width} bytes, by the files beside it; expected 2 or 4")
    return id_type(None) if width is None else WIDTHS[width]


def _read_metadata(path: Path) -> tuple[int | None, int | None]:
    """Bytes per id and tokens, by the lines `tokenizer|width` and `count`; older versions wrote no width."""
    metadata = _beside(path, METADATA)
    if not metadata.is_file():
        return None, None
    with metadata.open("rb") as file:
        first, _, others = file.read(METADATA_BYTES).partition(b"\n")
    return _number(first.rpartition(b"|")[2]), _number(others.partition(b"\n")[0])


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() and len(text) < 20 else None
