"""One attempt at the tasks of a run, with the chosen engine, or with its reference if the parity gate fails."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.display import Display, Preparation
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.executors.base import Executor
from tokenmill.formatting import format_bytes
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.journal.journal import GateRecord, Journal
from tokenmill.pipeline.journal.mirror import PLAN
from tokenmill.pipeline.journal.resume import RunState
from tokenmill.pipeline.parity import ParityCheck
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.pipeline.plan.prepare import Job, Prepared
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.workers.engine_cache import EngineKey, warm_engine
from tokenmill.pipeline.workers.gate import Gate, Mismatch
from tokenmill.pipeline.workers.scheduler import Scheduler
from tokenmill.store.manifest import ParityInfo
from tokenmill.store.shard import DTYPES, dtype_for

__all__ = ["Attempt", "make_job"]

TOKENS_PER_BYTE = 0.3
"""About what large vocabularies have for most text; `tokenmill estimate` counts them."""
FAR_NOTE_SECONDS = 1.0


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
    parity_check: ParityCheck | None
    """None if the chosen engine is the reference."""

    def run(self) -> None:
        """Finish every task of this process's part of the plan."""
        choice = self.prepared.choice
        try:
            self._run(choice.engine, self.parity_check)
            return
        except Mismatch as found:
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
        self._run(parity.reference, None, parity)

    def _run(self, engine: str, parity_check: ParityCheck | None, mismatch: ParityInfo | None = None) -> None:
        settings, journal = self.prepared.settings, self.journal
        job = make_job(self.prepared, journal, engine, self.budget.worker_bytes, self.executor.shares_disk)
        job = msgspec.structs.replace(job, is_followed=bool(self.state.part.order))
        if not job.shares_disk:
            # At most a thousand notes a second, however large the cluster is.
            job = msgspec.structs.replace(job, note_seconds=FAR_NOTE_SECONDS * max(1.0, self.budget.num_workers / 1000))
        self.executor.pin(_pins(self.prepared.request))
        key = EngineKey(engine, settings.policy.special_tokens, settings.tokenizer_sha256)
        warm_engine(self.executor, journal.store / "tokenizer", key)

        gate = Gate(self.prepared, journal, job, self.display, self.budget, self._keep_gate, mismatch)
        self._foresee_full_disk(job)
        compared = "" if parity_check is None else f", and comparing it with {self.prepared.choice.reference}"
        self.display.update(Preparation.step(f"starting {engine}{compared}"))
        request, observe = self.prepared.request, self.observer.observe
        Scheduler(
            self.executor, job, self.state, journal, request, self.budget, gate, parity_check, observe, self._warn
        ).run()

    def _foresee_full_disk(self, job: Job) -> None:
        """Say before work starts that the tokens may not fit the disk."""
        if not job.shares_disk or job.mirror is not None:
            return
        counts = self.state.counts()
        left = sum(file.text_bytes for file in job.inputs) * (1 - counts.done_bytes / max(1, counts.total_bytes))
        size = DTYPES[dtype_for(job.vocab_size)][1].itemsize
        needed = left * size * (1.0 if job.engine == "bytes" else TOKENS_PER_BYTE)
        free = shutil.disk_usage(self.journal.store).free
        if needed > free:
            self._warn(
                f"disk       the store may take {format_bytes(needed)} more, and {format_bytes(free)} are free; a run "
                "that fills the disk stops, and resumes when there is room"
            )

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
