"""The output of one task: shards, rejects and counts, made durable before they are renamed into place."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.errors import DataError
from tokenmill.files import sync_directory
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.journal import Journal, StoredReject, TaskEntry
from tokenmill.pipeline.parity import SampledText
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.plan.tasks import Task
from tokenmill.readers import READERS
from tokenmill.remote.paths import InputPath, input_path
from tokenmill.store.shard import ShardWriter, publish_shard
from tokenmill.supervision.masks import Weights
from tokenmill.text_batch import IntArray, Refusal, Reject, TextBatch, encode_texts

__all__ = ["TaskOutput", "publish_task"]


@dataclass(eq=False)
class TaskOutput:
    """The shards, rejects and counts of one task: appended to, finished, then published."""

    job: Job
    journal: Journal
    task: Task
    dtype: str
    mark: str
    """The suffix of the names of its temporary files."""
    num_parsed: int = 0

    def __post_init__(self) -> None:
        self._writers: dict[str, ShardWriter] = {}
        self._rejects: Counter[str] = Counter()
        self._reject_file: Any = None
        self._num_documents = self._num_lines = self._num_bytes = self._reject_bytes = 0

    def append(
        self,
        input: int,
        batch: TextBatch,
        tokens: IntArray,
        lengths: npt.NDArray[np.int32],
        weights: Weights | None = None,
        shared: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Write a batch of encoded documents to the shards of their splits."""
        self._num_documents += len(batch.texts) // batch.per_record
        self._num_lines += batch.num_lines
        self._num_bytes += batch.num_bytes
        inputs = np.full(len(lengths), input, np.int32)
        if not batch.texts:
            return
        if self.job.settings.val_fraction == 0.0:
            self._writer("train").append(
                tokens,
                lengths,
                inputs=inputs,
                positions=batch.positions,
                kept=batch.kept,
                weights=weights,
                shared=shared,
            )
            return
        # The split of a document depends on its text and on --seed; that of a pair, on its prompt, so that pairs with
        # one prompt are in one split.
        texts = [str(some.prompt) for some in batch.trained or ()] if batch.per_record == 2 else batch.texts
        settings, digest = self.job.settings, xxhash.xxh3_64_intdigest
        bound = int(settings.val_fraction * 2**64)
        validation = np.array([digest(text, settings.seed) < bound for text in encode_texts(texts)])
        for split, which in (("train", ~validation), ("val", validation)):
            if which.any():
                chosen = np.repeat(which, lengths)
                self._writer(split).append(
                    tokens[chosen],
                    lengths[which],
                    inputs=inputs[which],
                    positions=batch.positions[which],
                    kept=batch.kept and list(compress(batch.kept, which)),
                    weights=weights[chosen] if weights is not None else None,
                    shared=shared[which] if shared is not None else None,
                )

    def reject(self, input: int, reject: Reject) -> None:
        """Record a reject; with --on-error fail, raise it as an error."""
        file = self.job.inputs[input]
        if self.job.on_error == "fail":
            raise DataError(file.shown, reject.detail, _describe_place(file, self.task, reject))
        self._rejects[reject.reason] += reject.num_documents
        if self._reject_file is None:
            path = Path(f"{self.journal.rejects_path(self.task.name)}.{self.mark}.tmp")
            self._reject_file = path.open("wb")
        line = reject.line + self.task.first_line if reject.line >= 0 else -1
        stored = StoredReject(input=input, **(msgspec.structs.asdict(reject) | {"line": line}))
        self._reject_bytes += self._reject_file.write(msgspec.json.encode(stored) + b"\n")

    def reject_damage(self, damage: Refusal) -> None:
        """Record that the stream is damaged after the last document of this task."""
        line = self._num_lines if self.job.settings.reading.separator is None else -1
        self.reject(self.task.input, Reject(self.task.spans[0].stop or 0, line, *damage))

    def finish(self, num_rerouted: int, sample: list[SampledText]) -> None:
        """Make all files durable under temporary names, release the buffers, and make the journal entry, `record`."""
        shards = {split: writer.finish() for split, writer in self._writers.items()}
        if self._reject_file is not None:
            self._reject_file.flush()
            os.fsync(self._reject_file.fileno())
            self._reject_file.close()
        self.record = TaskEntry(
            name=self.task.name,
            input=self.task.input,
            number=self.task.number,
            inputs=[span.input for span in self.task.spans],
            stamps=[self.job.inputs[span.input].stamp for span in self.task.spans],
            shards=shards,
            num_documents_in=self._num_documents + sum(self._rejects.values()),
            num_bytes=self._num_bytes,
            rejects=dict(sorted(self._rejects.items())),
            reject_bytes=self._reject_bytes,
            num_lines=self._num_lines,
            counts_lines=self.task.spool is None and len(self.task.spans) == 1,
            num_rerouted=num_rerouted,
            num_parsed=self.num_parsed,
            num_compared=len(sample),
            compared_bytes=sum(len(one.text.encode()) for one in sample),
            sample=sample,
        )

    def discard(self) -> None:
        """Remove the temporary files of a task that failed."""
        for writer in self._writers.values():
            writer.discard()
        if self._reject_file is not None:
            self._reject_file.close()
            Path(self._reject_file.name).unlink(missing_ok=True)

    def _writer(self, split: str) -> ShardWriter:
        if split not in self._writers:
            settings, beside = self.job.settings, []
            holds = settings.supervision.holds if settings.supervision is not None else None
            if settings.supervision is not None:
                beside = [".mask"] if settings.supervision.weight_key is None else [".mask", ".weight"]
            self._writers[split] = ShardWriter(
                Path(self.job.store),
                f"{split}/shard-{self.task.name}",
                dtype=self.dtype,
                keep_keys=settings.reading.keep_keys,
                run=self.mark,
                beside=beside,
                has_pairs=holds == "pairs",
            )
        return self._writers[split]


def publish_task(journal: Journal, record: TaskEntry, mark: str) -> None:
    """Rename the files of a finished task into place and write its journal entry.

    `mark` is the suffix of their temporary names. A process may publish files that another process made.
    """
    if record.rejects:
        path = str(journal.rejects_path(record.name))
        os.replace(f"{path}.{mark}.tmp", path)  # noqa: PTH105
        # The entry is in the same directory; without this, it might survive a power failure alone.
        sync_directory(journal.folder)
    for split, shard in record.shards.items():
        publish_shard(journal.store, shard, mark)
        sync_directory(journal.store / split)
    journal.commit(record)


def _describe_place(file: InputFile, task: Task, reject: Reject) -> str | None:
    """Describe the position of a reject in its input, counted from 1; in bytes if documents are not lines."""
    unit = READERS[file.format].unit
    if unit == "row":
        return f"row {reject.position + 1}" if reject.line >= 0 else None
    if reject.line < 0:
        return f"byte {reject.position}"
    span = task.spans[0]
    number = task.first_line + reject.line
    if task.spool is None and len(task.spans) == 1 and span.start > 0:
        number = _count_line_ends(input_path(file.path), reject.position)
    return f"{unit} {number + 1}"


def _count_line_ends(path: InputPath, stop: int) -> int:
    count = 0
    with path.open("rb", buffering=0) as file:
        while stop > 0 and (data := file.read(min(stop, 1 << 22))):
            count += data.count(b"\n")
            stop -= len(data)
    return count
