"""OLMo-core and Dolma: `train.npy`, which is bare tokens and no NumPy file, and `train.csv.gz`.

The table has a line `start,end,id,src,loc` per document that has tokens: where they are, the kept field `id` or the
document's number, and the input and the position there that it came from. A loss mask becomes
`train_labels_mask.npy`, bare booleans, for OLMo-core's `label_mask_paths`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tokenmill.exporters.base import Array, Shape, SplitSource, is_narrow
from tokenmill.exporters.writing import file_blocks, link_or_copy, shard_name, write_stream

__all__ = ["Olmo"]

DOCUMENTS_AT_ONCE = 65_536


class Olmo:
    """One merged array per split, or links to the shards, each with its own table."""

    shape: Shape = "documents"
    is_folder = False
    carries_mask = True
    can_link = True

    def check(self, split: SplitSource) -> None:
        """Every split fits."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Tokens, the table of documents, and the mask where there is one."""
        has_mask = split.documents.mask is not None
        if not split.links:
            write_stream(split, folder / f"{split.name}.npy", _dtype(split))
            if has_mask:
                write_stream(split, folder / f"{split.name}_labels_mask.npy", "u1", ".mask")
            with (folder / f"{split.name}.csv.gz").open("wb") as file:
                _write_table(split, file, range(len(split.documents.table.stems)))
            return
        for shard, stem in enumerate(split.stems):
            path = folder / split.name / shard_name(stem)
            link_or_copy(f"{stem}.bin", path.with_name(f"{path.name}.npy"))
            if has_mask:
                link_or_copy(f"{stem}.mask", path.with_name(f"{path.name}_labels_mask.npy"))
            with path.with_name(f"{path.name}.csv.gz").open("wb") as file:
                _write_table(split, file, range(shard, shard + 1))
            split.advance(int(split.documents.table.num_tokens[shard]))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The tokens of the files in order."""
        if split.links:
            for stem in split.stems:
                yield from file_blocks(folder / split.name / f"{shard_name(stem)}.npy", _dtype(split))
        else:
            yield from file_blocks(folder / f"{split.name}.npy", _dtype(split))


def _dtype(split: SplitSource) -> str:
    return "<u2" if is_narrow(split) else "<u4"


def _write_table(split: SplitSource, file: BinaryIO, shards: range) -> None:
    """The lines of some shards' documents, numbered through all shards; tokens are counted from the first of them."""
    from isal import igzip
    from pyarrow import csv

    table = split.documents.table
    number = int(table.num_documents[: shards.start].sum())
    start = 0
    # Without a time, so that equal stores give equal bytes.
    with igzip.IGzipFile("", "wb", 1, file, mtime=0) as packed:
        for shard in shards:
            num_documents, done = int(table.num_documents[shard]), 0
            for sources in _sources(split, shard, num_documents):
                edges = start + table.all_starts(shard, done, len(sources))
                lines = _table(edges, number + done, sources, split.inputs)
                style = "needed" if _has_special(lines) else "none"
                csv.write_csv(lines, packed, csv.WriteOptions(include_header=False, quoting_style=style))
                done += len(sources)
            number, start = number + num_documents, start + int(table.num_tokens[shard])


def _sources(split: SplitSource, shard: int, num_documents: int) -> Iterator[Any]:
    """Where the documents of a shard came from, some at a time; without columns where nobody knows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(split.documents.table.local_path(shard, ".docs.parquet"))
    if split.stems and path.exists():
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(DOCUMENTS_AT_ONCE):
                yield pa.Table.from_batches([batch])
        return
    for first in range(0, num_documents, DOCUMENTS_AT_ONCE):
        yield pa.table({"nothing": pa.nulls(min(DOCUMENTS_AT_ONCE, num_documents - first))})


def _table(edges: Array, number: int, sources: Any, inputs: tuple[str, ...]) -> Any:
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


def _has_special(lines: Any) -> bool:
    """Whether a string has to be quoted; Arrow would quote all of them otherwise, as no other writer does."""
    from pyarrow import compute

    found = [compute.any(compute.match_substring_regex(lines[name], r'[",\r\n]')) for name in ("id", "src")]
    return any(one.as_py() for one in found)
