"""Token formats of other projects, one file each: recognise its files, say what is in them, and write them.

Format modules are imported when they are needed, and import heavy packages (torch, pyarrow) only where they use them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tokenmill.formats.base import Exporter, Opener

__all__ = ["FORMATS", "load_format", "load_openers"]

FORMATS = {
    "megatron": ("tokenmill.formats.megatron", "Megatron"),
    "llmc": ("tokenmill.formats.llmc", "LlmC"),
    "nanogpt": ("tokenmill.formats.nanogpt", "NanoGpt"),
    "datatrove": ("tokenmill.formats.datatrove", "Datatrove"),
    "npy": ("tokenmill.formats.npy", "NumpyArrays"),
    "olmo": ("tokenmill.formats.olmo", "Olmo"),
    "pt": ("tokenmill.formats.pt", "TensorFiles"),
    "parquet": ("tokenmill.formats.parquet", "ParquetRows"),
    "hf": ("tokenmill.formats.hf", "HfDataset"),
    "mds": ("tokenmill.formats.mds", "MosaicShards"),
    "litdata": ("tokenmill.formats.litdata", "LitChunks"),
    "arrayrecord": ("tokenmill.formats.arrayrecord", "ArrayRecords"),
}
"""By the name that `export` takes, in the order in which `open` asks whether they recognise a file.

A format that knows its files by their content comes before one that takes any file of the same suffix.
"""


@cache
def load_format(name: str) -> Exporter:
    """Import a format by its name."""
    module, class_name = FORMATS[name]
    loaded: Exporter = getattr(import_module(module), class_name)()
    return loaded


@cache
def load_openers() -> tuple[Opener, ...]:
    """Import all formats, and return those that can be opened."""
    return tuple(loaded for loaded in map(load_format, FORMATS) if isinstance(loaded, Opener))
