"""Loaders: batches of a dataset for each framework, and `load`, which makes one in a line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenmill.dataset.base import Rows
from tokenmill.dataset.packing import pack
from tokenmill.dataset.shuffling import shuffle as shuffle_rows
from tokenmill.errors import UsageError
from tokenmill.loaders.base import Loader
from tokenmill.store.documents import Documents
from tokenmill.store.opening import check_vocabulary, open_tokens
from tokenmill.store.store import TokenSource

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
    *,
    batch_size: int,
    seq_len: int | None = None,
    framework: str = "numpy",
    packing: str = "concat",
    shuffle: bool = True,
    seed: int = 0,
    split: str | None = None,
    vocab_size: int | None = None,
    long_documents: str = "split",
    **settings: Any,
) -> Loader:
    """From a store to batches in one line: shuffled and endless unless told otherwise.

    The source is the path of a store, several of them, an open one, some of its documents, or rows that are made
    already, such as a mixture. `settings` are those of `Loader`: rank, world_size, layout, document_mask, epochs,
    dtype, prefetch, and for torch and JAX where batches should go.
    """
    if isinstance(source, Rows):
        if seq_len not in (None, source.seq_len):
            raise UsageError(f"seq_len {seq_len} is not that of the rows, {source.seq_len}; leave it out")
        if (packing, split, long_documents) != ("concat", None, "split"):
            raise UsageError("the rows are made already; packing, split and long_documents are for stores")
        return make_loader(source, framework=framework, batch_size=batch_size, **settings)
    if seq_len is None:
        raise UsageError("load needs a seq_len, the number of tokens in a row")
    if isinstance(source, Documents):
        documents = source
    else:
        opened = source if isinstance(source, TokenSource) else open_tokens(source)
        check_vocabulary(opened, vocab_size)
        documents = opened.split(split)
    rows = make_rows(
        documents, seq_len=seq_len, packing=packing, long_documents=long_documents, shuffle=shuffle, seed=seed
    )
    return make_loader(rows, framework=framework, batch_size=batch_size, **settings)


def make_rows(
    documents: Documents, *, seq_len: int, packing: str, long_documents: str, shuffle: bool, seed: int
) -> Rows:
    """The rows of `load`: packed, and shuffled with the same seed."""
    rows: Rows = pack(documents, seq_len=seq_len, method=packing, long_documents=long_documents, seed=seed)  # type: ignore[arg-type]
    return shuffle_rows(rows, seed=seed) if shuffle else rows


def make_loader(rows: Any, *, framework: str = "numpy", **settings: Any) -> Loader:
    """A loader of rows for a framework."""
    if framework not in FRAMEWORKS:
        raise UsageError(f"framework {framework!r} is unknown; expected {', '.join(FRAMEWORKS)}")
    module, name = FRAMEWORKS[framework]
    loader: Loader = getattr(import_module(module), name)(rows, **settings)
    return loader
