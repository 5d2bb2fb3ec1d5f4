"""One attempt at the tasks of a run, with the chosen engine, or with its reference if the parity gate fails."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.display import Display
from tokenmill.engines import Tokenizer
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors.base import Executor
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.journal.finish import describe_gate
from tokenmill.pipeline.journal.journal import GateRecord, Journal
from tokenmill.pipeline.journal.mirror import PLAN
from tokenmill.pipeline.journal.resume import RunState
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.pipeline.plan.prepare import Job, Prepared
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.task.parity import GateResult
from tokenmill.pipeline.workers.engine_cache import EngineKey, warm_engine
from tokenmill.pipeline.workers.scheduler import Scheduler
from tokenmill.store.manifest import ParityInfo

__all__ = ["Attempt", "make_job"]


@dataclass(frozen=True)
class Attempt:
    """Runs the remaining tasks of a run, with the engine's reference if the parity gate finds a difference."""

    prepared: Prepared
    journal: Journal
    state: RunState
    executor: Executor
    budget: Budget
    observer: Observer
    display: Display

    def run(self) -> None:
        """Finish every task of this process's part of the plan."""
        choice = self.prepared.choice
        try:
            self._run(choice.engine)
            return
        except _Mismatch as found:
            parity: ParityInfo = found.args[0]
        difference = (
            f"{choice.engine} differs from {parity.reference} on {parity.num_mismatches} of "
            f"{parity.num_documents + parity.num_awkward} texts, for example {parity.example!r}"
        )
        if choice.named:
            raise TokenmillError(f"{difference}; use --engine auto")
        self.display.say(f"{difference}; using {parity.reference}, which is slower", style="bold red")
        if self.executor.shares_disk:
            self.executor.close()
            self.journal.sweep()
            self.executor.join(None)
        self._run(parity.reference, parity)

    def _run(self, engine: str, mismatch: ParityInfo | None = None) -> None:
        settings, journal = self.prepared.settings, self.journal
        job = make_job(self.prepared, journal, engine, self.budget.worker_bytes, self.executor.shares_disk)
        job = msgspec.structs.replace(job, is_followed=bool(self.state.part.order))
        self.executor.pin(_pins(self.prepared.request))
        key = EngineKey(engine, settings.policy.special_tokens, settings.tokenizer_sha256)
        warm_engine(self.executor, journal.store / "tokenizer", key)

        def gate_passed(result: GateResult) -> None:
            if result.parity.num_mismatches:
                raise _Mismatch(result.parity)
            self._keep_gate(describe_gate(self.prepared.tokenizer, engine, mismatch or result.parity))
            _show_first_screen(self.display, self.prepared.tokenizer, job, result, self.budget)

        request, observe = self.prepared.request, self.observer.observe
        Scheduler(self.executor, job, self.state, journal, request, self.budget, gate_passed, observe, self._warn).run()

    def _keep_gate(self, record: GateRecord) -> None:
        """Save which engine makes the store: the manifest names one, so all ranks must have the same.

        A resumed run may have another engine, with the same ids. If both made tasks, the manifest names the one that
        was compared with the reference, or else the last.
        """
        known = self.journal.save_gate_once(record)
        differences = known.differences(record) if known is not None else []
        if known is None or not differences:
            return
        store, share, done = self.journal.store, self.prepared.share, self.state.done
        before, now = (" and ".join(names) for names in zip(*differences, strict=True))
        if not share.is_whole:
            raise StoreError(
                f"{store} was begun with {before}, and {share} has {now}; give all ranks the same "
                f"engine and versions, or remove {store} and start all ranks again"
            )
        if done:
            self._warn(f"{len(done):,} tasks were made with {before}; the others are made with {now}")
        if not done or known.parity is None or record.parity is not None:
            self.journal.save_gate(record)

    def _warn(self, text: str) -> None:
        self.display.say(text, style="yellow")


class _Mismatch(Exception):
    """The parity gate found a difference."""


def make_job(prepared: Prepared, journal: Journal, engine: str, worker_bytes: int, shares_disk: bool = True) -> Job:
    """Make the job that is sent to every process of a run."""
    request, mirror = prepared.request, journal.mirror
    return Job(
        store=str(journal.store if shares_disk else journal.store.absolute()),
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
        shares_disk=shares_disk,
        attempt=journal.attempt,
        mirror=mirror.url if mirror is not None else None,
        plan_tag=mirror.tag(PLAN) if mirror is not None else None,
        scratch=str(Path(request.scratch).absolute()) if request.scratch is not None else None,
    )


def _pins(request: Request) -> list[int]:
    """Return the CPUs for --affinity and --numa, one per worker; empty without these flags."""
    if not (request.affinity or request.numa):
        return []
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--affinity and --numa need Linux: other systems do not let a process choose its cores")
    return physical_cpus(across_nodes=request.numa)


def _show_first_screen(display: Display, tokenizer: Tokenizer, job: Job, result: GateResult, budget: Budget) -> None:
    """Show what will be written, so that the user sees a wrong EOS in the first second."""
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
    for word, token in (("begin", policy.bos_id), ("end  ", policy.eos_id)):
        shown = "no token" if token is None else f"{names.get(token, '')} {token}".strip()
        display.say(f"{word}      {shown}")
    display.say(f"specials   {policy.special_tokens} where a text has their strings")
    if preview is not None:
        display.say(f"example    {preview.text}")
        display.say(f"           {preview.ids} ({preview.num_tokens:,} ids)")
    if result.trained is not None:
        display.say(f"trained    {result.trained.text}")
        display.say(f"stop       {result.trained.stop}")
    workers = f"{budget.num_workers} worker{'s' if budget.num_workers > 1 else ''}"
    display.say(f"resources  {workers}, {budget.memory_bytes / 1e9:.1f} GB of memory\n")
    if result.unseen_keys:
        keys = ", ".join(map(repr, result.unseen_keys))
        display.say(f"--keep-keys: no document that was looked at has {keys}", style="yellow")
