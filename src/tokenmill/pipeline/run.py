"""`tokenize`: from a request to a finished store.

    inspect inputs -> take the directory -> resume or begin -> parity gate, tasks -> manifest

Each step refuses what it must not touch, in a sentence, before it changes anything. Whatever
ends a run early leaves a directory that the same command continues.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from tokenmill.engines import Choice, Tokenizer, choose, load_tokenizer
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors.local import LocalExecutor, start_executor
from tokenmill.inputs import Input, expand_inputs
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.budget import Budget, make_budget
from tokenmill.pipeline.finish import finish
from tokenmill.pipeline.journal import Journal, Lock
from tokenmill.pipeline.messages import Failed, GateResult
from tokenmill.pipeline.observer import Observer
from tokenmill.pipeline.plan import InputFile, Plan, check_unchanged, explain_formats, inspect_inputs, make_plan
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.resume import Standing, begin_or_resume, find_finished
from tokenmill.pipeline.scheduler import WORKER, Scheduler, Tally
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.task import Job
from tokenmill.pipeline.worker import WarmJob
from tokenmill.progress import Display, Silence
from tokenmill.store.manifest import MANIFEST, Manifest, ParityInfo
from tokenmill.store.store import TokenStore

__all__ = ["Interrupted", "Outcome", "Prepared", "carry_out", "prepare", "run", "tokenize"]


class Interrupted(TokenmillError):
    """A signal ended the run; the directory can be continued."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def tokenize(
    inputs: str | Path | list[str] | list[Path],
    out: str | Path,
    *,
    tokenizer: str,
    display: Display | None = None,
    **flags: Any,
) -> TokenStore:
    """Tokenize text files into a store, or continue a run that was stopped.

    `flags` are those of `tokenmill tokenize` with underscores: `text_key`, `workers`, `memory`,
    `val_fraction`, `on_error`, ... Calling it again on a finished store opens the store.
    """
    several = [inputs] if isinstance(inputs, (str, Path)) else inputs
    names = [str(item) for item in several]
    request = Request.from_flags({"inputs": names, "out": str(out), "tokenizer": str(tokenizer), **flags})
    run(request, display or Silence())
    return TokenStore(Path(request.out))


@dataclass(frozen=True)
class Outcome:
    """A finished run, and how it went; `observer` is None when there was nothing left to do."""

    manifest: Manifest
    observer: Observer | None


@dataclass(frozen=True)
class Prepared:
    """A request that can be carried out: what it reads and writes with was found and looked at."""

    request: Request
    tokenizer: Tokenizer
    choice: Choice
    files: list[InputFile]
    settings: Settings


def prepare(request: Request) -> Prepared:
    """Look at everything that a request names, and refuse what cannot work; nothing is written yet."""
    inputs = _outside(expand_inputs(request.inputs), Path(request.out))
    tokenizer = load_tokenizer(request.tokenizer)
    choice = choose(tokenizer, request.engine, request.specials_in_text(tokenizer))
    request.policy(tokenizer)
    files = inspect_inputs(inputs, request.format, request.reading())
    return Prepared(request, tokenizer, choice, files, request.settings(tokenizer, files))


def run(request: Request, display: Display, started: LocalExecutor | None = None) -> Outcome:
    """Carry out a request. Signals end it cleanly, also in the middle of a task.

    An executor that was `started` before this module was imported has saved that time; it is closed here.
    """
    with _signals_raise(), closing(started or start_executor()) as executor:
        return carry_out(prepare(request), display, executor)


