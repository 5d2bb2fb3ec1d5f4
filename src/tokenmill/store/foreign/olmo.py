"""OLMo and Dolma: a `.npy` that is not NumPy's format but bare tokens, and documents in a `.csv.gz`.

A row of the table begins with the first token of a document and the one behind its last. Nothing says how
wide ids are; where the last document ends tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import TokenFile, bare_file, id_type, one_document, starts_of
from tokenmill.store.table import Integers

__all__ = ["Olmo"]

TABLE = ".csv.gz"
BLOCK_BYTES = 1 << 20
SPARE_DOCUMENTS = 1 << 20
"""A table may have more documents than tokens, since some are empty; one that never ends is refused."""


class Olmo:
    """Files such as `part-000-00000.npy`."""

    name = "OLMo"
    pattern = "*.npy"

    def recognise(self, path: Path) -> Path | None:
        """A `.npy`, also by the name of its table."""
        tokens = path.with_name(path.name.removesuffix(TABLE) + ".npy") if path.name.endswith(TABLE) else path
        return tokens if tokens.suffix == ".npy" and tokens.is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Tables must describe the tokens front to back."""
        return [_describe(path, dtype) for path in paths]


def _describe(path: Path, dtype: str | None) -> TokenFile:
    size = path.stat().st_size
    table = path.with_suffix(TABLE)
    if not table.is_file() or not size:
        return bare_file(path, id_type(dtype), one_document())
    ends = _read_ends(table, size)
    kind = _find_type(path, table, size, int(ends[-1]), dtype)
    last = size // kind.itemsize
    if ends[-1] > last:
        raise StoreError(f"{table} has a document that ends at token {ends[-1]}, and {path.name} has {last} {kind} ids")
    # OLMo's own tables end with the last end-of-text; what comes behind it counts as one more document.
    ends = ends if ends[-1] == last else np.append(ends, last)
    return bare_file(path, kind, starts_of(ends, kind))


def _find_type(path: Path, table: Path, size: int, end: int, dtype: str | None) -> np.dtype[Any]:
    """What the user says, else the type with which the last document ends where the file does."""
    if dtype is not None:
        return id_type(dtype)
    for name in ("uint16", "uint32"):
        if end * id_type(name).itemsize == size:
            return id_type(name)
    raise StoreError(
        f"{table} ends at token {end}, and {path.name} has {size} bytes, which are neither so many uint16 nor uint32 "
        "ids; pass dtype"
    )


def _read_ends(table: Path, size: int) -> Integers:
    """The ends of documents that follow each other."""
    import pyarrow as pa

    parts, end, count = [], 0, 0
    try:
        for starts, ends in _read_columns(table):
            expected = np.concatenate([[end], ends[:-1]])
            if not np.array_equal(starts, expected) or (ends < starts).any():
                raise StoreError(f"{table} does not describe documents that follow each other, from token 0 on")
            parts.append(ends)
            end, count = int(ends[-1]), count + len(ends)
            if end > size or count > size + SPARE_DOCUMENTS:
                raise StoreError(f"{table} has more documents or tokens than a .npy of {size} bytes can hold")
    except (pa.ArrowException, OSError, KeyError) as error:
        raise StoreError(
            f"{table} is not a table of OLMo's documents: {str(error).partition(chr(10))[0][:100]}"
        ) from None
    return np.concatenate(parts)


def _read_columns(table: Path) -> Iterator[tuple[Integers, Integers]]:
    """The first two columns, a block at a time."""
    import pyarrow as pa
    import pyarrow.csv as csv

    types = {"f0": pa.int64(), "f1": pa.int64()}
    with pa.input_stream(str(table), compression="gzip") as stream:
        reader = csv.open_csv(
            stream,
            read_options=csv.ReadOptions(autogenerate_column_names=True, block_size=BLOCK_BYTES, use_threads=False),
            convert_options=csv.ConvertOptions(include_columns=list(types), column_types=types, null_values=[]),
        )
        for batch in reader:
            if len(batch):
                yield batch.column(0).to_numpy(), batch.column(1).to_numpy()
