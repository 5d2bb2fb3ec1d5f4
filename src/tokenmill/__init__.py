"""Raw text to training batches: tokenize once; choose everything else when loading.

text files --readers--> TextBatch --engine--> TokenBatch --store--> shards + manifest

import tokenmill as tm

store = tm.tokenize("corpus/*.jsonl.zst", "data/tok", tokenizer="gpt2")
store = tm.open("data/tok")
print(store.num_documents, store.num_tokens)
print(store.decode(store.document(0)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import DataError, MissingDependencyError, StoreError, TokenmillError, UsageError

if TYPE_CHECKING:
    from tokenmill.pipeline.run import tokenize
    from tokenmill.store.store import TokenStore
    from tokenmill.store.store import TokenStore as open  # noqa: A004, N813

__all__ = [
    "DataError",
    "MissingDependencyError",
    "StoreError",
    "TokenStore",
    "TokenmillError",
    "UsageError",
    "open",
    "tokenize",
]

__version__ = "0.1.0"

_LAZY = {
    "TokenStore": ("tokenmill.store.store", "TokenStore"),
    "open": ("tokenmill.store.store", "TokenStore"),
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
