"""datatrove and nanotron: bare tokens in `.ds`, and files beside it with longer names.

`.ds.index` has the end of each document, counted in tokens; together with the size of the `.ds` it tells how wide ids
are. `.ds.metadata` has the width, too, and the number of tokens. `.ds.loss` is a loss mask with a byte per token.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.formats._token_blocks import BareTokens
from tokenmill.formats.base import ONE_DOCUMENT, Opener, SplitSource, TokenFile, bare_file, id_type, starts_of
from tokenmill.regular_files import open_regular
from tokenmill.store.shard import OutputFile
from tokenmill.store.table import Integers

__all__ = ["Datatrove"]

TOKENS, INDEX, METADATA, LOSS = ".ds", ".index", ".metadata", ".loss"
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
METADATA_BYTES = 1 << 16


class Datatrove(Opener, BareTokens):
    """Files such as `00000_shuffled.ds`. Readers take every `.ds` in a folder, so each split has its own."""

    label = "datatrove"
    pattern = f"*{TOKENS}"
    is_folder = carries_mask = can_link = True
    tokens_suffix, mask_suffix = TOKENS, TOKENS + LOSS
    narrow, wide = "<u2", "<u4"

    def recognise(self, path: Path) -> Path | None:
        """Take a `.ds`, also by the name of a file beside it."""
        return super().recognise(path.with_suffix("") if path.suffix in {INDEX, METADATA, LOSS} else path)

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Compare index, metadata, loss and `dtype` with the size of the tokens."""
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
        starts = ONE_DOCUMENT if ends is None else starts_of(ends, kind)
        return bare_file(path, kind, starts, LOSS if loss.is_file() else "")

    def write_index(self, split: SplitSource, stem: Path, shards: range) -> None:
        """Write index and metadata."""
        tokens, count = _beside(stem, TOKENS), 0
        with OutputFile(_beside(tokens, INDEX)) as file:
            for lengths in split.documents.lengths(shards):
                ends = np.cumsum(lengths) + count
                file.write(ends.astype("<u8"))
                count = int(ends[-1])
        metadata = f"{split.tokenizer}|{self.id_type(split).itemsize}\n{count}\n{format_metric(count)}"
        _beside(tokens, METADATA).write_text(metadata, "utf-8")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def format_metric(count: int) -> str:
    """Format a count with three digits, as `humanize.metric` does: `1.50 kT`, `380 MT`."""
    exponent = len(str(count)) - 1
    shown = f"{count / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f}"
    return f"{shown} {['', 'k', 'M', 'G', 'T', 'P', 'E'][exponent // 3]}T"


def _read_ends(path: Path) -> Integers | None:
    """Read the end of each document, in tokens; None if there is no index."""
    index = _beside(path, INDEX)
    if not index.is_file():
        return None
    with open_regular(index) as file:
        size = os.fstat(file.fileno()).st_size
        ends = np.memmap(file, "<i8", mode="r", shape=(size // 8,)) if size >= 8 else np.zeros(0, np.int64)
    # Ends are unsigned, so one above 2**63 shows as a negative number.
    if size % 8 or (np.diff(ends, prepend=0) < 0).any():
        raise StoreError(f"{index} is not an index of datatrove: ends of documents must grow, 8 bytes each")
    return ends


def _find_type(path: Path, size: int, ends: Integers | None, width: int | None) -> np.dtype[Any]:
    """Take the width from the metadata, else from index and size, else uint16."""
    if width is None and ends is not None and len(ends) and ends[-1]:
        width = size // int(ends[-1])
    if width is not None and width not in WIDTHS:
        raise StoreError(f"{path} has ids of {width} bytes, by the files beside it; expected 2 or 4")
    return id_type(None) if width is None else WIDTHS[width]


def _read_metadata(path: Path) -> tuple[int | None, int | None]:
    """Read bytes per id and tokens from the lines `tokenizer|width` and `count`; older versions wrote no width."""
    metadata = _beside(path, METADATA)
    if not metadata.is_file():
        return None, None
    with open_regular(metadata) as file:
        first, _, others = file.read(METADATA_BYTES).partition(b"\n")
    return _number(first.rpartition(b"|")[2]), _number(others.partition(b"\n")[0])


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() and len(text) < 20 else None
