"""`tokenize`: from a request to a finished store.

    inspect inputs -> take the directory -> resume or begin -> parity gate, tasks -> manifest

Each step refuses what it must not touch, in a sentence, before it changes anything. A run that ends early, for any
reason, leaves a directory that the same command resumes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Display, Silence
from tokenmill.engines import load_tokenizer
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors import create
from tokenmill.executors.base import Executor
from tokenmill.files import make_directory
from tokenmill.inputs.dataset_objects import DatasetRows, find_text_key, is_dataset, staged
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.input_file import check_unchanged, explain_checksums, explain_formats
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.journal.finish import Completion, finish, list_missing, read_completion
from tokenmill.pipeline.journal.journal import Journal, SavedPlan
from tokenmill.pipeline.journal.locks import is_lock, locked, taking_turns
from tokenmill.pipeline.journal.mirror import Mirror, scratch_store
from tokenmill.pipeline.journal.resume import RunState, begin_or_resume, check_sizes, find_finished
from tokenmill.pipeline.plan.budget import Budget, make_budget, make_cluster_budget
from tokenmill.pipeline.plan.prepare import Prepared, prepare
from tokenmill.pipeline.plan.ranks import WHOLE, Share, membership
from tokenmill.pipeline.plan.tasks import Plan, make_plan
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.signals import Interrupted, SignalReceived, signals_as_exceptions
from tokenmill.pipeline.workers.attempt import Attempt
from tokenmill.pipeline.workers.engine_cache import EngineKey, warm_engine
from tokenmill.pipeline.workers.messages import Failed
from tokenmill.store.manifest import MANIFEST, Manifest
from tokenmill.store.remote_store import open_store
from tokenmill.store.store import TokenStore

__all__ = ["Outcome", "make_store", "run", "tokenize"]

ONLY_SAMPLED = "its size and a sample of its content are the same; if it may be another text, run with --overwrite"

Inputs = str | Path | list[str] | list[Path] | Any
"""Paths, or one `Dataset` or `IterableDataset` of Hugging Face."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run; `observer` is None if there was nothing left to do."""

    manifest: Manifest | None
    """None while other ranks have work to do."""
    observer: Observer | None
    share: Share = WHOLE
    completion: Completion | None = None
    """How much of the whole run is done, if this was a rank of it."""
    num_own: int = 0
    """The number of finished tasks of this rank."""
    num_unchecked: int = 0
    """The number of compressed inputs without a checksum."""


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
    executor: str | Executor = "local",
    **flags: Any,
) -> TokenStore | None:
    """Tokenize text files, or the rows of a `Dataset`, into a store, or resume a run that was stopped.

    `flags` are those of `tokenmill tokenize` with underscores: `text_key`, `workers`, `memory`,
    `val_fraction`, `on_error`, ... Calling it again on a finished store opens the store. An executor is named, or
    made by the caller: `RayExecutor(...)`. With `rank` and `world_size` it does a share of the work, and returns None
    while other ranks have work to do.
    """
    several = [inputs] if isinstance(inputs, (str, Path)) or is_dataset(inputs) else list(inputs)
    if len(several) > 1 and any(map(is_dataset, several)):
        raise UsageError("a dataset is an input by itself; join several with datasets.concatenate_datasets")
    names = ["a dataset" if is_dataset(item) else str(item) for item in several]
    made = None if isinstance(executor, str) else executor
    if made is not None:
        made.warm(PRELOAD, b"")
    flags |= {"executor": executor} if isinstance(executor, str) else {}
    request = Request.from_flags({"inputs": names, "out": str(out), "tokenizer": str(tokenizer), **flags})
    shown = display or Silence()
    with _staging(several[0], request, shown) if any(map(is_dataset, several)) else nullcontext(request) as ready:
        outcome = run(ready, shown, made)
    return None if outcome.manifest is None else open_store(request.out)


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


def run(request: Request, display: Display, started: Executor | None = None) -> Outcome:
    """Carry out a request. Signals end it cleanly, also in the middle of a task.

    The command line starts the executor (`started`) before it imports this module, to save time; it is closed here.
    """
    with signals_as_exceptions(), closing(started or create(request.executor, PRELOAD)) as executor:
        mirror = Mirror(request.out) if is_remote(request.out) else None
        prepared = prepare(
            request,
            display,
            on_engine=lambda tokenizer, engine, specials: warm_engine(
                executor, tokenizer.source, EngineKey(engine, specials, tokenizer.sha256)
            ),
        )
        if mirror is None:
            return make_store(prepared, display, executor)
        with scratch_store(mirror, request.scratch) as store:
            scratch = msgspec.structs.replace(prepared.request, out=str(store))
            return make_store(replace(prepared, request=scratch), display, executor, mirror=mirror)


