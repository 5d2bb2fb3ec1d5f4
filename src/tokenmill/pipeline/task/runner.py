"""Run one task: a span of text becomes shards, then a journal entry.

    read a batch -> encode -> add BOS and EOS -> choose the split -> write
    ... at the end: sync, rename the shards, sync the directory, write the journal entry

This is the inner loop of tokenmill. It runs in one process and knows nothing of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.engines import REFERENCES, open_tokenizer
from tokenmill.engines.alignment import Aligner
from tokenmill.engines.base import Engine
from tokenmill.errors import DataError
from tokenmill.pipeline.counts import Stages
from tokenmill.pipeline.input_file import Span, UnconfirmedText, check_unchanged, find_damage, read_span
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.plan.tasks import Task
from tokenmill.pipeline.settings import TokenPolicy
from tokenmill.pipeline.task.output import TaskOutput
from tokenmill.pipeline.task.streams import read_spool
from tokenmill.pipeline.task.task_sample import TaskSample
from tokenmill.pipeline.text_field import TextField
from tokenmill.readers.base import ExceedsMemory
from tokenmill.store.shard import DTYPES, dtype_for
from tokenmill.supervision.masks import Weights, assemble, weigh_tokens
from tokenmill.text_batch import IntArray, PackedTexts, Reject, TextBatch, TokenBatch, check_range

__all__ = ["TaskRunner", "surround"]

LONG_TEXT = 2 << 20
"""Texts with more characters are encoded in pieces of about this size."""

SHORT_DOCUMENT = 128
"""If documents have fewer tokens than this on average, one masked assignment is faster than a copy per document."""


class Encoded(NamedTuple):
    """The documents of a batch as they are stored.

    Supervised data has the loss weights of the tokens, and preference pairs also the lengths of `AssembledPairs`.
    """

    tokens: IntArray
    lengths: npt.NDArray[np.int32]
    weights: Weights | None = None
    shared: npt.NDArray[np.int32] | None = None


@dataclass
class TaskRunner:
    """Runs tasks of one job with one engine; it calls `free_memory` whenever memory may have grown."""

    job: Job
    journal: Journal
    engine: Engine
    free_memory: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        job = self.job
        self._dtype = dtype_for(job.vocab_size)
        supervised = job.settings.supervision is not None
        # A template writes special tokens itself; the renderer checks for those inside records.
        checks_specials = job.settings.policy.special_tokens != "as-text" and not supervised
        self._special_ids = np.isin(np.arange(job.vocab_size), job.special_ids) if checks_specials else None
        tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer") if supervised else None
        self._renderer = job.settings.renderer(tokenizer) if tokenizer is not None else None
        self._sample: TaskSample | None = None
        self._aligner = Aligner(tokenizer, job.settings.policy.special_tokens) if tokenizer is not None else None

    def run(self, task: Task, mark: str, report: Callable[[Stages], None] = lambda _: None) -> TaskOutput:
        """Tokenize one task to durable files with temporary names; `mark` makes these names unique.

        `report` is called after every batch. If a damaged frame is found after some of its text was written, the task
        is repeated without that frame.
        """
        counted = Stages()

        def count(stages: Stages) -> None:
            counted.add(stages)
            report(stages)

        try:
            return self._run(task, mark, count)
        except UnconfirmedText:
            if self.job.stops_at_damage:
                raise
        report(Stages().since(counted))
        return self._run(self._leave_out_damage(task), mark, report)

    def _leave_out_damage(self, task: Task) -> Task:
        """Find all damaged frames in the inputs of a task, and end each span in front of the damage."""
        spans = []
        for span in task.spans:
            file = self.job.inputs[span.input]
            damage = find_damage(file, self.job.settings.reading) if file.compression != "none" else None
            spans.append(msgspec.structs.replace(span, damage=damage))
        return msgspec.structs.replace(task, spans=spans)

    def _run(self, task: Task, mark: str, report: Callable[[Stages], None]) -> TaskOutput:
        output = TaskOutput(
            self.job, self.journal, task, self._dtype, f"{self.journal.attempt_name}.{mark}".lstrip(".")
        )
        # A reference has nothing to be compared with.
        self._sample = None if self.engine.name in REFERENCES.values() else TaskSample(self.engine)
        rerouted = self.engine.num_rerouted
        inputs = [self.job.inputs[span.input] for span in task.spans]
        try:
            for span in task.spans:
                try:
                    self._run_span(task, span, output, report)
                except ExceedsMemory as error:
                    raise DataError(self.job.inputs[span.input].shown, str(error)) from None
            if task.damage is not None:
                output.reject_damage(task.damage)
                report(Stages(num_rejects=task.damage.num_documents))
            check_unchanged(inputs)
            output.finish(self.engine.num_rerouted - rerouted, self._sample.texts if self._sample is not None else [])
            return output
        except BaseException as error:
            output.discard()
            if isinstance(error, DataError):
                # An input that changes while it is being read looks damaged; say that it changed instead.
                check_unchanged(inputs)
            raise

    def _run_span(self, task: Task, span: Span, output: TaskOutput, report: Callable[[Stages], None]) -> None:
        reading = self.job.reading(packed=self.engine.takes_packed)
        file = self.job.inputs[span.input]
        render = self._renderer.render if self._renderer is not None else None
        confirmed_only = not self.job.settings.keeps_damaged
        if task.spool:
            batches = read_spool(file, task, reading, render)
        else:
            batches = read_span(file, span, reading, render, confirmed_only=confirmed_only)
        field = TextField(file, span) if self.job.on_error != "fail" else None
        clock = time.perf_counter()
        for batch in batches:
            stages = Stages(parse=time.perf_counter() - clock - batch.read_seconds)
            if file.compression != "none" and task.spool is None:
                stages.decompress = batch.read_seconds
            else:
                stages.read = batch.read_seconds
            encoded = self._encode(span.input, batch, output, stages)
            for reject in sorted(batch.rejects, key=lambda reject: reject.position):
                output.reject(span.input, reject)
            if field is not None:
                field.look(batch)
            clock = time.perf_counter()
            output.append(span.input, batch, *encoded)
            stages.write = time.perf_counter() - clock
            stages.num_bytes = batch.num_bytes
            stages.num_rejects = sum(reject.num_documents for reject in batch.rejects)
            stages.num_documents, stages.num_tokens = len(batch.texts) // batch.per_record, len(encoded.tokens)
            report(stages)
            clock = time.perf_counter()
        if field is not None:
            field.end()

    def _encode(self, input: int, batch: TextBatch, output: TaskOutput, stages: Stages) -> Encoded:
        started = time.perf_counter()
        if batch.per_record == 2:
            pairs = self._encode_pairs(input, batch)
            stages.encode += time.perf_counter() - started
            return pairs
        encoded = self._encode_texts(batch.texts)
        if self._sample is not None:
            self._sample.look(input, batch, encoded)
        if self._special_ids is not None:
            encoded = self._handle_specials(batch, encoded, output)
        policy, vocab_size, dtype = self.job.settings.policy, self.job.vocab_size, DTYPES[self._dtype][1]
        weights: Weights | None = None
        if self._aligner is None or batch.trained is None:
            tokens, lengths = surround(encoded, policy, dtype=dtype, vocab_size=vocab_size)
        else:
            check_range(encoded.ids, vocab_size)
            weights = weigh_tokens(list(batch.texts), batch.trained, encoded, self._aligner)
            tokens, lengths, weights = assemble(
                encoded, weights, batch.trained, bos_id=policy.bos_id, eos_id=policy.eos_id, dtype=dtype
            )
        stages.encode += time.perf_counter() - started
        return Encoded(tokens, lengths, weights)

    def _encode_pairs(self, input: int, batch: TextBatch) -> Encoded:
        from tokenmill.supervision.preferences import assemble_pairs, reject_empty_pairs

        policy, vocab_size = self.job.settings.policy, self.job.vocab_size

        def encode(texts: list[str]) -> TokenBatch:
            encoded = self._encode_texts(texts)
            check_range(encoded.ids, vocab_size)
            if self._sample is not None and len(texts) == len(batch.texts):
                self._sample.look(input, batch, encoded)
            return encoded

        dtype = DTYPES[self._dtype][1]
        ids = {"bos_id": policy.bos_id, "eos_id": policy.eos_id}
        pairs = assemble_pairs(list(batch.texts), batch.trained or [], encode, **ids, dtype=dtype)
        return Encoded(*reject_empty_pairs(batch, pairs))

    def _encode_texts(self, texts: Sequence[str]) -> TokenBatch:
        self.free_memory()
        longest = texts.longest if isinstance(texts, PackedTexts) else max(map(len, texts), default=0)
        if longest > LONG_TEXT:
            return TokenBatch.join([self._encode_long(text) for text in texts])
        size = self.job.batch_size
        if size is None or len(texts) <= size:
            return self.engine.encode(texts)
        return TokenBatch.join([self.engine.encode(texts[at : at + size]) for at in range(0, len(texts), size)])

    def _encode_long(self, text: str) -> TokenBatch:
        """Encode one text piece by piece, so that memory can be freed in between."""
        pieces = self.engine.split(text, LONG_TEXT)
        if len(pieces) == 1 and len(text) * self.engine.memory_per_character > self.job.worker_bytes:
            # It exceeds this worker's share of memory: drop the cache, and encode one such text at a time.
            self.engine.recycle()
            with self.journal.large_document_lock():
                return self.engine.encode(pieces)
        ids = []
        for piece in pieces:
            ids.append(self.engine.encode([piece]).ids)
            self.free_memory()
        return TokenBatch(np.concatenate(ids), np.array([0, sum(map(len, ids))]))

    def _handle_specials(self, batch: TextBatch, encoded: TokenBatch, output: TaskOutput) -> TokenBatch:
        """Count the special tokens in the texts, or reject the texts that have any."""
        assert self._special_ids is not None
        special = self._special_ids.take(encoded.ids)
        if not special.any():
            return encoded
        if self.job.settings.policy.special_tokens == "parse":
            output.num_parsed += int(special.sum())
            return encoded
        bad = np.unique(np.searchsorted(encoded.offsets, np.flatnonzero(special), "right") - 1).tolist()
        for i in bad:
            detail = "the text has the string of a special token; allow it with --special-tokens as-text or parse"
            line = int(batch.lines[i]) if batch.lines is not None else -1
            batch.rejects.append(Reject(int(batch.positions[i]), line, "special-token", detail))
        keep = np.ones(len(batch.texts), bool)
        keep[bad] = False
        batch.keep(keep)
        lengths = np.diff(encoded.offsets)
        ids = encoded.ids[np.repeat(keep, lengths)]
        return TokenBatch(ids, np.concatenate([[0], np.cumsum(lengths[keep])]))


def surround(
    batch: TokenBatch, policy: TokenPolicy, *, dtype: npt.DTypeLike, vocab_size: int
) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """Add BOS and EOS to each document and narrow the checked ids to `dtype`; return tokens and lengths."""
    ids, offsets = batch.ids, batch.offsets
    check_range(ids, vocab_size)
    before, after = policy.bos_id is not None, policy.eos_id is not None
    count = len(batch)
    lengths = (np.diff(offsets) + (before + after)).astype(np.int32)
    if not before and not after:
        return ids.astype(dtype, copy=False), lengths
    tokens = np.empty(len(ids) + count * (before + after), dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    firsts = ends - lengths
    if len(ids) < SHORT_DOCUMENT * count:
        inside = np.ones(len(tokens), bool)
        if before:
            inside[firsts] = False
        if after:
            inside[ends - 1] = False
        tokens[inside] = ids
    else:
        # Narrow in one pass, then copy each document: half the time of copies that narrow. Ids in range are the same
        # in signed numbers.
        signed = ids.view(np.int32) if ids.dtype == np.uint32 else ids
        source, target = signed.astype(dtype, copy=False).data, tokens.data
        edges = offsets.tolist()
        for to, start, stop in zip((firsts + before).tolist(), edges, edges[1:], strict=False):
            target[to : to + stop - start] = source[start:stop]
    if before:
        tokens[firsts] = policy.bos_id
    if after:
        tokens[ends - 1] = policy.eos_id
    return tokens, lengths
