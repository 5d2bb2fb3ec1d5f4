"""Running one task: a span of text becomes shards, then a journal entry.

    read a batch -> encode -> put BOS and EOS around -> choose the split -> write
    ... at the end: sync, name the shards, sync the directory, enter the task in the journal

This is the inner loop of tokenmill, in one process, with no knowledge of the others.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.batch import IntArray, PackedTexts, Reject, TextBatch, TokenBatch, check_range, encode_texts
from tokenmill.engines import open_tokenizer
from tokenmill.engines.alignment import Aligner
from tokenmill.engines.base import Engine
from tokenmill.errors import DataError
from tokenmill.files import sync_directory
from tokenmill.pipeline.journal import Journal, StoredReject, TaskRecord
from tokenmill.pipeline.mirroring import Mirror
from tokenmill.pipeline.plan import InputFile, Span, Task, check_unchanged
from tokenmill.pipeline.reading import describe_place, read_span, read_spool
from tokenmill.pipeline.settings import OnError, Settings, TokenPolicy
from tokenmill.pipeline.sharing import WHOLE, Share
from tokenmill.pipeline.stages import Stages
from tokenmill.store.shard import DTYPES, ShardWriter, dtype_for
from tokenmill.supervision.masking import Weights, assemble, weigh_tokens

__all__ = ["Job", "TaskRunner", "surround"]

LONG_TEXT = 2 << 20
"""Texts of more characters are encoded in pieces of about this size."""
SHORT_DOCUMENT = 128
"""Below this mean number of tokens a mask places documents faster than one copy each."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to run any task of a run."""

    store: str
    inputs: list[InputFile]
    settings: Settings
    engine: str
    vocab_size: int
    special_ids: list[int]
    on_error: OnError
    batch_size: int | None
    worker_bytes: int
    """How much memory one worker may take."""
    profile: str | None = None
    """A file for the profile of the worker that gets this job."""
    mirror: str | None = None
    """The URL of the store, where it is in a bucket and `store` is a scratch directory."""
    plan_tag: str | None = None
    """The ETag of its plan there."""
    scratch: str | None = None
    """Where machines of a cluster make scratch directories of their own."""
    share: Share = WHOLE
    attempt: str = ""
    """A word that no other attempt has, for the names of temporary files."""


