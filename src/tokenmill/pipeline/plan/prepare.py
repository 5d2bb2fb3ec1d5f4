"""Resolve and check a request before the run writes anything: its inputs, tokenizer and engine.

The run makes a `Job` of what was prepared, which it sends to every process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Display, Preparation, Silence
from tokenmill.engines import EngineChoice, SpecialTokens, Tokenizer, choose, load_tokenizer
from tokenmill.inputs import expand_inputs, text_key_of
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.pipeline.plan.ranks import WHOLE, Share, find_share
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.settings import OnError, Settings
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import input_path

__all__ = ["Job", "Prepared", "prepare"]

RENDERED = 12
"""The memory that a conversation takes while it is rendered and encoded, in sizes of its record."""


@dataclass(frozen=True)
class Prepared:
    """A checked request with its tokenizer, engine and input files."""

    request: Request
    tokenizer: Tokenizer
    choice: EngineChoice
    files: list[InputFile]
    settings: Settings
    share: Share = WHOLE
    weights: tuple[float, ...] = ()
    """For a sample of the inputs: how many times its own size each file represents."""
    seconds: float = 0.0
    """How long the preparation took."""

    @property
    def tokenizer_bytes(self) -> int:
        """The size of the tokenizer's main file, from which the memory of engines is estimated."""
        return len(self.tokenizer.files[self.tokenizer.main_file])


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a process needs to run any task of a run."""

    store: str
    inputs: list[InputFile]
    settings: Settings
    engine: str
    vocab_size: int
    special_ids: list[int]
    on_error: OnError
    batch_size: int | None
    worker_bytes: int
    """The memory limit of one worker."""
    profile: str | None = None
    """The file to which the worker with this job writes its profile."""
    mirror: str | None = None
    """The URL of the store if it is in a bucket; `store` is a scratch directory then."""
    plan_tag: str | None = None
    """The ETag of the plan in the bucket."""
    scratch: str | None = None
    """The folder in which machines of a cluster create their own scratch directories."""
    share: Share = WHOLE
    attempt: str = ""
    """A unique word for the names of temporary files."""
    shares_disk: bool = True
    """Whether its processes share a disk with the machine that started the run."""
    versions: dict[str, str] = {}
    """The packages that a process must have in the same version."""
    is_followed: bool = False
    """Whether a training reads each task as soon as it is published."""
    note_seconds: float = 0.25
    """How often a process says what it has done so far."""

    def reading(self, *, packed: bool = False) -> ReadOptions:
        """How its inputs are read within the memory of a worker; a conversation needs more of it than a text."""
        memory = self.worker_bytes if self.settings.supervision is None else self.worker_bytes // RENDERED
        return msgspec.structs.replace(self.settings.reading, memory_bytes=memory, packed=packed)

    @property
    def stops_at_damage(self) -> bool:
        """Whether a damaged frame ends the run: what a training has read cannot be taken back."""
        return self.on_error == "fail" or self.is_followed


def prepare(
    request: Request,
    display: Display | None = None,
    *,
    on_engine: Callable[[Tokenizer, str, SpecialTokens], None] | None = None,
    is_sample: bool = False,
) -> Prepared:
    """Find and check everything that a request names, without writing to the store.

    Fetching remote inputs may take hours, so everything else is checked first. A sample fetches only a few of them.
    `on_engine` is called with tokenizer, engine and the reading of special tokens as soon as they are known.
    """
    started, display = time.monotonic(), display or Silence()
    display.update(Preparation.step("loading the tokenizer"))
    share = find_share(request.rank, request.world_size, os.environ)
    tokenizer = load_tokenizer(request.tokenizer)
    specials = request.policy(tokenizer).special_tokens
    choice = choose(tokenizer, request.engine, specials)
    if on_engine is not None:
        on_engine(tokenizer, choice.engine, specials)
    options = request.reading()
    display.update(Preparation.step("looking at the inputs"))
    # With --whole-files or an explicit --format, documents are not counted by the format that a name implies, so the
    # limit cannot decide which files to fetch.
    limit = request.limit if request.format == "auto" and not request.whole_files else None
    inputs = expand_inputs(request.inputs, display, limit, is_sample=is_sample)
    # The store may be inside an input directory, and its own files are no inputs.
    store, paths = request.out.rstrip("/"), [item.path for item in inputs]
    if not is_remote(store):
        store, *paths = (str(Path(path).absolute()) for path in (store, *paths))
    inputs = [item for item, path in zip(inputs, paths, strict=True) if not path.startswith(f"{store}/")] or inputs
    if not options.record_keys:
        request = msgspec.structs.replace(request, text_key=text_key_of(inputs, request.text_key, display))
        options = request.reading()
    files = inspect_inputs(inputs, request.format, options, display)
    by_path = {str(input_path(item.path).absolute()): item.weight for item in inputs}
    weights = tuple(by_path[file.path] for file in files) if is_sample else ()
    settings = request.settings(tokenizer, files)
    # A template that cannot be used is an error before the run begins.
    settings.renderer(tokenizer)
    seconds = time.monotonic() - started
    return Prepared(request, tokenizer, choice, files, settings, share, weights=weights, seconds=seconds)
