"""A run: from a request to a finished store.

    inspect inputs -> take the directory -> resume or begin -> parity gate, tasks -> manifest

Each step refuses what it must not touch, in a sentence, before it changes anything. A run that ends early, for any
reason, leaves a directory that the same command resumes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Display, Preparation
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors import create
from tokenmill.executors.base import Executor
from tokenmill.files import make_directory
from tokenmill.formatting import format_bytes, plural
from tokenmill.machine import available_memory
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.input_file import check_unchanged
from tokenmill.pipeline.inspection import explain_checksums, explain_formats
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.journal.finish import Completion, finish, list_missing, read_completion
from tokenmill.pipeline.journal.journal import Journal, SavedPlan
from tokenmill.pipeline.journal.locks import count_other_ranks_here, is_lock, locked, taking_turns
from tokenmill.pipeline.journal.mirror import Mirror, scratch_store
from tokenmill.pipeline.journal.resume import RunState, begin_or_resume, check_sizes, find_finished
from tokenmill.pipeline.journal.samples import compare_rest, start_parity_check
from tokenmill.pipeline.parity import ParityCheck
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

__all__ = ["Outcome", "make_store", "run"]

ONLY_SAMPLED = "its size and a sample of its content are the same; if it may be another text, run with --overwrite"


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


def run(request: Request, display: Display, started: Executor | None = None) -> Outcome:
    """Carry out a request. Signals end it cleanly, also in the middle of a task.

    The command line starts the executor (`started`) before it imports this module, to save time; it is closed here.
    """
    with (
        signals_as_exceptions(),
        closing(display),
        closing(started or create(request.executor, PRELOAD)) as executor,
    ):
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
        display.update(Preparation.step("planning the tasks"))
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
        elif not prepared.share.is_whole and (others := count_other_ranks_here(store, prepared.share)):
            budget = make_budget(request, prepared.tokenizer_bytes, others)
            if request.memory == "auto":
                names = f"{plural(others, 'other rank')} of this run"
                display.say(f"machine    shared with {names}, which came first; --memory divides it evenly")
        observer = Observer(journal, display, budget, prepared.seconds)
        with _reference(prepared) as parity_check:
            with _watched(observer, journal, state, executor):
                if any(state.remaining()) or (state.done and journal.gate() is None):
                    Attempt(prepared, journal, state, executor, budget, observer, display, parity_check).run()
                for file in check_unchanged(prepared.files):
                    display.say(f"{file.shown} was modified during the run; {ONLY_SAMPLED}", style="yellow")
            return _conclude(prepared, journal, state, observer, parity_check)


@contextmanager
def _locked(store: Path, share: Share) -> Iterator[bool]:
    """Lock the directory; turn errors of the system and signals into sentences about it."""
    try:
        with locked(store, share) as has_locks:
            yield has_locks
    except (OSError, SignalReceived) as error:
        raise _describe_error(error, store) from None


@contextmanager
def _reference(prepared: Prepared) -> Iterator[ParityCheck | None]:
    """Load the reference for comparisons, unless it is the engine."""
    if prepared.choice.engine == prepared.choice.reference:
        yield None
        return
    with closing(_start_parity_check(prepared)) as parity_check:
        yield parity_check


def _start_parity_check(prepared: Prepared) -> ParityCheck:
    return start_parity_check(prepared.tokenizer, prepared.settings.policy.special_tokens)


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


def _conclude(
    prepared: Prepared, journal: Journal, state: RunState, observer: Observer, parity_check: ParityCheck | None
) -> Outcome:
    """Write the manifest, unless other ranks have work to do."""
    try:
        with taking_turns(journal.store):
            manifest, completion = _finish_plan(prepared, journal, state.plan, observer, parity_check)
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
    prepared: Prepared, journal: Journal, plan: Plan, observer: Observer, parity_check: ParityCheck | None
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
    compared = parity_check.names if parity_check is not None else ()
    compare_rest(journal, completion.records, plan.inputs, lambda: _start_parity_check(prepared), compared)
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
    memory = prepared.request.memory_bytes()
    if memory is not None and prepared.request.executor != "ray" and memory > (free := available_memory()):
        notes.append(f"--memory {prepared.request.memory} is more than the {format_bytes(free)} that are free now")
    for note in notes:
        if note:
            display.say(note, style="yellow")
    if not prepared.share.is_whole and any(state.remaining()):
        whole, part = state.plan, state.part
        tasks = f"{len(part.tasks):,} of {plural(len(whole.tasks), 'task')}"
        streams = (
            f" and {len(part.streams):,} of {plural(len(whole.streams), 'compressed file')}" if whole.streams else ""
        )
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
