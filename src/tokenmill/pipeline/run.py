"""`tokenize`: from a request to a finished store.

    inspect inputs -> take the directory -> resume or begin -> parity gate, tasks -> manifest

Each step refuses what it must not touch, in a sentence, before it changes anything. Whatever
ends a run early leaves a directory that the same command continues.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, overload

import msgspec

from tokenmill.engines import Choice, Tokenizer, choose, load_tokenizer
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors import create
from tokenmill.executors.base import Cluster, Executor
from tokenmill.executors.local import start_executor
from tokenmill.inputs import Input, expand_inputs
from tokenmill.inputs.datasets import is_dataset
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.budget import Budget, make_budget, make_cluster_budget
from tokenmill.pipeline.dispatcher import Dispatcher
from tokenmill.pipeline.finish import Stock, describe_gate, finish, take_stock
from tokenmill.pipeline.journal import Journal, SavedPlan
from tokenmill.pipeline.locking import Lock, is_lock, taking_turns
from tokenmill.pipeline.messages import Failed, GateResult
from tokenmill.pipeline.mirroring import Mirror, scratch_directory
from tokenmill.pipeline.observer import Observer
from tokenmill.pipeline.plan import InputFile, Plan, check_unchanged, explain_formats, inspect_inputs
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.resume import Standing, begin_or_resume, find_finished
from tokenmill.pipeline.scheduler import WORKER, Scheduler
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.sharing import WHOLE, Share, membership
from tokenmill.pipeline.staging import staging
from tokenmill.pipeline.tally import Tally
from tokenmill.pipeline.task import Job
from tokenmill.pipeline.worker import WarmJob
from tokenmill.progress import Display, Silence
from tokenmill.remote.bucket import is_remote
from tokenmill.store.manifest import MANIFEST, Manifest, ParityInfo
from tokenmill.store.remote import open_remote
from tokenmill.store.store import TokenStore

__all__ = ["Interrupted", "Outcome", "Prepared", "carry_out", "make_job", "prepare", "run", "tokenize"]


class Interrupted(TokenmillError):
    """A signal ended the run; the directory can be continued."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


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
        raise UsageError("several datasets are no input; join them with datasets.concatenate_datasets")
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


@dataclass(frozen=True)
class Outcome:
    """What came of a run, and how it went; `observer` is None when there was nothing left to do."""

    manifest: Manifest | None
    """None while other ranks have work to do."""
    observer: Observer | None
    share: Share = WHOLE
    stock: Stock | None = None
    """How much of the whole run is done, where this was a rank of it."""
    num_own: int = 0
    """Tasks of this rank."""


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

    @property
    def tokenizer_bytes(self) -> int:
        """The size of the file that decides what engines take."""
        return len(self.tokenizer.files[self.tokenizer.main_file])


def prepare(request: Request, display: Display | None = None) -> Prepared:
    """Look at everything that a request names, and refuse what cannot work; nothing is written yet.

    Inputs that are elsewhere are fetched, which may take hours, so everything else is looked at before.
    """
    share = request.share()
    tokenizer = load_tokenizer(request.tokenizer)
    choice = choose(tokenizer, request.engine, request.specials_in_text(tokenizer))
    request.policy(tokenizer)
    request.reading()
    # Of whole files or other formats than those that their names say, nobody knows how many documents they have.
    limit = request.limit if request.format == "auto" and not request.whole_files else None
    inputs = _outside(expand_inputs(request.inputs, display, limit), request.out)
    request = request.on(inputs, display)
    files = inspect_inputs(inputs, request.format, request.reading())
    return Prepared(request, tokenizer, choice, files, request.settings(tokenizer, files), share)


def run(request: Request, display: Display, started: Executor | Cluster | None = None) -> Outcome:
    """Carry out a request. Signals end it cleanly, also in the middle of a task.

    An executor that was `started` before this module was imported has saved that time; it is closed here.
    """
    with _signals_raise(), closing(started or create(request.executor)) as executor:
        if is_remote(request.out):
            return _run_into_bucket(request, display, executor)
        _refuse_scratch(request)
        return carry_out(prepare(request, display), display, executor)


