"""One attempt at a run: parity gate, tasks, and the manifest when every task is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors.base import Cluster, Executor
from tokenmill.executors.local import start_executor
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.budget import Budget
from tokenmill.pipeline.ending import in_words
from tokenmill.pipeline.finish import Stock, describe_gate, finish, glance, take_stock
from tokenmill.pipeline.journal import GateRecord, Journal, SavedPlan, TaskRecord
from tokenmill.pipeline.locking import taking_turns
from tokenmill.pipeline.messages import GateResult
from tokenmill.pipeline.mill import WarmJob
from tokenmill.pipeline.observer import Observer
from tokenmill.pipeline.plan import Plan, check_unchanged
from tokenmill.pipeline.preparing import Prepared, make_job
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.resume import Standing, find_finished
from tokenmill.pipeline.scheduler import Scheduler
from tokenmill.pipeline.sharing import WHOLE, Share, membership
from tokenmill.pipeline.tally import Tally
from tokenmill.pipeline.task import Job
from tokenmill.progress import Display
from tokenmill.store.manifest import Manifest, ParityInfo

__all__ = ["ONLY_SAMPLED", "Attempt", "Outcome"]


class Runner(Protocol):
    """What hands out tasks, here or on a cluster."""

    def run(self, done: dict[str, TaskRecord], ended_streams: dict[int, list[int]]) -> None:
        """Finish the plan, given what earlier attempts did."""


ONLY_SAMPLED = "its size and a sample of its content are the same; if it may be another text, run with --overwrite"


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


class Attempt:
    """One attempt at a run that is not finished yet."""

    def __init__(
        self,
        prepared: Prepared,
        display: Display,
        executor: Executor | Cluster,
        journal: Journal,
        standing: Standing,
    ) -> None:
        # With the stamps of the run: an input that was only touched since counts as what it was.
        prepared = replace(prepared, files=standing.plan.inputs)
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
        """Do what is left to do, and write the manifest if nothing is."""
        observer = Observer(self._store, self._display, budget, self._prepared.share, self._prepared.mirror)
        standing = self._standing
        try:
            if standing.has_work or (standing.done and self._journal.gate() is None):
                self._tell_share()
                self._run(self._choice.engine, standing.part, observer, budget)
            for file in check_unchanged(self._files):
                self._display.say(f"{file.shown} was modified during the run; {ONLY_SAMPLED}", style="yellow")
        except BaseException as error:
            said = in_words(error, self._store)
            self._executor.close()
            observer.close(completed=False, reason=str(said), tally=self._resumed())
            self._sweep()
            raise said from None
        self._executor.close()
        if observer.snapshot is not None:
            # A limit, or what follows the last document of a stream, may leave some bytes unread.
            total = observer.snapshot.total_bytes
            self._display.update(msgspec.structs.replace(observer.snapshot, done_bytes=total))
        # A rank that had nothing to do leaves word of itself too.
        observer.close(completed=True, tally=None if self._prepared.share.is_whole else self._resumed())
        try:
            return self._conclude(observer)
        except Exception as error:
            said = in_words(error, self._store)
            observer.retract(str(said))
            raise said from None

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
        share = self._prepared.share
        with taking_turns(self._store):
            stock = self._glance()
            manifest = self._find_finished()
            if manifest is not None:
                # Another rank was faster, and did not know yet how this one ended.
                observer.write_run_file()
                return Outcome(manifest, observer, share)
            stock = stock or take_stock(self._journal, self._standing.plan)
            if stock.is_complete:
                self._check_rejects(stock)
                return Outcome(self._finish(stock, observer), observer, share, stock)
        if share.is_whole:
            raise StoreError(f"{self._journal.folder} has entries for {stock}; run the same command again")
        self._journal.sweep_own()
        return Outcome(None, observer, share, stock, sum(map(membership(self._standing.part), stock.done)))

    def _glance(self) -> Stock | None:
        """What is missing, as far as names tell; where they do not, the journal is here now as it is in its bucket."""
        if self._prepared.share.is_whole:
            return None
        files = self._journal.files()
        stock = glance(files, self._standing.plan) if files else None
        if stock is None and self._journal.mirror is not None:
            self._journal.mirror.pull(self._store)
        return stock

    def _find_finished(self) -> Manifest | None:
        return find_finished(self._store, self._settings, self._files, self._prepared.share)

    def _finish(self, stock: Stock, observer: Observer) -> Manifest:
        try:
            observer.write_run_file()
            return finish(self._journal, SavedPlan(self._settings.flags(), self._standing.plan), stock.records)
        except FileNotFoundError:
            # Without locks, another rank may have been at it too, and have removed the journal.
            manifest = self._find_finished()
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
            self._keep_gate(describe_gate(self._tokenizer, engine, self._parity))
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

    def _keep_gate(self, record: GateRecord) -> None:
        """Remember which engine makes the store: the manifest names one, so that all ranks have to have it.

        A run that continues may have another, which has the same ids. If both were at work, the manifest names the one
        that was compared with the reference, or else the last.
        """
        known = self._journal.enter_gate(record)
        differences = known.differences(record)
        if not differences:
            return
        before, now = (" and ".join(names) for names in zip(*differences, strict=True))
        if not self._prepared.share.is_whole:
            raise StoreError(
                f"{self._store} was begun with {before}, and {self._prepared.share} has {now}; give all ranks the same "
                f"engine and versions, or remove {self._store} and start all ranks again"
            )
        if self._standing.done:
            self._warn(f"{len(self._standing.done):,} tasks were made with {before}; the others are made with {now}")
        if not self._standing.done or known.parity is None or record.parity is not None:
            self._journal.keep_gate(record)

    def _make_runner(
        self, job: Job, plan: Plan, observer: Observer, budget: Budget, gate_passed: Callable[[GateResult], None]
    ) -> Runner:
        """What hands out tasks: to workers of this machine, or to a cluster."""
        request, executor = self._request, self._executor
        if isinstance(executor, Cluster):
            from tokenmill.pipeline.dispatcher import Dispatcher

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
        WarmJob.of(job).begin(executor)
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
        parts = f", {parity.num_in_parts:,} of them in parts" if parity.num_in_parts else ""
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
