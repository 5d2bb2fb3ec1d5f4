"""A few files of a data set that stand for all of it: for an estimate, fetching would take the most time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenmill.inputs.hub.repository import File

__all__ = ["choose_some", "weigh"]

SAMPLE_BYTES = 256_000_000
"""What may be fetched; more only if the files are larger than that."""
LEAST_FILES, MOST_FILES = 2, 16


def choose_some(files: Mapping[str, File]) -> list[str]:
    """Files at even distances; all of them where they are small together."""
    paths = list(files)
    total = sum(file.bytes for file in files.values())
    if total <= SAMPLE_BYTES or len(paths) <= LEAST_FILES:
        return paths
    count = min(max(SAMPLE_BYTES * len(paths) // total, LEAST_FILES), MOST_FILES)
    return [paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)]


def weigh(files: Mapping[str, File], chosen: Iterable[str]) -> float:
    """How many times their own size the chosen files stand for."""
    seen = sum(files[path].bytes for path in chosen)
    return sum(file.bytes for file in files.values()) / seen if seen else 1.0