class TaskRunner:
    """Runs tasks of one job with one engine.

    `report` is called after every batch; `relieve` whenever memory may have grown, to give some back.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        report: Callable[[Stages], None],
        relieve: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._engine = engine
        self._report = report
        self._relieve = relieve
        mirror = Mirror(job.mirror, job.plan_tag) if job.mirror is not None else None
        self._journal = Journal(Path(job.store), job.share, job.attempt, mirror)
        self._dtype = dtype_for(job.vocab_size)
        supervised = job.settings.supervision is not None
        # A template writes special tokens; what records have of them was looked at when they were rendered.
        watches = job.settings.policy.special_tokens != "as-text" and not supervised
        self._special_ids = _special_table(job) if watches else None
        tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer") if supervised else None
        self._renderer = job.settings.renderer(tokenizer) if tokenizer is not None else None
        self._aligner = Aligner(tokenizer, job.settings.policy.special_tokens) if tokenizer is not None else None

    def run(self, task: Task, run: str) -> TaskOutput:
        """Tokenize one task; it is durable but has no name yet. `run` makes temporary names unique to this attempt."""
        output = TaskOutput(self._job, self._journal, task, self._dtype, f"{self._journal.mark}.{run}".lstrip("."))
        rerouted = self._engine.num_rerouted
        try:
            for span in task.spans:
                self._run_span(task, span, output)
            if task.damage is not None:
                output.reject_damage(task.damage)
                self._report(Stages(num_rejects=1))
            self._check_inputs(task)
            output.finish(self._engine.num_rerouted - rerouted)
            return output
        except BaseException as error:
            output.discard()
            if isinstance(error, DataError):
                # An input that changes while it is read looks damaged.
                self._check_inputs(task)
            raise

    def _check_inputs(self, task: Task) -> None:
        check_unchanged(self._job.inputs[span.input] for span in task.spans)

    def _run_span(self, task: Task, span: Span, output: TaskOutput) -> None:
        reading = msgspec.structs.replace(self._job.settings.reading, packed=self._engine.takes_packed)
        file = self._job.inputs[span.input]
        render = self._renderer.render if self._renderer is not None else None
        batches = read_spool(file, task, reading, render) if task.spool else read_span(file, span, reading, render)
        clock = time.perf_counter()
        for batch in batches:
            stages = Stages(parse=time.perf_counter() - clock - batch.read_seconds)
            if file.compression != "none" and task.spool is None:
                stages.decompress = batch.read_seconds
            else:
                stages.read = batch.read_seconds
            tokens, lengths, weights = self._encode(batch, output, stages)
            for reject in sorted(batch.rejects, key=lambda reject: reject.position):
                output.reject(span.input, reject)
            clock = time.perf_counter()
            output.append(span.input, batch, tokens, lengths, weights)
            stages.write = time.perf_counter() - clock
            stages.num_bytes = batch.num_bytes
            stages.num_rejects = sum(reject.num_documents for reject in batch.rejects)
            stages.num_documents, stages.num_tokens = len(batch.texts), len(tokens)
            self._report(stages)
            clock = time.perf_counter()

    def _encode(
        self, batch: TextBatch, output: TaskOutput, stages: Stages
    ) -> tuple[IntArray, npt.NDArray[np.int32], Weights | None]:
        started = time.perf_counter()
        encoded = self._encode_texts(batch.texts)
        if self._special_ids is not None:
            encoded = self._handle_specials(batch, encoded, output)
        tokens, lengths, weights = self._surround(batch, encoded)
        stages.encode += time.perf_counter() - started
        return tokens, lengths, weights

    def _surround(
        self, batch: TextBatch, encoded: TokenBatch
    ) -> tuple[IntArray, npt.NDArray[np.int32], Weights | None]:
        policy, vocab_size, dtype = self._job.settings.policy, self._job.vocab_size, DTYPES[self._dtype][1]
        if self._aligner is None or batch.trained is None:
            return *surround(encoded, policy, dtype=dtype, vocab_size=vocab_size), None
        check_range(encoded.ids, vocab_size)
        weights = weigh_tokens(list(batch.texts), batch.trained, encoded, self._aligner)
        return assemble(encoded, weights, batch.trained, bos_id=policy.bos_id, eos_id=policy.eos_id, dtype=dtype)

    def _encode_texts(self, texts: Sequence[str]) -> TokenBatch:
        self._relieve()
        longest = texts.longest if isinstance(texts, PackedTexts) else max(map(len, texts), default=0)
        if longest > LONG_TEXT:
            return TokenBatch.join([self._encode_long(text) for text in texts])
        size = self._job.batch_size
        if size is None or len(texts) <= size:
            return self._engine.encode(texts)
        return TokenBatch.join([self._engine.encode(texts[at : at + size]) for at in range(0, len(texts), size)])

    def _encode_long(self, text: str) -> TokenBatch:
        """Encode one text piece by piece, so that memory can be given back on the way."""
        pieces = self._engine.split(text, LONG_TEXT)
        if len(pieces) == 1 and len(text) * self._engine.memory_per_character > self._job.worker_bytes:
            # It does not fit this worker's share, so all others of its kind wait, and the cache goes first.
            self._engine.recycle()
            with self._journal.alone():
                return self._engine.encode(pieces)
        ids = []
        for piece in pieces:
            ids.append(self._engine.encode([piece]).ids)
            self._relieve()
        return TokenBatch(np.concatenate(ids), np.array([0, sum(map(len, ids))]))

    def _handle_specials(self, batch: TextBatch, encoded: TokenBatch, output: TaskOutput) -> TokenBatch:
        """Count the special tokens that texts brought along, or reject those texts."""
        assert self._special_ids is not None
        special = self._special_ids.take(encoded.ids)
        if not special.any():
            return encoded
        if self._job.settings.policy.special_tokens == "parse":
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
    """Put BOS and EOS around each document and narrow the ids, checking their range; also the lengths."""
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
        # Narrowed in one pass, then one memory copy a document: half the time of copies that narrow.
        source, target = ids.astype(dtype, copy=False).data, tokens.data
        edges = offsets.tolist()
        for to, start, stop in zip((firsts + before).tolist(), edges, edges[1:], strict=False):
            target[to : to + stop - start] = source[start:stop]
    if before:
        tokens[firsts] = policy.bos_id
    if after:
        tokens[ends - 1] = policy.eos_id
    return tokens, lengths


class TaskOutput:
    """The shards, rejects and counts of one task: appended to, finished, then published."""

    def __init__(self, job: Job, journal: Journal, task: Task, dtype: str, run: str) -> None:
        self._job = job
        self._journal = journal
        self._task = task
        self._dtype = dtype
        self._run = run
        self._writers: dict[str, ShardWriter] = {}
        self._rejects: Counter[str] = Counter()
        self._reject_file: Any = None
        self._num_documents = 0
        self._num_lines = 0
        self._num_bytes = 0
        self._record: TaskRecord | None = None
        self.num_parsed = 0

    def append(
        self,
        input: int,
        batch: TextBatch,
        tokens: IntArray,
        lengths: npt.NDArray[np.int32],
        weights: Weights | None = None,
    ) -> None:
        self._num_documents += len(batch.texts)
        self._num_lines += batch.num_lines
        self._num_bytes += batch.num_bytes
        inputs = np.full(len(lengths), input, np.int32)
        for split, which in self._assign(batch.texts):
            if which is None:
                self._writer(split).append(
                    tokens, lengths, inputs=inputs, positions=batch.positions, kept=batch.kept, weights=weights
                )
            elif which.any():
                kept = batch.kept and [row for row, mine in zip(batch.kept, which.tolist(), strict=True) if mine]
                chosen = np.repeat(which, lengths)
                self._writer(split).append(
                    tokens[chosen],
                    lengths[which],
                    inputs=inputs[which],
                    positions=batch.positions[which],
                    kept=kept,
                    weights=weights[chosen] if weights is not None else None,
                )

    def reject(self, input: int, reject: Reject) -> None:
        """Stop the run, or write the reject down, as the user asked."""
        file = self._job.inputs[input]
        if self._job.on_error == "fail":
            raise DataError(file.shown, reject.detail, describe_place(file, self._task, reject))
        self._rejects[reject.reason] += reject.num_documents
        if self._reject_file is None:
            path = Path(f"{self._journal.rejects_path(self._task.name)}.{self._run}.tmp")
            self._reject_file = path.open("wb")
        stored = StoredReject(
            input=input,
            position=reject.position,
            line=reject.line + self._task.first_line if reject.line >= 0 else -1,
            reason=reject.reason,
            detail=reject.detail,
            num_documents=reject.num_documents,
        )
        self._reject_file.write(msgspec.json.encode(stored) + b"\n")

    def reject_damage(self, damage: str) -> None:
        """A stream that broke off behind the last document of this task."""
        line = self._num_lines if self._job.settings.reading.separator is None else -1
        self.reject(self._task.input, Reject(self._task.spans[0].stop or 0, line, "damaged", damage))

    def finish(self, num_rerouted: int) -> None:
        """Make everything durable under temporary names; from here on it takes no memory."""
        shards = {split: writer.finish() for split, writer in self._writers.items()}
        if self._reject_file is not None:
            self._reject_file.flush()
            os.fsync(self._reject_file.fileno())
            self._reject_file.close()
        self._record = TaskRecord(
            name=self._task.name,
            input=self._task.input,
            number=self._task.number,
            inputs=[span.input for span in self._task.spans],
            stamps=[self._job.inputs[span.input].stamp for span in self._task.spans],
            shards=shards,
            num_documents_in=self._num_documents + sum(self._rejects.values()),
            num_bytes=self._num_bytes,
            rejects=dict(sorted(self._rejects.items())),
            num_lines=self._num_lines,
            counts_lines=self._task.spool is None and len(self._task.spans) == 1,
            num_rerouted=num_rerouted,
            num_parsed=self.num_parsed,
        )

    def publish(self) -> TaskRecord:
        """Give the files their names and enter the task in the journal."""
        assert self._record is not None
        for writer in self._writers.values():
            writer.publish()
        for split in self._writers:
            sync_directory(Path(self._job.store) / split)
        if self._reject_file is not None:
            Path(self._reject_file.name).replace(self._journal.rejects_path(self._task.name))
        self._journal.commit(self._record)
        return self._record

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()
        if self._reject_file is not None:
            self._reject_file.close()
            Path(self._reject_file.name).unlink(missing_ok=True)

    def _assign(self, texts: Sequence[str]) -> list[tuple[str, npt.NDArray[np.bool_] | None]]:
        """Which documents go to which split; None is all of them."""
        if not texts:
            return []
        settings = self._job.settings
        if settings.val_fraction == 0.0:
            return [("train", None)]
        bound = int(settings.val_fraction * 2**64)
        digest = xxhash.xxh3_64_intdigest
        validation = np.array([digest(text, settings.seed) < bound for text in encode_texts(texts)])
        return [("train", ~validation), ("val", validation)]

    def _writer(self, split: str) -> ShardWriter:
        if split not in self._writers:
            self._writers[split] = ShardWriter(
                Path(self._job.store),
                f"{split}/shard-{self._task.name}",
                dtype=self._dtype,
                keep_keys=self._job.settings.reading.keep_keys,
                run=self._run,
                beside=_files_beside(self._job.settings),
            )
        return self._writers[split]


def _files_beside(settings: Settings) -> list[str]:
    """What supervised stores have beside the tokens."""
    if settings.supervision is None:
        return []
    return [".mask", ".weight"] if settings.supervision.weight_key is not None else [".mask"]


def _special_table(job: Job) -> npt.NDArray[np.bool_]:
    table = np.zeros(job.vocab_size, bool)
    table[job.special_ids] = True
    return table
