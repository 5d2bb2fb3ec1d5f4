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
    from tokenmill.checkpoint import Checkpoints
    from tokenmill.dataset.choose import allow, sample, where
    from tokenmill.dataset.mix import mix
    from tokenmill.dataset.pack import pack
    from tokenmill.dataset.pairs import pairs, prompts
    from tokenmill.dataset.rows import Rows
    from tokenmill.dataset.shuffle import shuffle
    from tokenmill.dataset.slice import deny, skip, take
    from tokenmill.dataset.slice import slice_ as slice  # noqa: A004
    from tokenmill.executors.ray import RayExecutor
    from tokenmill.filling.batch import Batch
    from tokenmill.filling.token_masks import Goldfish, RepetitionFilter
    from tokenmill.formats.export import export
    from tokenmill.formats.open import open_tokens as open  # noqa: A004
    from tokenmill.load_any import load
    from tokenmill.loaders.base import Loader
    from tokenmill.loaders.torch import TorchRows
    from tokenmill.pipeline.tokenize_any import tokenize
    from tokenmill.program import exit_on_error
    from tokenmill.step_clock import StepClock
    from tokenmill.store.store import TokenStore
    from tokenmill.streaming.stream import stream
    from tokenmill.tools.estimate import estimate
    from tokenmill.tools.inspect import inspect
    from tokenmill.tools.report import report
    from tokenmill.tools.verify import verify

__all__ = [
    "Batch",
    "Checkpoints",
    "DataError",
    "Goldfish",
    "Loader",
    "MissingDependencyError",
    "RayExecutor",
    "RepetitionFilter",
    "Rows",
    "StepClock",
    "StoreError",
    "TokenStore",
    "TokenmillError",
    "TorchRows",
    "UsageError",
    "allow",
    "deny",
    "estimate",
    "exit_on_error",
    "export",
    "inspect",
    "load",
    "mix",
    "open",
    "pack",
    "pairs",
    "prompts",
    "report",
    "sample",
    "shuffle",
    "skip",
    "slice",
    "stream",
    "take",
    "tokenize",
    "verify",
    "where",
]

__version__ = "0.1.0"

_LAZY = {
    "Batch": ("tokenmill.filling.batch", "Batch"),
    "Checkpoints": ("tokenmill.checkpoint", "Checkpoints"),
    "Goldfish": ("tokenmill.filling.token_masks", "Goldfish"),
    "Loader": ("tokenmill.loaders.base", "Loader"),
    "RayExecutor": ("tokenmill.executors.ray", "RayExecutor"),
    "RepetitionFilter": ("tokenmill.filling.token_masks", "RepetitionFilter"),
    "Rows": ("tokenmill.dataset.rows", "Rows"),
    "StepClock": ("tokenmill.step_clock", "StepClock"),
    "TokenStore": ("tokenmill.store.store", "TokenStore"),
    "TorchRows": ("tokenmill.loaders.torch", "TorchRows"),
    "allow": ("tokenmill.dataset.choose", "allow"),
    "deny": ("tokenmill.dataset.slice", "deny"),
    "estimate": ("tokenmill.tools.estimate", "estimate"),
    "exit_on_error": ("tokenmill.program", "exit_on_error"),
    "export": ("tokenmill.formats.export", "export"),
    "inspect": ("tokenmill.tools.inspect", "inspect"),
    "load": ("tokenmill.load_any", "load"),
    "mix": ("tokenmill.dataset.mix", "mix"),
    "open": ("tokenmill.formats.open", "open_tokens"),
    "pack": ("tokenmill.dataset.pack", "pack"),
    "pairs": ("tokenmill.dataset.pairs", "pairs"),
    "prompts": ("tokenmill.dataset.pairs", "prompts"),
    "report": ("tokenmill.tools.report", "report"),
    "sample": ("tokenmill.dataset.choose", "sample"),
    "shuffle": ("tokenmill.dataset.shuffle", "shuffle"),
    "skip": ("tokenmill.dataset.slice", "skip"),
    "slice": ("tokenmill.dataset.slice", "slice_"),
    "stream": ("tokenmill.streaming.stream", "stream"),
    "take": ("tokenmill.dataset.slice", "take"),
    "tokenize": ("tokenmill.pipeline.tokenize_any", "tokenize"),
    "verify": ("tokenmill.tools.verify", "verify"),
    "where": ("tokenmill.dataset.choose", "where"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import tokenmill` stays fast."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
