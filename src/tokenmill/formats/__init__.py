"""Token formats of other projects, one file each: recognise its files, say what is in them, and write them.

Most formats are one of two kinds, whose writing and reading back they share: bare ids and an index (`BareTokens` in
`_token_blocks`), or rows in several files (`RowFiles` in `_row_files`). Format modules are imported when they are
needed, and import heavy packages (torch, pyarrow) only where they use them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal

from tokenmill.formats.base import Exporter, Opener

__all__ = ["FORMATS", "FormatName", "load_format", "load_openers"]

FormatName = Literal[
    "megatron", "llmc", "nanogpt", "datatrove", "npy", "olmo", "pt", "parquet", "hf", "mds", "litdata", "arrayrecord"
]
FORMATS: dict[FormatName, str] = {
    "megatron": "Megatron",
    "llmc": "LlmC",
    "nanogpt": "NanoGpt",
    "datatrove": "Datatrove",
    "npy": "NumpyArrays",
    "olmo": "Olmo",
    "pt": "TensorFiles",
    "parquet": "ParquetRows",
    "hf": "HfDataset",
    "mds": "MosaicShards",
    "litdata": "LitChunks",
    "arrayrecord": "ArrayRecords",
}
"""By the name that `export` takes, which is that of its module, the class of each format.

The order is that in which `open` asks formats whether they recognise a file.
A format that knows its files by their content comes before one that takes any file of the same suffix.
"""


@cache
def load_format(name: FormatName) -> Exporter:
    """Import a format by its name."""
    loaded: Exporter = getattr(import_module(f"tokenmill.formats.{name}"), FORMATS[name])()
    return loaded


@cache
def load_openers() -> tuple[Opener, ...]:
    """Import all formats, and return those that can be opened."""
    return tuple(loaded for loaded in map(load_format, FORMATS) if isinstance(loaded, Opener))