def _run_into_bucket(request: Request, display: Display, executor: Executor | Cluster) -> Outcome:
    """Carry out a request in a scratch directory whose results go to a bucket, task by task."""
    if isinstance(executor, Cluster):
        raise UsageError(
            f"-o {request.out}: a cluster writes to a directory that all its machines share; use --rank and "
            "--world-size, which need none"
        )
    mirror = Mirror(request.out)
    prepared = prepare(request, display)
    with scratch_directory(request.scratch) as folder:
        scratch = msgspec.structs.replace(prepared.request, out=str(folder / mirror.url.rpartition("/")[2]))
        try:
            return carry_out(replace(prepared, request=scratch, mirror=mirror), display, executor)
        except BaseException as error:
            # The user knows the URL, and not the scratch directory.
            error.args = tuple(
                arg.replace(scratch.out, mirror.url) if isinstance(arg, str) else arg for arg in error.args
            )
            raise


def _refuse_scratch(request: Request) -> None:
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
        raise _in_words(error, store) from None
    try:
        journal = Journal(store, prepared.share, os.urandom(4).hex(), prepared.mirror)
        with taking_turns(store):
            standing = begin_or_resume(
                journal, settings, files, prepared.tokenizer, plan=plan, overwrite=request.overwrite
            )
        if standing.manifest is not None:
            return _report_finished(standing.manifest, store, files, display)
        unsafe = None if lock.is_real else f"{store} is on a file system without locks: {ONE_AT_A_TIME}"
        for note in (unsafe, explain_formats(files), *standing.notes, prepared.choice.note):
            if note:
                display.say(note, style="yellow")
        if isinstance(executor, Cluster):
            budget = _join(executor, prepared, display)
        assert budget is not None
        return _Attempt(prepared, display, executor, journal, standing).carry_out(budget)
    except (OSError, _Signal) as error:
        raise _in_words(error, store) from None
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
ONLY_SAMPLED = "its size and a sample of its content are the same; if it may be another text, run with --overwrite"


def _report_finished(manifest: Manifest, store: Path, files: list[InputFile], display: Display) -> Outcome:
    """There is nothing to do; of inputs that were written to after the store was, a sample is no proof of that."""
    finished_ns = (store / MANIFEST).stat().st_mtime_ns
    for file in files:
        if file.is_sampled and file.mtime_ns > finished_ns:
            display.say(f"{file.shown} was modified after {store} was finished; {ONLY_SAMPLED}", style="yellow")
    return Outcome(manifest, None)


