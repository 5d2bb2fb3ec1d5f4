"""What a request comes to before anything is written: its inputs, tokenizer and engine, found and looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tokenmill.engines import Choice, Tokenizer, choose, load_tokenizer
from tokenmill.executors.base import Cluster, Executor
from tokenmill.inputs import Input, expand_inputs
from tokenmill.pipeline.mill import WarmJob
from tokenmill.pipeline.mirroring import PLAN, Mirror
from tokenmill.pipeline.plan import InputFile, inspect_inputs
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.sharing import WHOLE, Share
from tokenmill.pipeline.task import Job
from tokenmill.progress import Display
from tokenmill.remote.bucket import is_remote

__all__ = ["Prepared", "make_job", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A request that can be carried out: what it reads and writes with was found and looked at."""

    request: Request
    tokenizer: Tokenizer
    choice: Choice
    files: list[InputFile]
    settings: Settings
    share: Share = WHOLE
    mirror: Mirror | None = None
    """The place of the store, where that is a bucket; `request.out` is then a scratch directory."""
    weights: tuple[float, ...] = ()
    """How many times its size each of the files stands for, where a sample of them was asked for."""

    @property
    def tokenizer_bytes(self) -> int:
        """The size of the file that decides what engines take."""
        return len(self.tokenizer.files[self.tokenizer.main_file])


def prepare(
    request: Request,
    display: Display | None = None,
    executor: Executor | Cluster | None = None,
    *,
    is_sample: bool = False,
) -> Prepared:
    """Look at everything that a request names, and refuse what cannot work; nothing is written yet.

    Inputs that are elsewhere are fetched, which may take hours, so everything else is looked at before; for a sample, a
    few of them. An executor loads the engine meanwhile.
    """
    share = request.share()
    tokenizer = load_tokenizer(request.tokenizer)
    specials = request.specials_in_text(tokenizer)
    choice = choose(tokenizer, request.engine, specials)
    if executor is not None and not isinstance(executor, Cluster) and tokenizer.source is not None:
        WarmJob(str(tokenizer.source.absolute()), choice.engine, specials, tokenizer.sha256).begin(executor)
    request.policy(tokenizer)
    request.reading()
    # Of whole files or other formats than those that their names say, nobody knows how many documents they have.
    limit = request.limit if request.format == "auto" and not request.whole_files else None
    inputs = _outside(expand_inputs(request.inputs, display, limit, is_sample=is_sample), request.out)
    request = request.on(inputs, display)
    files = inspect_inputs(inputs, request.format, request.reading())
    weights = tuple(item.weight for item in inputs) if is_sample else ()
    return Prepared(request, tokenizer, choice, files, request.settings(tokenizer, files), share, weights=weights)


def _outside(inputs: list[Input], store: str) -> list[Input]:
    """The inputs without the store's own files, for a store inside the directory that it is made from."""
    if is_remote(store):
        return [item for item in inputs if not item.path.startswith(store.rstrip("/") + "/")] or inputs
    folder = str(Path(store).absolute()) + os.sep
    return [item for item in inputs if not str(Path(item.path).absolute()).startswith(folder)] or inputs


def make_job(prepared: Prepared, engine: str, worker_bytes: int) -> Job:
    """What the processes of a run get to know."""
    request = prepared.request
    return Job(
        store=str(Path(request.out)),
        inputs=prepared.files,
        settings=prepared.settings,
        engine=engine,
        vocab_size=prepared.tokenizer.vocab_size,
        special_ids=sorted(prepared.tokenizer.special_tokens.values()),
        on_error=request.on_error,
        batch_size=request.batch_size,
        worker_bytes=worker_bytes,
        profile=str(Path(request.profile).absolute()) if request.profile is not None else None,
        share=prepared.share,
        mirror=prepared.mirror.url if prepared.mirror is not None else None,
        plan_tag=prepared.mirror.tag(PLAN) if prepared.mirror is not None else None,
        scratch=str(Path(request.scratch).absolute()) if request.scratch is not None else None,
    )
