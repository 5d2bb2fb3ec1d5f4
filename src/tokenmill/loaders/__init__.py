"""Loaders: batches of a dataset for each framework, and `load`, which makes one in a line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenmill.arguments import flag, one_of, show, whole_number
from tokenmill.dataset.base import Rows
from tokenmill.dataset.packing import pack
from tokenmill.dataset.shuffling import shuffle as shuffle_rows
from tokenmill.errors import UsageError
from tokenmill.loaders.base import Loader
from tokenmill.store.documents import Documents
from tokenmill.store.opening import open_tokens
from tokenmill.store.store import TokenSource, check_vocabulary

__all__ = ["FRAMEWORKS", "Loader", "load", "make_loader", "make_rows"]

FRAMEWORKS = {
    "numpy": ("tokenmill.loaders.base", "Loader"),
    "torch": ("tokenmill.loaders.torch", "TorchLoader"),
    "jax": ("tokenmill.loaders.jax", "JaxLoader"),
    "grain": ("tokenmill.loaders.grain", "GrainLoader"),
    "tf": ("tokenmill.loaders.tf", "TfLoader"),
}


def load(
    source: str | Path | Sequence[str | Path] | TokenSource | Documents | Rows,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    framework: str = "numpy",
    packing: str | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
    long_documents: str | None = None,
    **settings: Any,
) -> Loader:
    """From a store to batches in one line: shuffled and endless unless told otherwise.

    The source is the path of a store, several of them, an open one, some of its documents, or rows that are made
    already, such as a mixture. Rows are made as `make_rows` does: concat, shuffled with seed 0. `settings` are
    those of `Loader`: rank, world_size, layout, document_mask, epochs, drop_last, dtype, prefetch, and for torch
    and JAX where batches should go.
    """
    if batch_size is None:
        raise UsageError("load needs a batch_size, the number of rows in a batch of one rank")
    making = {"packing": packing, "long_documents": long_documents, "shuffle": shuffle, "seed": seed}
    if isinstance(source, Rows):
        rows = source
        _check_made(rows, seq_len, {**making, "split": split})
        for leaf in rows.leaves():
            check_vocabulary(leaf.documents, vocab_size)
    else:
        documents = _find_documents(source, split)
        check_vocabulary(documents, vocab_size)
        if seq_len is None:
            raise UsageError("load needs a seq_len, the number of tokens in a row")
        told = {name: value for name, value in making.items() if value is not None}
        rows = make_rows(documents, seq_len=seq_len, **told)  # type: ignore[arg-type]
    return make_loader(rows, framework=framework, batch_size=batch_size, **settings)


def _find_documents(source: Any, split: str | None) -> Documents:
    if not isinstance(source, Documents):
        opened = source if isinstance(source, TokenSource) else open_tokens(source)
        return opened.split(split)
    if split is not None:
        raise UsageError(f"split={show(split)} has no effect: {source.name} are documents already; leave it out")
    return source


def _check_made(rows: Rows, seq_len: int | None, making: dict[str, Any]) -> None:
    """Refuse what says how to make rows that are made already."""
    if seq_len is not None and whole_number(seq_len, "seq_len") != rows.seq_len:
        raise UsageError(f"seq_len {seq_len} is not that of the rows, {rows.seq_len}; leave it out")
    for name, value in making.items():
        if value is not None:
            raise UsageError(f"{name}={show(value)} has no effect: the rows are made already; leave it out")


def make_rows(
    documents: Documents,
    *,
    seq_len: int,
    packing: str = "concat",
    long_documents: str = "split",
    shuffle: bool = True,
    seed: int = 0,
) -> Rows:
    """The rows of `load`: packed, and shuffled with the same seed."""
    rows: Rows = pack(documents, seq_len=seq_len, method=packing, long_documents=long_documents, seed=seed)  # type: ignore[arg-type]
    return shuffle_rows(rows, seed=seed) if flag(shuffle, "shuffle") else rows


def make_loader(rows: Any, *, framework: str = "numpy", **settings: Any) -> Loader:
    """A loader of rows for a framework."""
    module, name = FRAMEWORKS[one_of(framework, FRAMEWORKS, "framework")]
    kind = getattr(import_module(module), name)
    known = _settings_of(kind)
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{unknown!r} is no setting of framework {framework!r}; there are {', '.join(sorted(known))}")
    loader: Loader = kind(rows, **settings)
    return loader


def _settings_of(kind: type) -> set[str]:
    """What can be said to `load` for a framework: its own settings, those of a loader and those of its rows."""
    makers = [vars(base).get("__init__") for base in (*kind.__mro__, Loader)]
    own = {name for maker in (*makers, load) for name in getattr(maker, "__kwdefaults__", None) or ()}
    return own | {"batch_size", "seq_len"}