def carry_out(prepared: Prepared, display: Display, executor: LocalExecutor, plan: Plan | None = None) -> Outcome:
    """Make the store, or what is missing of it; `plan` is made here, unless it was made before."""
    request, settings, files = prepared.request, prepared.settings, prepared.files
    budget = make_budget(request, len(prepared.tokenizer.files[prepared.tokenizer.main_file]))
    finished = _find_read_only(request, settings, files)
    if finished is not None:
        return _report_finished(finished, Path(request.out), files, display)
    store = _prepare_directory(Path(request.out))
    lock = Lock(store)
    try:
        lock.acquire()
    except OSError as error:
        raise _in_words(error, store) from None
    try:
        standing = begin_or_resume(store, settings, files, prepared.tokenizer, overwrite=request.overwrite)
        if standing.manifest is not None:
            return _report_finished(standing.manifest, store, files, display)
        for note in (explain_formats(files), *standing.notes, prepared.choice.note):
            if note:
                display.say(note, style="yellow")
        attempt = _Attempt(prepared, display, executor, standing)
        return attempt.carry_out(plan or make_plan(files, settings), budget)
    except (OSError, _Signal) as error:
        raise _in_words(error, store) from None
    finally:
        lock.release()


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

    def __init__(self, prepared: Prepared, display: Display, executor: LocalExecutor, standing: Standing) -> None:
        self._request = prepared.request
        self._tokenizer = prepared.tokenizer
        self._choice = prepared.choice
        self._files = prepared.files
        self._settings = prepared.settings
        self._display = display
        self._executor = executor
        self._standing = standing
        self._store = Path(prepared.request.out)
        self._journal = Journal(self._store)
        self._engine: str = prepared.choice.engine
        self._parity: ParityInfo | None = None

    def carry_out(self, plan: Plan, budget: Budget) -> Outcome:
        observer = Observer(self._store, self._display, budget)
        try:
            tally = self._run(self._choice.engine, plan, observer, budget)
            for file in check_unchanged(self._files):
                self._display.say(f"{file.shown} was modified during the run; {ONLY_SAMPLED}", style="yellow")
        except BaseException as error:
            said = _in_words(error, self._store)
            self._executor.close()
            observer.close(completed=False, reason=str(said))
            self._sweep()
            raise said from None
        self._executor.close()
        if observer.snapshot is not None:
            # A limit, or what follows the last document of a stream, may leave some bytes unread.
            total = observer.snapshot.total_bytes
            self._display.update(msgspec.structs.replace(observer.snapshot, done_bytes=total))
        observer.close(completed=True)
        observer.write_run_file()
        parity = self._parity
        manifest = finish(
            self._journal,
            num_tasks=tally.num_tasks_done,
            settings=self._settings,
            inputs=self._files,
            tokenizer=self._tokenizer,
            engine=self._engine,
            parity=parity if parity is not None and (parity.num_documents or parity.num_awkward) else None,
        )
        return Outcome(manifest, observer)

    def _run(self, engine: str, plan: Plan, observer: Observer, budget: Budget) -> Tally:
        """Run all tasks with the engine, or with its reference when the gate finds a difference."""
        job = self._job(engine, budget)
        self._engine = engine
        self._executor.warm(f"{WORKER}:warm", msgspec.json.encode(self._warm_job(job)))

        def gate_passed(result: GateResult) -> None:
            self._parity = self._parity or result.parity
            if result.parity.num_mismatches:
                raise _Mismatch(result.parity)
            _introduce(self._display, self._tokenizer, job, result, budget)
            if result.unseen_keys:
                names = ", ".join(map(repr, result.unseen_keys))
                self._display.say(f"--keep-keys: no document that was looked at has {names}", style="yellow")

        scheduler = Scheduler(
            self._executor,
            job,
            plan,
            self._journal,
            num_workers=budget.num_workers,
            gate_passed=gate_passed,
            gate_beside_tasks=budget.gate_beside_tasks,
            max_errors=self._request.max_errors,
            pins=_pins(self._request),
            observe=observer.observe,
            say=lambda text: self._display.say(text, style="yellow"),
        )
        try:
            scheduler.run(self._standing.done, self._standing.ended_streams)
            return scheduler.tally
        except _Mismatch as found:
            reference = self._fall_back(found.parity)
        return self._run(reference, plan, observer, budget)

    def _fall_back(self, parity: ParityInfo) -> str:
        """Forget what workers have done with an engine that differs, loudly, and name its reference."""
        found = (
            f"{self._engine} differs from {parity.reference} on {parity.num_mismatches} of "
            f"{parity.num_documents + parity.num_awkward} texts, for example {parity.example!r}"
        )
        if self._choice.named:
            raise TokenmillError(f"{found}; use --engine auto")
        self._display.say(f"{found}; using {parity.reference}, which is slower", style="bold red")
        self._executor.close()
        self._sweep()
        self._executor = start_executor()
        return parity.reference

    def _sweep(self) -> None:
        self._journal.sweep({record.name: record for record in self._journal.records()})

    def _job(self, engine: str, budget: Budget) -> Job:
        return Job(
            store=str(self._store),
            inputs=self._files,
            settings=self._settings,
            engine=engine,
            vocab_size=self._tokenizer.vocab_size,
            special_ids=sorted(self._tokenizer.special_tokens.values()),
            on_error=self._request.on_error,
            batch_size=self._request.batch_size,
            worker_bytes=budget.worker_bytes,
            profile=str(Path(self._request.profile).absolute()) if self._request.profile is not None else None,
        )

    def _warm_job(self, job: Job) -> WarmJob:
        return WarmJob(job.store, job.engine, self._settings.policy.special_tokens, self._tokenizer.sha256)


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


def _outside(inputs: list[Input], store: Path) -> list[Input]:
    """The inputs without the store's own files, for a store inside the directory that it is made from."""
    folder = str(store.absolute()) + os.sep
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
    if present - {".lock", ".workers.lock"} and not present & {"manifest.json", ".tasks"}:
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
