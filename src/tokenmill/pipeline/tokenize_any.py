"""`tokenmill.tokenize`: files, or rows that a Python program holds, into a store."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Display, DisplayName, Silence, as_display
from tokenmill.engines import load_tokenizer
from tokenmill.engines.tokenizer_objects import TokenizerLike, tokenizer_spec
from tokenmill.errors import UsageError
from tokenmill.executors.base import Executor
from tokenmill.formatting import format_seconds, plural
from tokenmill.inputs.dataset_objects import DatasetRows, find_dataset, find_text_key, staged
from tokenmill.inputs.row_objects import name_items
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.store.manifest import Manifest
from tokenmill.store.remote_store import open_store
from tokenmill.store.store import TokenStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.pipeline.run_flags import RunFlags

__all__ = ["tokenize"]

Inputs = str | os.PathLike[str] | Sequence[str] | Sequence[os.PathLike[str]] | Sequence[dict[str, Any]] | Any
"""Paths, or rows: a `Dataset`, a DataFrame, an Arrow table, a list of dicts."""


@overload
def tokenize(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    tokenizer: TokenizerLike,
    display: Display | DisplayName = "auto",
    executor: str | Executor = "local",
    rank: None = None,
    **flags: Unpack[RunFlags],
) -> TokenStore: ...


@overload
def tokenize(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    tokenizer: TokenizerLike,
    display: Display | DisplayName = "auto",
    executor: str | Executor = "local",
    rank: int | str,
    **flags: Unpack[RunFlags],
) -> TokenStore | None: ...


def tokenize(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    tokenizer: TokenizerLike,
    display: Display | DisplayName = "auto",
    executor: str | Executor = "local",
    **flags: Any,
) -> TokenStore | None:
    """Tokenize text into a store, or resume a run that was stopped.

    Inputs are paths and names as on the command line, or the rows of a `Dataset`, a DataFrame, an Arrow table or a list
    of dicts. The tokenizer is a path or name, or an object of tokenizers, transformers or sentencepiece. `flags` are
    those of `tokenmill tokenize` with underscores. Calling it again on a finished store opens the store.

    `display` is "auto" (a bar in a terminal or notebook, lines elsewhere, on stderr), "monitor", "json" or "quiet". An
    executor is named, or made by the caller: `RayExecutor(...)`. With `rank` and `world_size` it does a share of the
    work, and returns None while other ranks have work to do.
    """
    shown = as_display(display)
    alone = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else inputs
    rows = find_dataset(inputs) if (found := find_dataset(alone)) is None else found
    made = None if isinstance(executor, str) else executor
    if made is not None:
        made.warm(PRELOAD, b"")
    flags |= {"executor": executor} if isinstance(executor, str) else {}
    names = name_items(inputs) if rows is None else ["a dataset"]
    request = Request.from_flags(
        {"inputs": names, "out": os.fspath(out), "tokenizer": tokenizer_spec(tokenizer), **flags}
    )
    with nullcontext(request) if rows is None else _staging(rows, request, shown) as ready:
        outcome = run(ready, shown, made)
    if outcome.manifest is None:
        return None
    if not isinstance(shown, Silence):
        shown.say(_sum_up(request.out, outcome.manifest, outcome.observer))
    return open_store(request.out)


def _sum_up(out: str, manifest: Manifest, observer: Observer | None) -> str:
    """What the store holds, and how long it took if it was not finished before."""
    parts = [manifest.shown_records, plural(manifest.num_tokens, "token")]
    parts += [plural(manifest.num_rejects, "reject")] if manifest.num_rejects else []
    moment = None if observer is None else observer.snapshot
    took = "" if moment is None else f" in {format_seconds(moment.seconds)}"
    return f"store      {out}: {', '.join(parts)}{took}"


@contextmanager
def _staging(dataset: Any, request: Request, display: Display) -> Iterator[Request]:
    """Write a dataset object to files beside the store, for as long as the run needs them as its inputs."""
    if request.rank is not None:
        raise UsageError(
            "a dataset object is no input for ranks, each of which would write it to disk; write it once, with "
            "to_parquet, and pass the files"
        )
    # Check the flags before hours are spent on writing.
    request.policy(load_tokenizer(request.tokenizer))
    options = request.reading()
    text_key = request.text_key or find_text_key(dataset) or options.text_key
    keys = list(options.record_keys) or [text_key]
    rows = DatasetRows(keys=keys, kept=list(options.keep_keys), limit=request.limit)
    place = Path(request.out)
    if is_remote(request.out):
        name = f"tokenmill-{hashlib.sha256(request.out.encode()).hexdigest()[:12]}"
        place = Path(request.scratch or tempfile.gettempdir()) / name
    with staged(dataset, place, rows, display) as folder:
        yield msgspec.structs.replace(request, inputs=[str(folder)], text_key=text_key)
