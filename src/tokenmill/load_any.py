"""`tokenmill.load`: a store, a URL or raw text in, a loader out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tokenmill.arguments import flag, is_remote, show, whole_number
from tokenmill.dataset.block_shuffle import DEFAULT_BLOCK_TOKENS, BlockShuffledRows
from tokenmill.dataset.pack import LONGEST_ROW, pack
from tokenmill.dataset.pairs import pairs, prompts
from tokenmill.dataset.rows import Rows
from tokenmill.dataset.shuffle import ShuffledRows
from tokenmill.dataset.shuffle import shuffle as shuffle_rows
from tokenmill.engines.tokenizer_objects import TokenizerLike
from tokenmill.errors import UsageError
from tokenmill.formats.open import open_tokens
from tokenmill.loaders import make_loader
from tokenmill.loaders.base import Loader
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource, check_vocabulary

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.filling.batch import NumpyBatch
    from tokenmill.loaders.grain import GrainLoader
    from tokenmill.loaders.jax import JaxBatch, JaxLoader
    from tokenmill.loaders.load_settings import (
        AnyPacking,
        AnySettings,
        FrameworkName,
        JaxSettings,
        LayoutName,
        LoadSettings,
        Packing,
        TorchSettings,
    )
    from tokenmill.loaders.tf import TfBatch, TfLoader
    from tokenmill.loaders.torch import TorchBatch, TorchLoader

__all__ = ["load", "make_rows"]

Paths = str | Path | Sequence[str | Path]

BLOCKS = "blocks"
SPECIAL: dict[str, Any] = {"pairs": pairs, "prompts": prompts}
"""Rows of documents that are not packed."""


@overload
def load(
    source: Paths | TokenSource | Documents,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: Literal["numpy"] = "numpy",
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[LoadSettings],
) -> Loader[NumpyBatch]: ...


@overload
def load(
    source: Paths | TokenSource | Documents,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: Literal["torch"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[TorchSettings],
) -> TorchLoader[TorchBatch]: ...


@overload
def load(
    source: Paths | TokenSource | Documents,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: Literal["jax"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[JaxSettings],
) -> JaxLoader[JaxBatch]: ...


@overload
def load(
    source: Paths | TokenSource | Documents,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: Literal["tf"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[LoadSettings],
) -> TfLoader[TfBatch]: ...


@overload
def load(
    source: Paths | TokenSource | Documents | Rows,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: Literal["grain"],
    packing: AnyPacking | None = None,
    layout: LayoutName = "xy",
    **settings: Unpack[LoadSettings],
) -> GrainLoader: ...


@overload
def load(
    source: Paths | TokenSource | Documents | Rows,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    framework: FrameworkName = "numpy",
    packing: AnyPacking | None = None,
    layout: LayoutName = "xy",
    **settings: Unpack[AnySettings],
) -> Loader[Any]: ...


def load(
    source: Paths | TokenSource | Documents | Rows,
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
    max_documents: int | None = None,
    align: int | None = None,
    tokens_per_batch: int | None = None,
    block_tokens: int | None = None,
    cache_dir: str | Path | None = None,
    cache_bytes: str | int | None = None,
    fetch: str | None = None,
    tokenizer: TokenizerLike | None = None,
    **settings: Any,
) -> Any:
    """Make a loader of a store in one line: by default, its batches are shuffled and endless.

    The source is the path of a store, several paths, an open store, some of its documents, or existing rows, such as a
    mixture. By default, `make_rows` packs rows with concat and shuffles them with seed 0. `settings` are those of
    `Loader`: rank, world_size, layout, document_mask, epochs, drop_last, dtype, prefetch, verify, and for torch and JAX
    where batches should go.

    A store of preference pairs needs `packing="pairs"`, and one of prompts `packing="prompts"`; `seq_len` is then the
    most tokens of either text.

    `tokens_per_batch` is a budget in place of `batch_size`: a batch has as many rows as fit, or with best-fit packing
    as many documents, of at most `seq_len` tokens each.

    A store in a bucket is read through a cache on this machine, as `open` does. `shuffle="blocks"` shuffles rows
    among about `block_tokens` tokens at a time, for stores that do not fit on the machine.

    With a `tokenizer`, the source is raw text, which is tokenized into the store `cache` while the model trains; see
    `stream`, which takes the same settings.
    """
    row_settings = _given(
        packing=packing,
        long_documents=long_documents,
        max_documents=max_documents,
        align=align,
        shuffle=shuffle,
        seed=seed,
    )
    remote = _given(cache_dir=cache_dir, cache_bytes=cache_bytes, fetch=fetch)
    blocks, budget = _given(block_tokens=block_tokens), _given(tokens_per_batch=tokens_per_batch)
    if tokenizer is not None:
        checked = _given(verify=settings.get("verify"))
        _refuse({**blocks, **budget, **remote, **checked}, "is for stores, and this is raw text; leave it out")
        from tokenmill.streaming.stream import stream

        passed = {**row_settings, **_given(split=split, vocab_size=vocab_size)}
        passed = {**passed, **settings, "tokenizer": tokenizer, "framework": framework}
        return stream(source, seq_len, batch_size, **passed)  # type: ignore[arg-type]
    longest: int | None = None
    if budget:
        seq_len, batch_size, longest = _share_budget(source, seq_len, batch_size, packing, budget["tokens_per_batch"])
    if batch_size is None:
        raise UsageError(f"load needs a batch_size, the number of rows in a batch of one rank{_name_unknown(settings)}")
    if isinstance(source, Rows):
        if seq_len is not None and whole_number(seq_len, "seq_len") != source.seq_len:
            raise UsageError(f"seq_len {seq_len} is not that of the rows, {source.seq_len}; leave it out")
        passed = {**row_settings, **blocks, **_given(split=split), **remote}
        _refuse(passed, "has no effect: the rows are made already; leave it out")
        rows = source
        for leaf in rows.leaves():
            check_vocabulary(leaf.documents.name, leaf.documents.vocab_size, vocab_size)
    else:
        if is_remote(source) and shuffle == BLOCKS:
            remote.setdefault("fetch", "shard")
        documents = _find_documents(source, split, remote)
        check_vocabulary(documents.name, documents.vocab_size, vocab_size)
        if seq_len is None:
            raise UsageError("load needs a seq_len, the number of tokens in a row")
        rows = make_rows(documents, seq_len=seq_len, max_length=longest, **row_settings, **blocks)
    loader = make_loader(rows, framework=framework, batch_size=batch_size, others=load.__kwdefaults__ or (), **settings)
    if shuffle == BLOCKS and loader.rank == 0:
        print(f"tokenmill: {rows.title()}", file=sys.stderr)
    if rows.is_remote and rows is not source:
        _warn_of_small_cache(rows, documents, fetch)
    return loader


def _name_unknown(settings: dict[str, Any]) -> str:
    """Name a setting that may be a misspelt `batch_size`."""
    from tokenmill.loaders.load_settings import AnySettings

    unknown = [name for name in settings if name not in {*AnySettings.__annotations__, "layout"}]
    return f"; there is no setting {unknown[0]!r}" if unknown else ""


def _given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _refuse(settings: dict[str, Any], why: str) -> None:
    """Raise an error for the first of these settings, if there is any."""
    for name, value in settings.items():
        raise UsageError(f"{name}={show(value)} {why}")


def _share_budget(
    source: Any, seq_len: int | None, batch_size: int | None, packing: str | None, budget: Any
) -> tuple[int, int, int | None]:
    """Return the length of rows, their number in a batch, and the longest document, for a budget of tokens.

    Of concat rows, as many as fit. Of documents, a batch is one row of the whole budget: so a batch has as many as fit,
    best-fit packing decides which, and order, ranks and resuming are those of rows.
    """
    budget = whole_number(budget, "tokens_per_batch", 1, LONGEST_ROW)
    if isinstance(source, Rows):
        raise UsageError(f"tokens_per_batch={budget} has no effect: the rows are made already; pass a batch_size")
    if batch_size is not None:
        raise UsageError(f"tokens_per_batch={budget} decides the size of a batch; leave batch_size={batch_size} out")
    if seq_len is None:
        raise UsageError("tokens_per_batch needs a seq_len, the length of a row or of the longest document")
    seq_len = whole_number(seq_len, "seq_len", 1, LONGEST_ROW)
    if budget < seq_len:
        raise UsageError(f"tokens_per_batch={budget} is less than a row of seq_len {seq_len}; pass at least that many")
    if packing in (None, "concat"):
        return seq_len, budget // seq_len, None
    if packing == "best-fit":
        return budget, 1, seq_len
    raise UsageError(f"packing={show(packing)} would fill batches with padding; use 'best-fit' with tokens_per_batch")


def _find_documents(source: Any, split: str | None, remote: dict[str, Any]) -> Documents:
    """Return the documents of a split, or the documents that the source is."""
    if isinstance(source, (Documents, TokenSource)):
        _refuse(remote, "has no effect: the store is open; pass it to tm.open")
    if not isinstance(source, Documents):
        opened = source if isinstance(source, TokenSource) else open_tokens(source, **remote)
        return opened.split(split)
    _refuse(_given(split=split), f"has no effect: {source.name} are documents already; leave it out")
    return source


def make_rows(
    documents: Documents,
    *,
    seq_len: int,
    packing: str = "concat",
    long_documents: str | None = None,
    shuffle: bool | str = True,
    seed: int = 0,
    block_tokens: int | None = None,
    **shape: int | None,
) -> Rows:
    """Pack documents into rows and shuffle them with the same seed, as `load` does.

    `shape` is `max_documents`, `align` and `max_length` of `pack`.
    """
    given: Any = _given(long_documents=long_documents)
    given_shape: Any = _given(**shape)
    rows: Rows
    if isinstance(packing, str) and packing in SPECIAL:
        _refuse(given_shape, f"has no effect on {packing}; leave it out")
        rows = SPECIAL[packing](documents, max_length=seq_len, **given)
    else:
        rows = pack(documents, seq_len=seq_len, method=packing, seed=seed, **given_shape, **given)  # type: ignore[arg-type]
    if shuffle == BLOCKS:
        size = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        return shuffle_rows(rows, seed=seed, block_tokens=size)
    if block_tokens is not None:
        raise UsageError(f"block_tokens={show(block_tokens)} has no effect without shuffle='blocks'; leave it out")
    if isinstance(shuffle, str):
        raise UsageError(f"shuffle {show(shuffle)} must be True, False or 'blocks'")
    return shuffle_rows(rows, seed=seed) if flag(shuffle, "shuffle") else rows


def _warn_of_small_cache(rows: Rows, documents: Documents, fetch: str | None) -> None:
    """Warn if shards cannot be fetched whole, because the cache does not hold all that this order needs at a time."""
    room = documents.table.room_bytes or 0
    so = f"do not fit the cache of {room:,} bytes, so rows are read by range, which is slow; pass a larger cache_bytes"
    if isinstance(rows, BlockShuffledRows):
        if not rows.fits:
            needed = f"two blocks of shards, {rows.room_bytes:,} bytes,"
            print(f"tokenmill: {needed} {so}, or a smaller block_tokens", file=sys.stderr)
    elif fetch == "shard" and isinstance(rows, ShuffledRows) and documents.num_tokens * documents.dtype.itemsize > room:
        print(f"tokenmill: all shards of {documents.name} {so}, or shuffle='blocks'", file=sys.stderr)
