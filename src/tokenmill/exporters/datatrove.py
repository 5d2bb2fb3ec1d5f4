"""datatrove and nanotron: bare tokens in `.ds`, document ends in `.ds.index`, and what made them in `.ds.metadata`.

Its readers take every `.ds` file in a folder, so each split has a folder of its own where there are several. A loss
mask becomes `.ds.loss`, which has the bytes of the store's `.mask`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenmill.exporters.base import Array, Shape, SplitSource, is_narrow
from tokenmill.exporters.writing import OutputFile, file_blocks, link_or_copy, shard_name, write_stream

__all__ = ["Datatrove"]


class Datatrove:
    """One merged `.ds` per split, or links to the shards, each with its own index."""

    shape: Shape = "documents"
    is_folder = True
    carries_mask = True
    can_link = True

    def check(self, split: SplitSource) -> None:
        """Every split fits."""

    def write(self, split: SplitSource, folder: Path) -> None:
        """Tokens, index, metadata, and the mask where there is one."""
        if split.links:
            self._link(split, folder)
            return
        path = folder / f"{split.name}.ds"
        write_stream(split, path, _dtype(split))
        with OutputFile(_beside(path, ".index")) as file:
            start = 0
            for lengths in split.documents.lengths():
                ends = np.cumsum(lengths) + start
                file.write(ends.astype("<u8"))
                start = int(ends[-1])
        if split.documents.mask is not None:
            write_stream(split, _beside(path, ".loss"), "u1", ".mask")
        _write_metadata(split, path, split.documents.num_tokens)

    def _link(self, split: SplitSource, folder: Path) -> None:
        table = split.documents.table
        for shard, stem in enumerate(split.stems):
            path = folder / f"{shard_name(stem)}.ds"
            link_or_copy(f"{stem}.bin", path)
            with OutputFile(_beside(path, ".index")) as file:
                file.write(table.all_starts(shard, 0, int(table.num_documents[shard]))[1:].astype("<u8"))
            if split.documents.mask is not None:
                link_or_copy(f"{stem}.mask", _beside(path, ".loss"))
            _write_metadata(split, path, int(table.num_tokens[shard]))
            split.advance(int(table.num_tokens[shard]))

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The tokens of the files in order."""
        names = [shard_name(stem) for stem in split.stems] if split.links else [split.name]
        for name in names:
            yield from file_blocks(folder / f"{name}.ds", _dtype(split))


def _dtype(split: SplitSource) -> str:
    return "<u2" if is_narrow(split) else "<u4"


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write_metadata(split: SplitSource, path: Path, num_tokens: int) -> None:
    size = np.dtype(_dtype(split)).itemsize
    lines = [f"{split.tokenizer}|{size}", str(num_tokens), format_metric(num_tokens)]
    _beside(path, ".metadata").write_text("\n".join(lines), "utf-8")


def format_metric(count: int) -> str:
    """Three digits, as `humanize.metric` has them: `1.50 kT`, `380 MT`."""
    exponent = len(str(count)) - 1
    shown = f"{count / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f}"
    return f"{shown} {['', 'k', 'M', 'G', 'T', 'P', 'E'][exponent // 3]}T"