class _Attempt:
    """One attempt at a run that is not finished yet."""

    def __init__(
        self,
        prepared: Prepared,
        display: Display,
        executor: Executor | Cluster,
        journal: Journal,
        standing: Standing,
    ) -> None:
        self._prepared = prepared
        self._request = prepared.request
        self._tokenizer = prepared.tokenizer
        self._choice = prepared.choice
        self._files = prepared.files
        self._settings = prepared.settings
        self._display = display
        self._executor = executor
        self._standing = standing
        self._store = Path(prepared.request.out)
        self._journal = journal
        self._engine: str = prepared.choice.engine
        self._parity: ParityInfo | None = None

    def carry_out(self, budget: Budget) -> Outcome:
        observer = Observer(self._store, self._display, budget, self._prepared.share)
        standing = self._standing
        try:
            if standing.has_work or (standing.done and self._journal.gate() is None):
                self._tell_share()
                self._run(self._choice.engine, standing.part, observer, budget)
            for file in check_unchanged(self._files):
                self._display.say(f"{file.shown} was modified during the run; {ONLY_SAMPLED}", style="yellow")
        except BaseException as error:
            said = _in_words(error, self._store)
            self._executor.close()
            observer.close(completed=False, reason=str(said), tally=self._resumed())
            self._sweep()
            raise said from None
        self._executor.close()
        if observer.snapshot is not None:
            # A limit, or what follows the last document of a stream, may leave some bytes unread.
            total = observer.snapshot.total_bytes
            self._display.update(msgspec.structs.replace(observer.snapshot, done_bytes=total))
        observer.close(completed=True)
        return self._conclude(observer)

    def _resumed(self) -> Tally:
        """How far the run was when this attempt began."""
        tally = Tally.of(self._standing.part, None)
        tally.resume(self._standing.part, self._standing.done, self._standing.ended_streams)
        return tally

    def _tell_share(self) -> None:
        """What of the run is this rank's."""
        whole, part = self._standing.plan, self._standing.part
        if not self._prepared.share.is_whole:
            tasks = f"{len(part.tasks):,} of {len(whole.tasks):,} tasks"
            streams = f" and {len(part.streams):,} of {len(whole.streams):,} compressed files" if whole.streams else ""
            self._display.say(f"share      {self._prepared.share}: {tasks}{streams}")

    def _conclude(self, observer: Observer) -> Outcome:
        """Write the manifest, if every task of the run is done, whoever did it."""
        if self._journal.mirror is not None and not self._prepared.share.is_whole:
            self._journal.mirror.pull(self._store)
        with taking_turns(self._store):
            manifest = find_finished(self._store, self._settings, self._files)
            stock = take_stock(self._journal, self._standing.plan)
            if manifest is not None:
                # Another rank was faster, and did not know yet how this one ended.
                observer.write_run_file()
            elif stock.is_complete:
                self._check_rejects(stock)
                manifest = self._finish(stock, observer)
        share = self._prepared.share
        if manifest is None and share.is_whole:
            raise StoreError(
                f"{self._journal.folder} has {stock.num_done} entries for {stock.num_tasks} tasks; run the same "
                "command again"
            )
        if manifest is None:
            self._journal.sweep_own()
        is_own = membership(self._standing.part)
        return Outcome(manifest, observer, share, stock, sum(is_own(record.name) for record in stock.records))

    def _finish(self, stock: Stock, observer: Observer) -> Manifest:
        try:
            observer.write_run_file()
            return finish(self._journal, SavedPlan(self._settings.flags(), self._standing.plan), stock.records)
        except FileNotFoundError:
            # Without locks, another rank may have been at it too, and have removed the journal.
            manifest = find_finished(self._store, self._settings, self._files)
            if manifest is None:
                raise
            return manifest

    def _check_rejects(self, stock: Stock) -> None:
        """Each rank counts its own; only the last one knows the sum."""
        count, most = sum(sum(record.rejects.values()) for record in stock.records), self._request.max_errors
        if most is not None and count > most:
            raise TokenmillError(
                f"{count} records of all ranks could not be tokenized, more than --max-errors {most}; raise the limit "
                f"and run the same command again, or accept them with tokenmill finish {self._store}"
            )

    def _run(self, engine: str, plan: Plan, observer: Observer, budget: Budget) -> None:
        """Run all tasks with the engine, or with its reference when the gate finds a difference."""
        job = msgspec.structs.replace(
            make_job(self._prepared, engine, budget.worker_bytes), attempt=self._journal.attempt
        )
        self._engine = engine

        def gate_passed(result: GateResult) -> None:
            self._parity = self._parity or result.parity
            if result.parity.num_mismatches:
                raise _Mismatch(result.parity)
            self._journal.keep_gate(describe_gate(self._tokenizer, engine, self._parity))
            _introduce(self._display, self._tokenizer, job, result, budget)
            if result.unseen_keys:
                names = ", ".join(map(repr, result.unseen_keys))
                self._display.say(f"--keep-keys: no document that was looked at has {names}", style="yellow")

        try:
            runner = self._make_runner(job, plan, observer, budget, gate_passed)
            runner.run(self._standing.done, self._standing.ended_streams)
            return
        except _Mismatch as found:
            reference = self._fall_back(found.parity)
        self._run(reference, plan, observer, budget)

    def _make_runner(
        self, job: Job, plan: Plan, observer: Observer, budget: Budget, gate_passed: Callable[[GateResult], None]
    ) -> Scheduler | Dispatcher:
        """What hands out tasks: to workers of this machine, or to a cluster."""
        request, executor = self._request, self._executor
        if isinstance(executor, Cluster):
            return Dispatcher(
                executor,
                job,
                plan,
                self._journal,
                budget=budget,
                most_in_flight=None if request.workers == "auto" else request.workers,
                gate_passed=gate_passed,
                max_errors=request.max_errors,
                observe=observer.observe,
                say=self._warn,
            )
        executor.warm(f"{WORKER}:warm", msgspec.json.encode(WarmJob.of(job)))
        return Scheduler(
            executor,
            job,
            plan,
            self._journal,
            num_workers=budget.num_workers,
            gate_passed=gate_passed,
            gate_beside_tasks=budget.gate_beside_tasks,
            max_errors=request.max_errors,
            pins=_pins(request),
            observe=observer.observe,
            say=self._warn,
        )

    def _warn(self, text: str) -> None:
        self._display.say(text, style="yellow")

    def _fall_back(self, parity: ParityInfo) -> str:
        """Forget what workers have done with an engine that differs, loudly, and name its reference."""
        found = (
            f"{self._engine} differs from {parity.reference} on {parity.num_mismatches} of "
            f"{parity.num_documents + parity.num_awkward} texts, for example {parity.example!r}"
        )
        if self._choice.named:
            raise TokenmillError(f"{found}; use --engine auto")
        self._display.say(f"{found}; using {parity.reference}, which is slower", style="bold red")
        if not isinstance(self._executor, Cluster):
            self._executor.close()
            self._sweep()
            self._executor = start_executor()
        return parity.reference

    def _sweep(self) -> None:
        self._journal.sweep({record.name: record for record in self._journal.records()})


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
    )


