"""Token files of other projects: small ones written from the projects' own descriptions, or by their libraries."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.stores import Ids

Documents = Sequence[Ids]
Writer = Callable[[Path, Documents, str], Path]


def flat(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def ends(documents: Documents) -> list[int]:
    return np.cumsum([len(document) for document in documents], dtype=np.int64).tolist()


def write_pair(stem: Path, sequences: list[list[int]], edges: list[int], code: int = 8, kind: str = "<u2") -> Path:
    """Write a Megatron pair of sequences; `edges` are the sequences at which documents begin, and the end."""
    lengths = np.array([len(some) for some in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(kind).itemsize
    np.array([token for some in sequences for token in some], kind).tofile(f"{stem}.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(edges))
    index = header + lengths.tobytes() + pointers.astype("<i8").tobytes() + np.array(edges, "<i8").tobytes()
    Path(f"{stem}.idx").write_bytes(index)
    return Path(f"{stem}.bin")


def write_megatron(stem: Path, documents: Documents, kind: str) -> Path:
    codes = {"<u2": 8, "<i4": 4, "<i8": 5}
    return write_pair(stem, [list(some) for some in documents], list(range(len(documents) + 1)), codes[kind], kind)


def write_nanogpt(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".bin")
    np.array(flat(documents), kind).tofile(path)
    return path


def write_llmc(stem: Path, documents: Documents, kind: str) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = [20240520, 1, len(flat(documents))] if kind == "<u2" else [20240801, 7, len(flat(documents))]
    path = stem.with_suffix(".bin")
    path.write_bytes(header.tobytes() + np.array(flat(documents), kind).tobytes())
    return path


def write_datatrove(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".ds")
    np.array(flat(documents), kind).tofile(path)
    np.array(ends(documents), "<u8").tofile(f"{path}.index")
    count = len(flat(documents))
    Path(f"{path}.metadata").write_text(f"org/name|{kind[-1]}\n{count}\n{count} T")
    return path


def write_olmo(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".npy")
    np.array(flat(documents), kind).tofile(path)
    stops = ends(documents)
    rows = [f"{a},{b},id-{n},src.jsonl.gz,{n}\n" for n, (a, b) in enumerate(zip([0, *stops], stops, strict=False))]
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("".join(rows).encode()))
    return path


def write_npy(stem: Path, documents: Documents, kind: str) -> Path:
    np.save(stem.with_suffix(".npy"), np.array(flat(documents), kind))
    return stem.with_suffix(".npy")


def write_pt(stem: Path, documents: Documents, kind: str) -> Path:
    import torch

    path = stem.with_name(f"chunk_{stem.name}.pt")
    torch.save(torch.from_numpy(np.array(flat(documents), kind)), path)
    return path


def write_parquet(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".parquet")
    column = pa.array([list(some) for some in documents], KINDS[kind])
    pq.write_table(pa.table({"text": ["x"] * len(documents), "input_ids": column}), path, row_group_size=7)
    return path


KINDS = {
    "list<u2>": pa.list_(pa.uint16()),
    "list<i4>": pa.list_(pa.int32()),
    "large_list<i8>": pa.large_list(pa.int64()),
}

CASES: list[tuple[Writer, str]] = [
    (write_megatron, "<u2"),
    (write_megatron, "<i4"),
    (write_megatron, "<i8"),
    (write_nanogpt, "<u2"),
    (write_llmc, "<u2"),
    (write_llmc, "<u4"),
    (write_datatrove, "<u2"),
    (write_datatrove, "<u4"),
    (write_olmo, "<u2"),
    (write_olmo, "<u4"),
    (write_npy, "<u2"),
    (write_npy, "<u4"),
    (write_npy, "<i8"),
    (write_pt, "<i8"),
    (write_pt, "<i4"),
    (write_parquet, "list<u2>"),
    (write_parquet, "list<i4>"),
    (write_parquet, "large_list<i8>"),
]

ONE_A_FILE = {write_nanogpt, write_llmc, write_npy, write_pt}

every_format = pytest.mark.parametrize(
    ("write", "kind"), CASES, ids=[f"{write.__name__[6:]} {kind}" for write, kind in CASES]
)


def wide(documents: Documents, kind: str) -> list[list[int]]:
    """Return the same documents with ids that need more than two bytes, if the type has them."""
    shift = 0 if "u2" in kind else 100_000
    return [[token + shift for token in document] for document in documents]


def expected(write: Writer, files: Sequence[Documents]) -> list[list[int]]:
    """Return the documents that files should have: those that were written, or one per file if the format has no index."""
    if write in ONE_A_FILE:
        return [flat(documents) for documents in files]
    return [list(document) for documents in files for document in documents]
