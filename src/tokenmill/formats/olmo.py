"""OLMo-core and Dolma: `train.npy`, which is bare tokens and not NumPy's format, and documents in `train.csv.gz`.

The table has a line `start,end,id,src,loc` for each document that has tokens: its first token and the one after its
last, the kept field `id` or the document's number, and the input and position it came from. Nothing says how wide ids
are; the end of the last document tells it. A loss mask becomes `train_labels_mask.npy`, bare booleans, for OLMo-core's
`label_mask_paths`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.formats._boundaries import check_boundaries
from tokenmill.formats._token_blocks import BareTokens
from tokenmill.formats.base import Array, Opener, SplitSource, TokenFile, bare_file, id_type, starts_of
from tokenmill.regular_files import check_regular, open_parquet
from tokenmill.store.table import Integers

__all__ = ["Olmo"]

TOKENS, TABLE = ".npy", ".csv.gz"
DOCUMENTS_AT_ONCE = 65_536
BLOCK_BYTES = 1 << 20
SPARE_DOCUMENTS = 1 << 20
"""A table may have more documents than tokens, since some are empty; one that does not end is refused."""


class Olmo(Opener, BareTokens):
    """Files such as `part-000-00000.npy`."""

    label = "OLMo"
    pattern = f"*{TOKENS}"
    carries_mask = can_link = True
    boundary_reader = "OLMo-core"
    tokens_suffix, mask_suffix = TOKENS, "_labels_mask.npy"
    narrow, wide = "<u2", "<u4"

    def recognise(self, path: Path) -> Path | None:
        """Take any `.npy`, also by the name of its table."""
        is_table = path.name.endswith(TABLE)
        return super().recognise(path.with_name(path.name.removesuffix(TABLE) + TOKENS) if is_table else path)

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Check that the table describes the tokens from front to back."""
        size = path.stat().st_size
        table = path.with_suffix(TABLE)
        if not table.is_file() or not size:
            return bare_file(path, id_type(dtype))
        ends = _read_ends(table, size)
        kind = _find_type(path, table, size, int(ends[-1]), dtype)
        last = size // kind.itemsize
        if ends[-1] > last:
            what = f"ends at token {ends[-1]}, and {path.name} has {last} {kind} ids"
            raise StoreError(f"{table} has a document that {what}")
        # OLMo's own tables end with the last end-of-text token; the tokens after it count as one more document.
        ends = ends if ends[-1] == last else np.append(ends, last)
        return bare_file(path, kind, starts_of(ends, kind))

    def check_documents(self, split: SplitSource) -> None:
        """Refuse a store unless each document has one EOS, at its end: by default, OLMo-core ignores the table."""
        check_boundaries(split, self.boundary_reader, split.eos_id)

    def write_index(self, split: SplitSource, stem: Path, shards: range) -> None:
        """Write the table of documents; tokens are counted from the first of these shards, documents from shard 0."""
        from isal import igzip
        from pyarrow import compute, csv

        table = split.documents.table
        number = int(table.num_documents[: shards.start].sum())
        start = 0
        # Without a time stamp, so that equal stores give equal bytes.
        with Path(f"{stem}{TABLE}").open("wb") as file, igzip.IGzipFile("", "wb", 1, file, mtime=0) as packed:
            for shard in shards:
                done = 0
                for sources in _sources(split, shard, int(table.num_documents[shard])):
                    edges = start + table.all_starts(shard, done, len(sources))
                    lines = _make_lines(edges, number + done, sources, split.inputs)
                    # Arrow would quote all strings, which no other writer does, even if none has to be.
                    special = [compute.match_substring_regex(lines[name], r'[",\r\n]') for name in ("id", "src")]
                    style = "needed" if any(compute.any(some).as_py() for some in special) else "none"
                    csv.write_csv(lines, packed, csv.WriteOptions(include_header=False, quoting_style=style))
                    done += len(sources)
                number, start = number + done, start + int(table.num_tokens[shard])


def _sources(split: SplitSource, shard: int, num_documents: int) -> Iterator[Any]:
    """Yield tables of where the documents of a shard came from; if that is unknown, tables without these columns."""
    import pyarrow as pa

    path = Path(split.documents.table.local_path(shard, ".docs.parquet"))
    if split.stems and path.exists():
        with open_parquet(path) as file:
            for batch in file.iter_batches(DOCUMENTS_AT_ONCE):
                yield pa.Table.from_batches([batch])
        return
    for first in range(0, num_documents, DOCUMENTS_AT_ONCE):
        yield pa.table({"nothing": pa.nulls(min(DOCUMENTS_AT_ONCE, num_documents - first))})


def _make_lines(edges: Array, number: int, sources: Any, inputs: tuple[str, ...]) -> Any:
    """Make the lines of documents, the first of which has the given number, and leave out those without tokens."""
    import pyarrow as pa
    from pyarrow import compute

    count = len(sources)
    ids = pa.array(np.arange(number, number + count)).cast(pa.string())
    if "key.id" in sources.column_names:
        # Readers split the file at line ends, quoted or not.
        ids = compute.replace_substring_regex(sources["key.id"].fill_null(""), r"[\r\n]+", " ")
    src = loc = pa.array([""] * count, pa.string())
    if "input" in sources.column_names:
        src = pa.array(inputs, pa.string()).take(sources["input"].combine_chunks())
        loc = sources["position"].combine_chunks()
    lines = pa.table({"start": edges[:-1], "end": edges[1:], "id": ids, "src": src, "loc": loc})
    return lines.filter(pa.array(edges[1:] > edges[:-1]))


def _find_type(path: Path, table: Path, size: int, end: int, dtype: str | None) -> np.dtype[Any]:
    """Take the type that the user named, else the one with which the last document ends where the file does."""
    if dtype is not None:
        return id_type(dtype)
    for name in ("uint16", "uint32"):
        if end * id_type(name).itemsize == size:
            return id_type(name)
    raise StoreError(
        f"{table} ends at token {end}, and {path.name} has {size} bytes, which fits neither uint16 nor uint32 ids; "
        "pass dtype"
    )


def _read_ends(table: Path, size: int) -> Integers:
    """Read the ends of documents, which must follow each other without gaps."""
    import pyarrow as pa

    parts, end, count = [], 0, 0
    try:
        for starts, ends in _read_columns(table):
            expected = np.concatenate([[end], ends[:-1]])
            if not np.array_equal(starts, expected) or (ends < starts).any():
                raise StoreError(f"{table} does not describe documents that follow each other from token 0 on")
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
    """Read the first two columns, a block at a time."""
    import pyarrow as pa
    import pyarrow.csv as csv

    types = {"f0": pa.int64(), "f1": pa.int64()}
    check_regular(table)
    with pa.input_stream(str(table), compression="gzip") as stream:
        reader = csv.open_csv(
            stream,
            read_options=csv.ReadOptions(autogenerate_column_names=True, block_size=BLOCK_BYTES, use_threads=False),
            convert_options=csv.ConvertOptions(include_columns=list(types), column_types=types, null_values=[]),
        )
        for batch in reader:
            if len(batch):
                yield batch.column(0).to_numpy(), batch.column(1).to_numpy()
