"""Batches straight from raw text, which is tokenized in the background while a model trains on what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.arguments import flag, one_of
from tokenmill.dataset.windows import WindowedRows
from tokenmill.errors import UsageError
from tokenmill.loaders import make_loader
from tokenmill.loaders.base import Loader
from tokenmill.loaders.text import Making, TokenizedText
from tokenmill.pipeline.preparing import prepare
from tokenmill.pipeline.request import Request
from tokenmill.remote.bucket import is_remote
from tokenmill.store.store import check_room

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
    """From raw text to batches, tokenized in the background and written to the store `cache` as it goes.

    Batches come at once, and the order of rows does not depend on how fast text is tokenized. In the first epoch
    rows are shuffled within windows of up to `window` of text ("1GB"), from the second on as `load(cache)`
    does it. `settings` are those of `load`, and the flags of `tokenmill tokenize`: text_key, workers,
    val_fraction, ... With `verbose`, a line on stderr says what each window took and what training waited for.
    """
    if cache is None:
        raise UsageError("raw text needs a cache, the directory that its tokens are written to: cache='data/tok'")
    if is_remote(str(cache)):
        raise UsageError(f"cache {cache} must be a directory of this machine: its shards are read while they are made")
    if seq_len is None or batch_size is None:
        missing = "seq_len, the number of tokens in a row" if seq_len is None else "batch_size, the rows of a batch"
        raise UsageError(f"stream needs a {missing}")
    making, flags, rest = _sort_settings(settings)
    rows = stream_rows(
        inputs,
        tokenizer=tokenizer,
        cache=cache,
        split=split,
        making=Making.checked(seq_len=seq_len, **making),
        vocab_size=vocab_size,
        verbose=verbose,
        **flags,
    )
    return make_loader(rows, framework=framework, batch_size=batch_size, **rest)


def stream_rows(
    inputs: str | Path | Sequence[str | Path],
    *,
    tokenizer: str,
    cache: str | Path,
    split: str = "train",
    making: Making,
    vocab_size: int | None = None,
    verbose: bool = False,
    **flags: Any,
) -> WindowedRows:
    """Rows of raw text, tokenized into the store `cache` from now on; `flags` are those of `tokenmill tokenize`."""
    names = [str(item) for item in ([inputs] if isinstance(inputs, (str, Path)) else inputs)]
    if flags.get("overwrite"):
        raise UsageError(f"overwrite would tokenize again at every start; remove {cache} to begin anew")
    request = Request.from_flags({"inputs": names, "out": str(cache), "tokenizer": str(tokenizer), **flags})
    splits = ["train", "val"] if request.val_fraction > 0 else ["train"]
    prepared = prepare(request)
    check_room(prepared.tokenizer.name, prepared.tokenizer.vocab_size, vocab_size)
    text = TokenizedText(prepared, one_of(split, splits, "split"), making, flag(verbose, "verbose"))
    return WindowedRows(text, making.seq_len)


def _sort_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What says how rows are made, what is a flag of `tokenize`, and what is a setting of the loader."""
    making = {name: settings[name] for name in Making.__struct_fields__ if name in settings}
    # A rank of a training is none of a run that many jobs share: one rank tokenizes, the others follow it.
    known = set(Request.__struct_fields__) - set(making) - {"rank", "world_size"}
    flags = {name: settings[name] for name in settings if name in known}
    return making, flags, {name: settings[name] for name in settings if name not in making and name not in flags}
