"""Which files of a split hold its documents: those of the kind that most of them are, as the `datasets` library counts.

Kinds that are not read here count as well: what is CSV with a word list in a text file is no data set of one text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

__all__ = ["Sorted", "is_data", "sort_out"]

READ = {
    "parquet": "parquet",
    "geoparquet": "parquet",
    "gpq": "parquet",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "txt": "text",
}
"""The kinds that are read, by the endings that files of them have."""
NOT_READ = frozenset([
    "csv", "tsv", "arrow", "lance", "vortex", "tar", "zip", "xml", "h5", "hdf5", "conll", "conllu", "tsfile", "pdf",
    "jpg", "jpeg", "png", "gif", "bmp", "tif", "tiff", "webp", "wav", "mp3", "flac", "ogg", "opus",
    "mp4", "avi", "mov", "mkv", "webm", "ply", "stl", "glb", "gltf", "nii", "pdb", "ent", "cif", "mmcif",
    "fa", "fasta", "fna", "faa", "fq", "fastq", "gb", "gbk", "genbank",
])  # fmt: skip
"""Endings of the usual data files of other kinds."""
PREFERRED = ("parquet", "lance", "vortex", "arrow", "jsonl", "json", "csv")
"""Which of two endings counts for more if there are as many files of each."""
PACKED = frozenset(["zip", "tar", "bz2", "xz", "lz4", "7z", "rar"])
DESCRIPTIONS = frozenset(["metadata.csv", "metadata.jsonl", "metadata.parquet"])
"""What lies beside images and the like; it is the data only where there is nothing else."""


class Sorted(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a split, sorted out."""

    paths: list[str]
    """Of the kind that most are, in the order of their names."""
    num_others: int
    """Data files of other kinds."""
    not_read: str | None
    """The ending of files that hold documents and cannot be read here; None: all can."""


def is_data(path: str) -> bool:
    """Whether a file is data of some kind by its name."""
    return bool(_endings(path))


def sort_out(paths: Iterable[str]) -> Sorted | None:
    """Tell the files that hold the documents from the others; None where no file is data."""
    endings = {path: found for path in paths if (found := _endings(path))}
    if not endings:
        return None
    counted = [path for path in endings if path.rpartition("/")[2] not in DESCRIPTIONS] or list(endings)
    counts = Counter(ending for path in counted for ending in endings[path])
    most = max(counts, key=lambda ending: (counts[ending], *(ending == other for other in PREFERRED), ending))
    same = {ending for ending, kind in READ.items() if kind == READ.get(most)} | {most, "zip"}
    chosen = sorted(path for path, found in endings.items() if same.intersection(found))
    not_read = most if most not in READ else next(filter(None, (_obstacle(path, READ[most]) for path in chosen)), None)
    return Sorted(paths=chosen, num_others=len(endings) - len(chosen), not_read=not_read)


def _endings(path: str) -> list[str]:
    """What a name says of its kind: `a.jsonl.gz` is `jsonl`."""
    words = path.rpartition("/")[2].lower().split(".")[1:]
    return [word for word in words if word in READ or word in NOT_READ]


def _obstacle(path: str, kind: str) -> str | None:
    """How a file is packed, if that cannot be undone."""
    last = path.rpartition(".")[2].lower()
    return last if last in PACKED or (kind == "parquet" and last in ("gz", "zst")) else None
