"""`tokenize`: from a request to a finished store.

    inspect inputs -> take the directory -> resume or begin -> parity gate, tasks -> manifest

Each step refuses what it must not touch, in a sentence, before it changes anything. Whatever
ends a run early leaves a directory that the same command continues.
"""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import msgspec

from tokenmill.errors import StoreError, UsageError
from tokenmill.executors import create
from tokenmill.executors.base import Cluster, Executor
from tokenmill.inputs.datasets import is_dataset
from tokenmill.pipeline.attempt import ONLY_SAMPLED, Attempt, Outcome
from tokenmill.pipeline.budget import Budget, make_budget, make_cluster_budget
from tokenmill.pipeline.ending import SignalReceived, in_words, signals_raise
from tokenmill.pipeline.journal import Journal
from tokenmill.pipeline.locking import Lock, is_lock, taking_turns
from tokenmill.pipeline.mirroring import Mirror, named
from tokenmill.pipeline.plan import InputFile, Plan, explain_formats
from tokenmill.pipeline.preparing import Prepared, prepare
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.resume import begin_or_resume, find_finished, is_discarded
from tokenmill.pipeline.scratch import scratch_directory
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.staging import staging
from tokenmill.progress import Display, Silence
from tokenmill.remote.bucket import is_remote
from tokenmill.remote.client import SCHEMES
from tokenmill.store.manifest import MANIFEST, Manifest
from tokenmill.store.remote import open_remote
from tokenmill.store.store import TokenStore

__all__ = ["carry_out", "run", "tokenize"]


Inputs = str | Path | list[str] | list[Path] | Any
"""What to read; one `Dataset` or `IterableDataset` of Hugging Face as well."""


@overload
def tokenize(inputs: Inputs, out: str | Path, *, tokenizer: str, rank: None = None, **flags: Any) -> TokenStore: ...


@overload
def tokenize(
    inputs: Inputs, out: str | Path, *, tokenizer: str, rank: int | str, **flags: Any
) -> TokenStore | None: ...


def tokenize(
    inputs: Inputs,
    out: str | Path,
    *,
    tokenizer: str,
    display: Display | None = None,
    executor: str | Executor | Cluster = "local",
    **flags: Any,
) -> TokenStore | None:
    """Tokenize text files, or the rows of a `Dataset`, into a store, or continue a run that was stopped.

    `flags` are those of `tokenmill tokenize` with underscores: `text_key`, `workers`, `memory`,
    `val_fraction`, `on_error`, ... Calling it again on a finished store opens the store. An executor is named, or
    made by the caller: `RayExecutor(...)`. With `rank` and `world_size` it does a share of the work, and gives None
    while other ranks have work to do.
    """
    several = [inputs] if isinstance(inputs, (str, Path)) or is_dataset(inputs) else list(inputs)
    if len(several) > 1 and any(map(is_dataset, several)):
        raise UsageError("a dataset is an input by itself; join several with datasets.concatenate_datasets")
    names = ["a dataset" if is_dataset(item) else str(item) for item in several]
    made = None if isinstance(executor, str) else executor
    flags |= {"executor": executor} if isinstance(executor, str) else {}
    request = Request.from_flags({"inputs": names, "out": str(out), "tokenizer": str(tokenizer), **flags})
    shown = display or Silence()
    with staging(several[0], request, shown) if any(map(is_dataset, several)) else nullcontext(request) as ready:
        outcome = run(ready, shown, made)
    if outcome.manifest is None:
        return None
    return open_remote(request.out) if is_remote(request.out) else TokenStore(Path(request.out))


def run(request: Request, display: Display, started: Executor | Cluster | None = None) -> Outcome:
    """Carry out a request. Signals end it cleanly, also in the middle of a task.

    An executor that was `started` before this module was imported has saved that time; it is closed here.
    """
    with signals_raise(), closing(started or create(request.executor)) as executor:
        if is_remote(request.out):
            return _run_into_bucket(request, display, executor)
        _check_directory(request)
        return carry_out(prepare(request, display, executor), display, executor)


def _run_into_bucket(request: Request, display: Display, executor: Executor | Cluster) -> Outcome:
    """Carry out a request in a scratch directory whose results go to a bucket, task by task."""
    mirror = Mirror(request.out)
    prepared = prepare(request, display, executor)
    with scratch_directory(request.scratch) as folder:
        store = folder / mirror.url.rpartition("/")[2]
        scratch = msgspec.structs.replace(prepared.request, out=str(store))
        with named(mirror.url, store):
            return carry_out(replace(prepared, request=scratch, mirror=mirror), display, executor)


