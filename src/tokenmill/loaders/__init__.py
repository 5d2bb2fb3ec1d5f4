"""Loaders: batches of a dataset for each framework, and `load`, which makes one in a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenmill.arguments import flag, one_of, show, whole_number
from tokenmill.dataset.base import Rows
from tokenmill.dataset.blocks import DEFAULT_BLOCK_TOKENS, BlockShuffledRows
from tokenmill.dataset.packing import pack
from tokenmill.dataset.shuffling import ShuffledRows
from tokenmill.dataset.shuffling import shuffle as shuffle_rows
from tokenmill.errors import UsageError
from tokenmill.loaders.base import Loader
from tokenmill.remote.bucket import is_remote
from tokenmill.store.documents import Documents
from tokenmill.store.opening import open_tokens
from tokenmill.store.store import TokenSource, check_vocabulary

__all__ = ["FRAMEWORKS", "Loader", "load", "make_loader", "make_rows"]

BLOCKS = "blocks"
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
    shuffle: bool | str | None = None,
    seed: int | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
    long_documents: str | None = None,
    block_tokens: int | None = None,
    cache_dir: str | Path | None = None,
    cache_bytes: str | int | None = None,
    fetch: str | None = None,
    tokenizer: str | None = None,
    **settings: Any,
) -> Loader:
    """From a store to batches in one line: shuffled and endless unless told otherwise.

    The source is the path of a store, several of them, an open one, some of its documents, or rows that are made
    already, such as a mixture. Rows are made as `make_rows` does: concat, shuffled with seed 0. `settings` are
    those of `Loader`: rank, world_size, layout, document_mask, epochs, drop_last, dtype, prefetch, and for torch
    and JAX where batches should go.

    A store in a bucket is read through a cache on this machine, as `open` does it. `shuffle="blocks"` shuffles rows
    among about `block_tokens` tokens at a time, for stores that fit neither the machine nor a global order.

    With a `tokenizer`, the source is raw text, which is tokenized into the store `cache` while batches
    are used; see `stream`, which takes the same settings.
    """
    making = _given(packing=packing, long_documents=long_documents, shuffle=shuffle, seed=seed)
    remote = _given(cache_dir=cache_dir, cache_bytes=cache_bytes, fetch=fetch)
    blocks = _given(block_tokens=block_tokens)
    if tokenizer is not None:
        _refuse({**blocks, **remote}, "is for stores, and this is raw text; leave it out")
        from tokenmill.loaders.stream import stream

        told = {**making, **_given(split=split, vocab_size=vocab_size)}
        return stream(source, seq_len, batch_size, tokenizer=tokenizer, framework=framework, **told, **settings)  # type: ignore[arg-type]
    if batch_size is None:
        raise UsageError("load needs a batch_size, the number of rows in a batch of one rank")
    slow = None
    if isinstance(source, Rows):
        _check_seq_len(source, seq_len)
        _refuse(
            {**making, **blocks, **_given(split=split), **remote},
            "has no effect: the rows are made already; leave it out",
        )
        rows = source
        for leaf in rows.leaves():
            check_vocabulary(leaf.documents, vocab_size)
    else:
        if shuffle == BLOCKS and is_remote(source):
            remote.setdefault("fetch", "shard")
        documents = _find_documents(source, split, remote)
        check_vocabulary(documents, vocab_size)
        if seq_len is None:
            raise UsageError("load needs a seq_len, the number of tokens in a row")
        rows = make_rows(documents, seq_len=seq_len, **making, **blocks)
        slow = _why_slow(rows, documents, fetch)
    loader = make_loader(rows, framework=framework, batch_size=batch_size, **settings)
    if shuffle == BLOCKS and loader.rank == 0:
        print(f"tokenmill: {rows.title()}", file=sys.stderr)
    if slow is not None:
        print(f"tokenmill: {slow}", file=sys.stderr)
    return loader


def _given(**settings: Any) -> dict[str, Any]:
    """What was said; None is what was not."""
    return {name: value for name, value in settings.items() if value is not None}


def _refuse(settings: dict[str, Any], why: str) -> None:
    """Refuse the first of settings that were given and cannot be meant."""
    for name, value in settings.items():
        raise UsageError(f"{name}={show(value)} {why}")


def _find_documents(source: Any, split: str | None, remote: dict[str, Any]) -> Documents:
    if isinstance(source, (Documents, TokenSource)):
        _refuse(remote, "has no effect: the store is open; pass it to tm.open")
    if not isinstance(source, Documents):
        opened = source if isinstance(source, TokenSource) else open_tokens(source, **remote)
        return opened.split(split)
    _refuse(_given(split=split), f"has no effect: {source.name} are documents already; leave it out")
    return source


def _check_seq_len(rows: Rows, seq_len: int | None) -> None:
    if seq_len is not None and whole_number(seq_len, "seq_len") != rows.seq_len:
        raise UsageError(f"seq_len {seq_len} is not that of the rows, {rows.seq_len}; leave it out")


def make_rows(
    documents: Documents,
    *,
    seq_len: int,
    packing: str = "concat",
    long_documents: str = "split",
    shuffle: bool | str = True,
    seed: int = 0,
    block_tokens: int | None = None,
) -> Rows:
    """The rows of `load`: packed, and shuffled with the same seed."""
    rows: Rows = pack(documents, seq_len=seq_len, method=packing, long_documents=long_documents, seed=seed)  # type: ignore[arg-type]
    if shuffle == BLOCKS:
        told = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        return shuffle_rows(rows, seed=seed, block_tokens=told)
    if block_tokens is not None:
        raise UsageError(f"block_tokens={show(block_tokens)} has no effect without shuffle='blocks'; leave it out")
    if isinstance(shuffle, str):
        raise UsageError(f"shuffle {show(shuffle)} must be True, False or 'blocks'")
    return shuffle_rows(rows, seed=seed) if flag(shuffle, "shuffle") else rows


def _why_slow(rows: Rows, documents: Documents, fetch: str | None) -> str | None:
    """What to say if shards cannot be fetched whole, because a cache does not hold what this order needs at once."""
    room = documents.table.room_bytes
    if room is None:
        return None
    so = f"do not fit the cache of {room:,} bytes, so rows are read by range, which is slow; pass a larger cache_bytes"
    if isinstance(rows, BlockShuffledRows):
        needed = f"two blocks of shards, {rows.room_bytes:,} bytes,"
        return None if rows.fits else f"{needed} {so}, or a smaller block_tokens"
    if fetch == "shard" and isinstance(rows, ShuffledRows) and documents.num_tokens * documents.dtype.itemsize > room:
        return f"all shards of {documents.name} {so}, or shuffle='blocks'"
    return None


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
