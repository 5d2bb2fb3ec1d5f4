"""Raw text to training batches: tokenize once; choose everything else when loading.

text files --readers--> TextBatch --engine--> TokenBatch --store--> shards + manifest
                                                                      |
device <--loaders-- Batch <--Loader-- rows <--shuffle/mix-- rows <--pack

import tokenmill as tm

store = tm.tokenize("corpus/*.jsonl.zst", "data/tok", tokenizer="gpt2")
store = tm.open("data/tok")
print(store.decode(store.document(0)))

loader = tm.load("data/tok", seq_len=2048, batch_size=32, framework="torch")
for x, y in loader: ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import DataError, MissingDependencyError, StoreError, TokenmillError, UsageError

if TYPE_CHECKING:
    from tokenmill.dataset.base import Rows
    from tokenmill.dataset.mixing import mix
    from tokenmill.dataset.packing import pack
    from tokenmill.dataset.shuffling import shuffle
    from tokenmill.dataset.slicing import deny, skip, take
    from tokenmill.dataset.slicing import slice_ as slice  # noqa: A004
    from tokenmill.executors.ray import RayExecutor
    from tokenmill.exporters import export
    from tokenmill.loaders import load
    from tokenmill.loaders.base import Loader
    from tokenmill.loaders.batches import Batch
    from tokenmill.loaders.stream import stream
    from tokenmill.pipeline.run import tokenize
    from tokenmill.store.opening import open_tokens as open  # noqa: A004
    from tokenmill.store.store import TokenStore

__all__ = [
    "Batch",
    "DataError",
    "Loader",
    "MissingDependencyError",
    "RayExecutor",
    "Rows",
    "StoreError",
    "TokenStore",
    "TokenmillError",
    "UsageError",
    "deny",
    "export",
    "load",
    "mix",
    "open",
    "pack",
    "shuffle",
    "skip",
    "slice",
    "stream",
    "take",
    "tokenize",
]

__version__ = "0.1.0"

_LAZY = {
    "Batch": ("tokenmill.loaders.batches", "Batch"),
    "Loader": ("tokenmill.loaders.base", "Loader"),
    "RayExecutor": ("tokenmill.executors.ray", "RayExecutor"),
    "Rows": ("tokenmill.dataset.base", "Rows"),
    "TokenStore": ("tokenmill.store.store", "TokenStore"),
    "deny": ("tokenmill.dataset.slicing", "deny"),
    "export": ("tokenmill.exporters", "export"),
    "load": ("tokenmill.loaders", "load"),
    "mix": ("tokenmill.dataset.mixing", "mix"),
    "open": ("tokenmill.store.opening", "open_tokens"),
    "pack": ("tokenmill.dataset.packing", "pack"),
    "shuffle": ("tokenmill.dataset.shuffling", "shuffle"),
    "skip": ("tokenmill.dataset.slicing", "skip"),
    "slice": ("tokenmill.dataset.slicing", "slice_"),
    "stream": ("tokenmill.loaders.stream", "stream"),
    "take": ("tokenmill.dataset.slicing", "take"),
    "tokenize": ("tokenmill.pipeline.run", "tokenize"),
}


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is first used: `import tokenmill` must cost next to nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
