"""Batches straight from raw text, which is tokenized in the background while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tokenmill.arguments import flag, is_remote, one_of
from tokenmill.engines.tokenizer_objects import TokenizerLike, tokenizer_spec
from tokenmill.errors import UsageError
from tokenmill.inputs.row_objects import name_items
from tokenmill.loaders import make_loader
from tokenmill.pipeline.plan.prepare import prepare
from tokenmill.pipeline.request import Request
from tokenmill.store.store import check_vocabulary
from tokenmill.streaming.tokenized_text import RowSettings, TokenizedText
from tokenmill.streaming.windows import WindowedRows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.filling.batch import NumpyBatch
    from tokenmill.loaders.base import Loader
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

__all__ = ["stream"]

Paths = str | Path | Sequence[str | Path]


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: Literal["numpy"] = "numpy",
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[LoadSettings],
) -> Loader[NumpyBatch]: ...


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: Literal["torch"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[TorchSettings],
) -> TorchLoader[TorchBatch]: ...


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: Literal["jax"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[JaxSettings],
) -> JaxLoader[JaxBatch]: ...


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: Literal["tf"],
    packing: Packing | None = None,
    layout: Literal["xy"] = "xy",
    **settings: Unpack[LoadSettings],
) -> TfLoader[TfBatch]: ...


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: Literal["grain"],
    packing: AnyPacking | None = None,
    layout: LayoutName = "xy",
    **settings: Unpack[LoadSettings],
) -> GrainLoader: ...


@overload
def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    framework: FrameworkName = "numpy",
    packing: AnyPacking | None = None,
    layout: LayoutName = "xy",
    **settings: Unpack[AnySettings],
) -> Loader[Any]: ...


def stream(
    inputs: Paths,
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: TokenizerLike,
    cache: str | Path | None = None,
    framework: str = "numpy",
    split: str | None = None,
    vocab_size: int | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Any:
    """Make a loader of raw text, which is tokenized in the background into the store `cache`.

    The first batch comes at once, and the order of rows does not depend on the speed of tokenizing. In the first epoch,
    rows are shuffled within windows of up to `window` of text ("1GB"); from the second epoch on, they are shuffled as
    `load(cache)` does. `settings` are those of `load`, and the flags of `tokenmill tokenize`: text_key, workers,
    val_fraction, ... With `verbose`, a line on stderr says how long each window took and how long the training waited
    for it.
    """
    if cache is None:
        raise UsageError("raw text needs a cache, the directory to write its tokens to: cache='data/tok'")
    if is_remote(str(cache)):
        raise UsageError(
            f"cache {cache} must be a directory of this machine, because its shards are read while they are written"
        )
    if seq_len is None or batch_size is None:
        missing = "seq_len, the number of tokens in a row" if seq_len is None else "batch_size, the rows of a batch"
        raise UsageError(f"stream needs a {missing}")
    given = {name: settings.pop(name) for name in RowSettings.__struct_fields__ if name in settings}
    # A rank of the training is not a rank of the run: one process tokenizes, and the others follow it.
    known = set(Request.__struct_fields__) - {*given, "rank", "world_size"}
    flags = {name: settings.pop(name) for name in list(settings) if name in known}
    if flags.get("overwrite"):
        raise UsageError(f"overwrite would tokenize again at every start; remove {cache} to start over")
    names = name_items(inputs, "stream reads files; make a store of rows with tokenmill.tokenize, and load that")
    row_settings = RowSettings(seq_len=seq_len, **given)
    request = Request.from_flags({"inputs": names, "out": str(cache), "tokenizer": tokenizer_spec(tokenizer), **flags})
    if request.chosen_key is not None or request.prompts_only:
        raise UsageError(
            "preference pairs and prompts are not streamed; make a store of them with tm.tokenize, and load that with "
            "packing='pairs' or packing='prompts'"
        )
    splits = ["train", "val"] if request.val_fraction > 0 else ["train"]
    prepared = prepare(request)
    check_vocabulary(prepared.tokenizer.name, prepared.tokenizer.vocab_size, vocab_size)
    text = TokenizedText(prepared, one_of(split or "train", splits, "split"), row_settings, flag(verbose, "verbose"))
    rows = WindowedRows(text, seq_len)
    loader = make_loader(rows, framework=framework, batch_size=batch_size, **settings)
    rows.rows_per_batch = getattr(loader, "global_batch_size", batch_size)
    return loader