def make_store(
    prepared: Prepared,
    display: Display,
    executor: Executor,
    *,
    plan: Plan | None = None,
    budget: Budget | None = None,
    mirror: Mirror | None = None,
) -> Outcome:
    """Make the store, or finish it; `plan` and `budget` are made here unless the caller passes them."""
    request = prepared.request
    if executor.shares_disk:
        budget = budget or make_budget(request, prepared.tokenizer_bytes)
    else:
        _refuse_local_flags(request)
    manifest = _prepare_directory(prepared)
    if manifest is not None:
        check_sizes(Path(request.out), manifest)
        return _report_finished(manifest, prepared, display)
    store = Path(request.out)
    with _locked(store, prepared.share) as has_locks:
        journal = Journal(store, prepared.share, os.urandom(4).hex(), mirror)
        with taking_turns(store):
            # Called for a new run only, because planning may read inputs; a resumed run has the plan of its journal.
            state = begin_or_resume(
                journal,
                prepared,
                lambda files: plan or make_plan(files, prepared.settings),
                order=plan.order if plan is not None else None,
                may_discard=has_locks,
            )
        if isinstance(state, Manifest):
            if mirror is None:
                check_sizes(store, state)
            return _report_finished(state, prepared, display)
        # Inputs with the stamps of the run: one that was only touched since counts as unchanged.
        prepared = replace(prepared, files=state.plan.inputs)
        _say_notes(prepared, state, display, has_locks=has_locks)
        if budget is None:
            # Connect to a cluster only when there is work to do: starting one takes its time.
            display.say(f"cluster    {executor}")
            executor.join(None if request.workers == "auto" else request.workers)
            budget = make_cluster_budget(request, prepared.tokenizer_bytes, executor)
        observer = Observer(journal, display, budget)
        with _watched(observer, journal, state, executor):
            if any(state.remaining()) or (state.done and journal.gate() is None):
                Attempt(prepared, journal, state, executor, budget, observer, display).run()
            for file in check_unchanged(prepared.files):
                display.say(f"{file.shown} was modified during the run; {ONLY_SAMPLED}", style="yellow")
        return _conclude(prepared, journal, state, observer)


@contextmanager
def _locked(store: Path, share: Share) -> Iterator[bool]:
    """Lock the directory; turn errors of the system and signals into sentences about it."""
    try:
        with locked(store, share) as has_locks:
            yield has_locks
    except (OSError, SignalReceived) as error:
        raise _describe_error(error, store) from None


@contextmanager
def _watched(observer: Observer, journal: Journal, state: RunState, executor: Executor) -> Iterator[None]:
    """Close the executor and the display when the tasks end, and record in `progress.json` how the attempt ended."""
    try:
        yield
    except BaseException as error:
        executor.close()
        observer.close(completed=False, reason=str(_describe_error(error, journal.store)), counts=state.counts())
        journal.sweep()
        raise
    executor.close()
    # A rank that had nothing to do is recorded, too.
    observer.close(completed=True, counts=None if journal.share.is_whole else state.counts())


def _conclude(prepared: Prepared, journal: Journal, state: RunState, observer: Observer) -> Outcome:
    """Write the manifest, unless other ranks have work to do."""
    try:
        with taking_turns(journal.store):
            manifest, completion = _finish_plan(prepared, journal, state.plan, observer)
        if manifest is None:
            if journal.share.is_whole:
                raise StoreError(f"{journal.folder} has entries for {completion}; run the same command again")
            journal.sweep_own()
    except Exception as error:
        observer.mark_failed(str(_describe_error(error, journal.store)))
        raise
    num_own = 0 if manifest or completion is None else sum(map(membership(state.part), completion.done))
    num_unchecked = sum(file.lacks_checksum for file in prepared.files)
    return Outcome(manifest, observer, journal.share, completion, num_own, num_unchecked)


