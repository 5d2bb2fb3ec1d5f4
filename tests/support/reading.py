"""Helpers of reader tests: streams in odd pieces, and batches joined into one."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tokenmill.compression import DamagedInput
from tokenmill.readers import DelimitedReader, ReadOptions, delimited_reader_for, reader_for
from tokenmill.readers import _blocks as blocks
from tokenmill.text_batch import Reject, TextBatch

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "a", "b"]) | st.text(), inner),
    max_leaves=8,
)
cuts = st.lists(st.integers(0, 300), max_size=5)
block_sizes = st.sampled_from([1, 7, 64, 1 << 19])


class Pieces:
    """A stream that returns its bytes in pieces of given sizes, in turn."""

    def __init__(self, data: bytes, sizes: Iterable[int] = (), damage: str | None = None) -> None:
        self._file = io.BytesIO(data)
        self._sizes = list(sizes) or [1 << 30]
        self._damage = damage
        self._turn = 0

    def read(self, size: int, /) -> bytes:
        self._turn += 1
        data = self._file.read(min(size, self._sizes[self._turn % len(self._sizes)]))
        if not data and self._damage is not None:
            raise DamagedInput(self._damage)
        return data


class Read(NamedTuple):
    texts: list[str]
    positions: list[int]
    rejects: list[tuple[int, int, str]]
    kept: list[tuple[Any, ...]]
    num_lines: int
    num_bytes: int


def gather(batches: Iterable[TextBatch]) -> Read:
    """Join all batches, with reject lines counted from the span of the first batch."""
    read = Read([], [], [], [], 0, 0)
    num_lines = num_bytes = 0
    for batch in batches:
        assert len(batch.texts) == len(batch.positions)
        assert batch.kept is None or len(batch.kept) == len(batch.texts)
        assert batch.positions.dtype == np.int64
        read.texts.extend(batch.texts)
        read.positions.extend(batch.positions.tolist())
        read.rejects.extend((reject.position, reject.line, reject.reason) for reject in batch.rejects)
        read.kept.extend(batch.kept or [])
        assert all(len(reject.detail) < 200 for reject in batch.rejects)
        num_lines += batch.num_lines
        num_bytes += batch.num_bytes
    return read._replace(num_lines=num_lines, num_bytes=num_bytes)


def read_bytes(data: bytes, format: str = "jsonl", sizes: Iterable[int] = (), **options: Any) -> Read:
    """Read all documents of some bytes, with texts as strings and packed, which have to be the same."""
    reader = delimited(format, **options)
    read = gather(reader.read_stream(reader.adapt(Pieces(data, sizes))))
    if format in ("jsonl", "text"):
        packed = delimited(format, **options, packed=True)
        assert gather(packed.read_stream(packed.adapt(Pieces(data, sizes)))) == read
    return read


@contextmanager
def blocks_of(num_bytes: int) -> Iterator[None]:
    """Read in blocks so small that documents cross their edges."""
    sizes = blocks.BLOCK_BYTES, blocks.SEARCH_BYTES
    blocks.BLOCK_BYTES, blocks.SEARCH_BYTES = num_bytes, num_bytes
    try:
        yield
    finally:
        blocks.BLOCK_BYTES, blocks.SEARCH_BYTES = sizes


def read_in_ranges(path: Path, data: bytes, cuts: Iterable[int], format: str, **options: Any) -> Read:
    path.write_bytes(data)
    reader = reader_for(format, ReadOptions(**options))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = []
    num_lines = 0
    for start, stop in itertools.pairwise(edges):
        part = gather(reader.read_range(path, start, stop))
        assert all(start <= position < stop for position in part.positions)
        rejects = [(at, line if line < 0 else line + num_lines, reason) for at, line, reason in part.rejects]
        num_lines += part.num_lines
        parts.append(part._replace(rejects=rejects))
    joined = [[item for part in parts for item in part[field]] for field in range(4)]
    return Read(*joined, num_lines, sum(part.num_bytes for part in parts))  # type: ignore[arg-type]


def rejects_of(data: bytes, format: str = "jsonl", **options: Any) -> list[Reject]:
    reader = delimited(format, **options)
    return [reject for batch in reader.read_stream(reader.adapt(Pieces(data))) for reject in batch.rejects]


def line(text: str, **fields: Any) -> bytes:
    return json.dumps({"text": text, **fields}, ensure_ascii=False).encode()


def delimited(format: str, **options: Any) -> DelimitedReader:
    return delimited_reader_for(format, ReadOptions(**options))