def _check_directory(request: Request) -> None:
    scheme, _, rest = request.out.partition("://")
    if rest:
        known = " or ".join(f"{known}://" for known in SCHEMES)
        raise UsageError(f"-o {request.out}: {scheme}:// is not written to; expected a path, or {known}")
    if request.scratch is not None:
        raise UsageError(f"--scratch {request.scratch} is for a store in a bucket, and -o {request.out} is a directory")


def carry_out(
    prepared: Prepared,
    display: Display,
    executor: Executor | Cluster,
    plan: Plan | None = None,
    budget: Budget | None = None,
) -> Outcome:
    """Make the store, or what is missing of it; `plan` and `budget` are made here, unless they were made before."""
    request, settings, files = prepared.request, prepared.settings, prepared.files
    if isinstance(executor, Cluster):
        _check_for_cluster(request)
    else:
        budget = budget or make_budget(request, prepared.tokenizer_bytes)
    finished = _find_read_only(request, settings, files)
    if finished is not None:
        return _report_finished(finished, Path(request.out), files, display)
    store = _prepare_directory(Path(request.out))
    lock = Lock(store, prepared.share)
    try:
        lock.acquire()
    except OSError as error:
        raise in_words(error, store) from None
    try:
        journal = Journal(store, prepared.share, os.urandom(4).hex(), prepared.mirror)
        with taking_turns(store):
            overwrite = request.overwrite or (lock.is_real and is_discarded(journal, settings, files))
            standing = begin_or_resume(journal, settings, files, prepared.tokenizer, plan=plan, overwrite=overwrite)
        if standing.manifest is not None:
            return _report_finished(standing.manifest, store, files, display)
        unsafe = None if lock.is_real else f"{store} is on a file system without locks: {ONE_AT_A_TIME}"
        for note in (unsafe, explain_formats(files), *standing.notes, prepared.choice.note):
            if note:
                display.say(note, style="yellow")
        if isinstance(executor, Cluster):
            budget = _join(executor, prepared, display)
        assert budget is not None
        return Attempt(prepared, display, executor, journal, standing).carry_out(budget)
    except (OSError, SignalReceived) as error:
        raise in_words(error, store) from None
    finally:
        lock.release()


def _join(cluster: Cluster, prepared: Prepared, display: Display) -> Budget:
    """Only when there is work to do: a cluster that has to be started takes its time."""
    display.say(f"cluster    {cluster}")
    workers = prepared.request.workers
    cluster.join(None if workers == "auto" else workers)
    return make_cluster_budget(prepared.request, prepared.tokenizer_bytes, cluster)


def _check_for_cluster(request: Request) -> None:
    """Refuse flags that are about the processes of this machine, or about sharing work out without a cluster."""
    for flag in ("rank", "affinity", "numa", "profile"):
        if getattr(request, flag) is not None and getattr(request, flag) is not False:
            raise UsageError(f"--{flag} is for the local executor: a cluster places its tasks itself; leave it out")


ONE_AT_A_TIME = "see to it that no other run, and no rank twice, works on it"


def _report_finished(manifest: Manifest, store: Path, files: list[InputFile], display: Display) -> Outcome:
    """There is nothing to do; of inputs that were written to after the store was, a sample is no proof of that."""
    finished_ns = (store / MANIFEST).stat().st_mtime_ns
    for file in files:
        if file.is_sampled and file.mtime_ns > finished_ns:
            display.say(f"{file.shown} was modified after {store} was finished; {ONLY_SAMPLED}", style="yellow")
    return Outcome(manifest, None)


def _find_read_only(request: Request, settings: Settings, files: list[InputFile]) -> Manifest | None:
    """The manifest of a finished store that nobody may write to, and nobody has to."""
    store = Path(request.out)
    if request.overwrite or not store.is_dir() or os.access(store, os.W_OK):
        return None
    return find_finished(store, settings, files)


def _prepare_directory(store: Path) -> Path:
    """Make the directory, and refuse one that holds something else."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in store.iterdir()}
        if not os.access(store, os.W_OK):
            raise StoreError(f"{store} cannot be written; choose another directory with -o")
    except FileExistsError:
        raise StoreError(f"{store} is a file; choose a directory with -o") from None
    except OSError as error:
        raise StoreError(f"{store} cannot be written: {error.strerror}; choose another directory with -o") from None
    others = {name for name in present if not is_lock(name)}
    # Looked up once more, one by one: another rank may have begun, or finished, while names were being listed.
    if others and not (store / ".tasks").exists() and not (store / MANIFEST).exists():
        raise StoreError(f"{store} is not empty and not a token store; choose another directory with -o")
    return store