class _Mismatch(Exception):
    """The parity gate found a difference."""

    def __init__(self, parity: ParityInfo) -> None:
        super().__init__(parity.example)
        self.parity = parity


def _introduce(display: Display, tokenizer: Tokenizer, job: Job, result: GateResult, budget: Budget) -> None:
    """The first screen: what will be written, so that a wrong EOS is seen in the first second."""
    parity, policy, preview = result.parity, job.settings.policy, result.preview
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    display.say(f"tokenizer  {tokenizer.name} ({tokenizer.kind}), {tokenizer.vocab_size:,} tokens")
    if parity.num_mismatches == 0 and parity.num_documents:
        parts = f", of {parity.num_in_parts:,} long ones in parts" if parity.num_in_parts else ""
        display.say(
            f"engine     {job.engine}, with the same ids as {parity.reference} on {parity.num_documents:,} of your"
        )
        display.say(
            f"           documents{parts} ({parity.num_bytes / 1e6:.1f} MB) and {parity.num_awkward:,} awkward strings"
        )
    else:
        display.say(f"engine     {job.engine}")
    display.say(f"begin      {_name(policy.bos_id, names)}")
    display.say(f"end        {_name(policy.eos_id, names)}")
    display.say(f"specials   {policy.special_tokens} where a text has their strings")
    if preview is not None:
        display.say(f"example    {preview.text}")
        display.say(f"           {preview.ids} ({preview.num_tokens:,} ids)")
    workers = f"{budget.num_workers} worker{'s' if budget.num_workers > 1 else ''}"
    display.say(f"resources  {workers}, {budget.memory_bytes / 1e9:.1f} GB of memory\n")


def _pins(request: Request) -> list[int]:
    """The CPU of each worker, where they are to stay on one."""
    if not (request.affinity or request.numa):
        return []
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--affinity and --numa need Linux: other systems do not let a process choose its cores")
    return physical_cpus(across_nodes=request.numa)


def _name(token: int | None, names: dict[int, str]) -> str:
    return "no token" if token is None else f"{names.get(token, '')} {token}".strip()


def _outside(inputs: list[Input], store: str) -> list[Input]:
    """The inputs without the store's own files, for a store inside the directory that it is made from."""
    if is_remote(store):
        return [item for item in inputs if not item.path.startswith(store.rstrip("/") + "/")] or inputs
    folder = str(Path(store).absolute()) + os.sep
    return [item for item in inputs if not str(Path(item.path).absolute()).startswith(folder)] or inputs


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


def _in_words(error: BaseException, store: Path) -> BaseException:
    """What the user reads when a run ends early."""
    if isinstance(error, _Signal):
        return Interrupted(
            f"stopped by {signal.Signals(error.number).name}; run the same command again to continue {store}",
            error.number,
        )
    if isinstance(error, OSError):
        return Failed.from_error(error, str(store)).to_error()
    return error


class _Signal(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception, in the main thread of a program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        # One is enough: a second must not break into the cleaning up.
        if len(received) == 1:
            raise _Signal(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Signal as stopped:
        raise Interrupted(f"stopped by {signal.Signals(stopped.number).name}", stopped.number) from None
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)