def _finish_plan(
    prepared: Prepared, journal: Journal, plan: Plan, observer: Observer
) -> tuple[Manifest | None, Completion | None]:
    """Return the manifest if the store is finished, and how much of the plan is done if this process looked."""
    store, completion = journal.store, None
    if not journal.share.is_whole:
        # By file names alone: reading the entries of a large run takes minutes, so only the last rank does.
        files = journal.files()
        completion = list_missing(files, plan) if files else None
        if completion is None and journal.mirror is not None:
            journal.mirror.pull(store)
    manifest = find_finished(store, prepared)
    if manifest is not None:
        # Another rank wrote it before this one ended; add this attempt to run.json.
        observer.write_run_file(plan.inputs)
        return manifest, None
    completion = completion or read_completion(journal, plan)
    if not completion.is_complete:
        if journal.share.is_whole and journal.mirror is not None:
            # An equal run may have finished the store just now, and removed the journal with the rejects of tasks.
            journal.mirror.pull(store)
            if (manifest := find_finished(store, prepared)) is not None:
                journal.remove()
        return manifest, completion
    # Only the last rank can sum over all ranks.
    num_rejects = sum(sum(record.rejects.values()) for record in completion.records)
    most = prepared.request.max_errors
    if most is not None and num_rejects > most:
        raise TokenmillError(
            f"{num_rejects} records of all ranks could not be tokenized, more than --max-errors {most}; raise the "
            f"limit and run the same command again, or accept them with tokenmill finish {store}"
        )
    try:
        observer.write_run_file(plan.inputs)
        return finish(journal, SavedPlan(prepared.settings.flags(), plan), completion.records), completion
    except FileNotFoundError:
        # Without locks, another rank may have written the manifest at the same time and removed the journal.
        manifest = find_finished(store, prepared)
        if manifest is None:
            raise
        return manifest, completion


def _describe_error(error: BaseException, store: Path) -> BaseException:
    """Describe to the user why a run ended early."""
    if isinstance(error, SignalReceived):
        return Interrupted(f"stopped by {error.name}; run the same command again to continue {store}", error.number)
    if isinstance(error, OSError):
        return Failed.from_error(error, str(store)).to_error()
    return error


def _say_notes(prepared: Prepared, state: RunState, display: Display, *, has_locks: bool) -> None:
    """Tell the user what is unusual about this run before it starts."""
    notes = [explain_formats(prepared.files), explain_checksums(prepared.files), *state.notes, prepared.choice.note]
    if not has_locks:
        place = prepared.request.out
        notes.insert(0, f"{place} is on a file system without locks: let no other run, and no rank twice, work on it")
    for note in notes:
        if note:
            display.say(note, style="yellow")
    if not prepared.share.is_whole and any(state.remaining()):
        whole, part = state.plan, state.part
        tasks = f"{len(part.tasks):,} of {len(whole.tasks):,} tasks"
        streams = f" and {len(part.streams):,} of {len(whole.streams):,} compressed files" if whole.streams else ""
        display.say(f"share      {prepared.share}: {tasks}{streams}")


def _refuse_local_flags(request: Request) -> None:
    """Refuse flags for processes of this machine, and flags that share work without a cluster."""
    for flag in ("rank", "affinity", "numa", "profile"):
        if getattr(request, flag) is not None and getattr(request, flag) is not False:
            raise UsageError(f"--{flag} is for the local executor: a cluster places its tasks itself; leave it out")


def _report_finished(manifest: Manifest, prepared: Prepared, display: Display) -> Outcome:
    """Report that there is nothing to do; warn of large inputs that were written to after the store was finished."""
    store = Path(prepared.request.out)
    finished_ns = (store / MANIFEST).stat().st_mtime_ns
    for file in prepared.files:
        if file.is_sampled and file.mtime_ns > finished_ns:
            display.say(f"{file.shown} was modified after {store} was finished; {ONLY_SAMPLED}", style="yellow")
    return Outcome(manifest, None)


def _prepare_directory(prepared: Prepared) -> Manifest | None:
    """Create the directory, and refuse one that is no store; return the manifest of a finished store that is read-only.

    This user need not write to such a store.
    """
    store = Path(prepared.request.out)
    if not prepared.request.overwrite and store.is_dir() and not os.access(store, os.W_OK):
        manifest = find_finished(store, prepared)
        if manifest is not None:
            return manifest
    try:
        make_directory(store)
        present = {path.name for path in store.iterdir()}
        if not os.access(store, os.W_OK):
            raise StoreError(f"{store} cannot be written; choose another directory with -o")
    except FileExistsError:
        raise StoreError(f"{store} is a file; choose a directory with -o") from None
    except OSError as error:
        raise StoreError(f"{store} cannot be written: {error.strerror}; choose another directory with -o") from None
    others = {name for name in present if not is_lock(name)}
    # Check once more, one by one: another rank may have begun or finished the store during the listing.
    if others and not (store / ".tasks").exists() and not (store / MANIFEST).exists():
        raise StoreError(f"{store} is not empty and not a token store; choose another directory with -o")
    return None
