"""datatrove and nanotron: bare tokens in `.ds`, and files beside it with longer names.

`.ds.index` has the end of each document, counted in tokens; together with the size of the `.ds` it tells how wide ids
are. `.ds.metadata` has the width, too, and the number of tokens. `.ds.loss` is a loss mask with a byte per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.formats._token_blocks import OutputFile, file_blocks, output_parts, write_stream
from tokenmill.formats.base import (
    ONE_DOCUMENT,
    Array,
    Exporter,
    Opener,
    Shape,
    SplitSource,
    TokenFile,
    bare_file,
    id_type,
    starts_of,
)
from tokenmill.store.table import Integers

__all__ = ["Datatrove"]

TOKENS, INDEX, METADATA, LOSS = ".ds", ".index", ".metadata", ".loss"
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
METADATA_BYTES = 1 << 16


class Datatrove(Opener, Exporter):
    """Files such as `00000_shuffled.ds`. Readers take every `.ds` in a folder, so each split has its own."""

    label = "datatrove"
    pattern = f"*{TOKENS}"
    shape: Shape = "documents"
    is_folder = True
    carries_mask = True
    can_link = True

    def recognise(self, path: Path) -> Path | None:
        """Take a `.ds`, also by the name of a file beside it."""
        tokens = path.with_suffix("") if path.suffix in {INDEX, METADATA, LOSS} else path
        return tokens if tokens.suffix == TOKENS and tokens.is_file() else None

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

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write tokens, index and metadata, and the mask if there is one."""
        kind = _id_type(split)
        for path, shards in output_parts(split, folder / split.name, folder):
            tokens = _beside(path, TOKENS)
            write_stream(split, tokens, kind, shards)
            _write_index(split, _beside(tokens, INDEX), shards)
            if split.mask is not None:
                write_stream(split.mask, _beside(tokens, LOSS), "u1", shards)
            count = int(split.documents.table.num_tokens[shards.start : shards.stop].sum())
            metadata = f"{split.tokenizer}|{kind.itemsize}\n{count}\n{format_metric(count)}"
            _beside(tokens, METADATA).write_text(metadata, "utf-8")

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the tokens of the files in order."""
        for path, _ in output_parts(split, folder / split.name, folder):
            yield from file_blocks(_beside(path, TOKENS), _id_type(split))


def _id_type(split: SplitSource) -> np.dtype[Any]:
    return WIDTHS[2 if split.is_narrow else 4]


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write_index(split: SplitSource, path: Path, shards: range) -> None:
    table, start = split.documents.table, 0
    with OutputFile(path) as file:
        for shard in shards:
            starts = table.all_starts(shard, 0, int(table.num_documents[shard]))
            if (np.diff(starts) < 0).any():
                raise table.damage(shard)
            file.write((starts[1:] + start).astype("<u8"))
            start += int(table.num_tokens[shard])


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
    data = index.read_bytes()
    ends = np.frombuffer(data, "<i8", len(data) // 8).astype(np.int64, copy=False)
    # Ends are unsigned, so one above 2**63 shows as a negative number.
    if len(data) % 8 or (np.diff(ends, prepend=0) < 0).any():
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
    with metadata.open("rb") as file:
        first, _, others = file.read(METADATA_BYTES).partition(b"\n")
    return _number(first.rpartition(b"|")[2]), _number(others.partition(b"\n")[0])


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() and len(text) < 20 else None
