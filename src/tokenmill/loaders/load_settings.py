"""The settings of `load` and `stream` as keyword arguments with types, for editors and type checkers.

The classes and functions that take them check them, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy.typing as npt

from tokenmill.dataset.packing_report import LongDocuments
from tokenmill.dataset.pairs import LongPairs, LongPrompts
from tokenmill.loaders._extras import Others
from tokenmill.pipeline.run_flags import SharedRunFlags

__all__ = [
    "AnyPacking",
    "AnySettings",
    "FrameworkName",
    "JaxSettings",
    "LayoutName",
    "LoadSettings",
    "Packing",
    "RowFlags",
    "TorchSettings",
]

FrameworkName = Literal["numpy", "torch", "jax", "grain", "tf"]
LayoutName = Literal[
    "xy", "hf", "hf-flat", "flat", "sft", "megatron", "torchtitan", "olmo", "maxtext", "pairs", "prompts"
]
Packing = Literal["concat", "best-fit", "pad"]
AnyPacking = Literal["concat", "best-fit", "pad", "pairs", "prompts"]


class RowFlags(TypedDict, total=False):
    """How documents become rows, and in which order."""

    packing: AnyPacking
    long_documents: LongDocuments | LongPairs | LongPrompts | None
    shuffle: bool | Literal["blocks"]
    seed: int
    max_documents: int | None
    align: int | None


class LoaderSettings(Others, total=False):
    """The settings of `Loader` beside the layout, which decides the type of a batch."""

    document_mask: bool
    epochs: float | None
    drop_last: bool
    dtype: npt.DTypeLike
    prefetch: int
    verify: Literal["background"] | None


class TextSettings(SharedRunFlags, total=False):
    """The settings of raw text; the store that is made of it is the `cache`."""

    cache: str | Path | None
    window: str | int
    verbose: bool


class LoadSettings(LoaderSettings, TextSettings, total=False):
    """The settings of all frameworks, beside those whose value decides the type of a batch."""

    long_documents: LongDocuments | LongPairs | LongPrompts | None
    shuffle: bool | Literal["blocks"] | None
    seed: int | None
    max_documents: int | None
    align: int | None
    tokens_per_batch: int | None
    split: str | None
    vocab_size: int | None
    block_tokens: int | None
    cache_dir: str | Path | None
    cache_bytes: str | int | None
    fetch: Literal["shard", "range"] | None


class TorchSettings(LoadSettings, total=False):
    """The settings of PyTorch."""

    device: Any
    num_workers: int
    persistent_workers: bool


class JaxSettings(LoadSettings, total=False):
    """The settings of JAX."""

    sharding: Any


class AnySettings(TorchSettings, JaxSettings, total=False):
    """The settings of any framework."""
