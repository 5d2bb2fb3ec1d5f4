"""Batches straight from raw text, which is tokenized in the background while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.arguments import flag, is_remote, one_of
from tokenmill.errors import UsageError
from tokenmill.loaders import make_loader
from tokenmill.loaders.base import Loader
from tokenmill.pipeline.plan.prepare import prepare
from tokenmill.pipeline.request import Request
from tokenmill.store.store import check_vocabulary
from tokenmill.streaming.tokenized_text import RowSettings, TokenizedText
from tokenmill.streaming.windows import WindowedRows

__all__ = ["stream"]


def stream(
    inputs: str | Path | Sequence[str | Path],
    seq_len: int | None = None,
    batch_size: int | None = None,
    *,
    tokenizer: str,
    cache: str | Path | None = None,
    framework: str = "numpy",
    split: str = "train",
    vocab_size: int | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Loader:
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
    names = [str(item) for item in ([inputs] if isinstance(inputs, (str, Path)) else inputs)]
    row_settings = RowSettings(seq_len=seq_len, **given)
    request = Request.from_flags({"inputs": names, "out": str(cache), "tokenizer": str(tokenizer), **flags})
    if request.chosen_key is not None or request.prompts_only:
        raise UsageError(
            "preference pairs and prompts are not streamed; make a store of them with tm.tokenize, and load that with "
            "packing='pairs' or packing='prompts'"
        )
    splits = ["train", "val"] if request.val_fraction > 0 else ["train"]
    prepared = prepare(request)
    check_vocabulary(prepared.tokenizer.name, prepared.tokenizer.vocab_size, vocab_size)
    text = TokenizedText(prepared, one_of(split, splits, "split"), row_settings, flag(verbose, "verbose"))
    rows = WindowedRows(text, seq_len)
    loader = make_loader(rows, framework=framework, batch_size=batch_size, **settings)
    rows.rows_per_batch = getattr(loader, "global_batch_size", batch_size)
    return loader
