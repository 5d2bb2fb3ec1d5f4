"""The parity gate: a run publishes nothing until the ids of a sample are equal to those of the reference.

A worker encodes the sample, and the process of the run compares it (`pipeline/parity.py`). Later, every task sends a
few documents; if one of them differs, the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.display import Display
from tokenmill.engines import REFERENCES
from tokenmill.engines.proofs import Proof
from tokenmill.errors import TokenmillError
from tokenmill.formatting import format_bytes, plural
from tokenmill.pipeline.inspection import describe_inputs
from tokenmill.pipeline.journal.finish import describe_gate
from tokenmill.pipeline.journal.journal import GateRecord, Journal
from tokenmill.pipeline.journal.samples import refuse
from tokenmill.pipeline.parity import Compared
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.pipeline.plan.prepare import Job, Prepared
from tokenmill.pipeline.task.gate_sample import GateSample
from tokenmill.pipeline.task.preview import show_preview
from tokenmill.store.manifest import ParityInfo

__all__ = ["Gate", "Mismatch"]


ROOM_FOR_IDS = 66
"""What is left of 80 columns for the ids of the example and how many there are."""


class Mismatch(Exception):
    """The parity gate found a difference."""


@dataclass(eq=False)
class Gate:
    """Decides what follows from the comparisons with the reference."""

    prepared: Prepared
    journal: Journal
    job: Job
    display: Display
    budget: Budget
    keep: Callable[[GateRecord], None]
    mismatch: ParityInfo | None = None
    """The difference that made the run switch to the reference."""

    def __post_init__(self) -> None:
        self._tokenizer = self.prepared.tokenizer
        engine, specials = self.job.engine, self.job.settings.policy.special_tokens
        self._proof = Proof("the awkward strings", self._tokenizer, engine, specials)
        is_reference = engine in REFERENCES.values()
        self._num_proven = 0 if is_reference else (self._proof.find() or {}).get("num_awkward")
        self.with_awkward = type(self._num_proven) is not int
        """Whether to compare the awkward strings, which is done once for a tokenizer and an engine."""

    def passed(self, sample: GateSample, compared: Compared) -> None:
        """Record that the gate found no difference, and show the first screen; raise if there is one."""
        num_awkward = len(sample.awkward) if self.with_awkward else self._num_proven or 0
        differing = compared.differing
        parity = ParityInfo(
            reference=REFERENCES[self._tokenizer.kind],
            num_documents=sample.num_documents,
            num_in_parts=sample.num_in_parts,
            num_bytes=sum(len(one.text.encode()) for one in sample.texts),
            num_awkward=num_awkward if sample.texts or sample.awkward else 0,
            num_mismatches=len(differing),
            example=differing[0].text[:200] if differing else None,
        )
        if differing:
            raise Mismatch(parity)
        if sample.awkward:
            self._proof.keep({"num_awkward": num_awkward})
        self.keep(describe_gate(self._tokenizer, self.job.engine, self.mismatch or parity))
        self._show_first_screen(sample, parity)

    def refuse(self, compared: Compared) -> TokenmillError:
        """Take back a task whose documents differ, and return the error that ends the run."""
        return refuse(self.journal, self.prepared.files, compared)

    def _show_first_screen(self, sample: GateSample, parity: ParityInfo) -> None:
        """Show what will be written, so that the user sees a wrong EOS in the first second."""
        display, tokenizer, job, budget = self.display, self._tokenizer, self.job, self.budget
        policy, preview = job.settings.policy, sample.preview
        names = {token: name for name, token in tokenizer.special_tokens.items()}
        display.say(f"inputs     {describe_inputs(self.prepared.files, self.prepared.settings.reading)}")
        display.say(f"tokenizer  {tokenizer.name} ({tokenizer.kind}), {plural(tokenizer.vocab_size, 'token')}")
        if parity.num_mismatches == 0 and parity.num_documents:
            parts = f", {parity.num_in_parts:,} of them in parts" if parity.num_in_parts else ""
            display.say(
                f"engine     {job.engine}, with the same ids as {parity.reference} on {parity.num_documents:,} of your"
            )
            size = f"({format_bytes(parity.num_bytes)})"
            display.say(f"           documents{parts} {size} and {parity.num_awkward:,} awkward strings")
        else:
            display.say(f"engine     {job.engine}")
        for word, token in (("begin", policy.bos_id), ("end  ", policy.eos_id)):
            shown = "no token" if token is None else f"{names.get(token, '')} {token}".strip()
            if word == "begin" and token is None and tokenizer.bos_id is not None:
                shown += f"; --bos puts {names.get(tokenizer.bos_id, tokenizer.bos_id)} before every document"
            display.say(f"{word}      {shown}")
        display.say(f"specials   {policy.special_tokens} where a text has their strings")
        if preview is not None:
            text, ids = show_preview(preview, tokenizer)
            display.say(f"example    {text}")
            size = plural(preview.num_tokens, "id")
            if preview.num_characters:
                ids, size = ids.rstrip(), f"the start of {preview.num_characters:,} characters"
            fits = len(ids) + len(size) <= ROOM_FOR_IDS
            for line in (f"{ids} ({size})",) if fits else (ids, f"({size})"):
                display.say(f"           {line}")
        if sample.trained is not None:
            display.say(f"trained    {sample.trained.text}")
            display.say(f"stop       {sample.trained.stop}")
        workers = plural(budget.num_workers, "worker")
        display.say(f"resources  {workers}, {budget.memory_bytes / 1e9:.1f} GB of memory\n")
        if sample.dropped is not None:
            display.say(sample.dropped, style="yellow")
