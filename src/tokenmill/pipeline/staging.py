"""A run whose input is a `Dataset` object: written down beside the store, read like any other, then removed."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engines import load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.inputs.datasets import Wanted, find_text_key, staged
from tokenmill.pipeline.request import Request
from tokenmill.progress import Display
from tokenmill.remote.bucket import is_remote

__all__ = ["staging"]


@contextmanager
def staging(dataset: Any, request: Request, display: Display) -> Iterator[Request]:
    """The request with the files that hold the dataset's documents as its inputs."""
    if request.rank is not None:
        raise UsageError(
            "a dataset object is no input for ranks, each of which would write it down; write it once, with "
            "to_parquet, and pass the files"
        )
    # Before hours may go into writing.
    request.policy(load_tokenizer(request.tokenizer))
    options = request.reading()
    text_key = request.text_key or find_text_key(dataset) or options.text_key
    keys = list(options.record_keys) or [text_key]
    wanted = Wanted(keys=keys, kept=list(options.keep_keys), limit=request.limit)
    with staged(dataset, _place(request), wanted, display) as folder:
        yield msgspec.structs.replace(request, inputs=[str(folder)], text_key=text_key)


def _place(request: Request) -> Path:
    """What the files are beside: the store, or where a store in a bucket is made."""
    if not is_remote(request.out):
        return Path(request.out)
    name = f"tokenmill-{hashlib.sha256(request.out.encode()).hexdigest()[:12]}"
    return Path(request.scratch or tempfile.gettempdir()) / name
