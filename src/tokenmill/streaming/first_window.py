"""Encode the first documents immediately, so that a trainer need not wait for the first shard.

A shard may take minutes if the text is large and the tokenizer slow. This process encodes the first megabyte of it
with the reference engine, which needs no parity gate. The first shard begins with the same documents, and once it is
published they are read from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.engines import REFERENCES, create
from tokenmill.pipeline.input_file import InputFile, Span, read_span
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task
from tokenmill.pipeline.task.output import publish_task
from tokenmill.pipeline.task.runner import TaskRunner
from tokenmill.pipeline.workers.attempt import make_job
from tokenmill.readers import is_one_document, reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import ShardInfo
from tokenmill.store.store import open_shards

__all__ = ["FirstWindow", "find_first_window"]

HEAD_BYTES = 1 << 20
HEAD_ROWS = 1024
WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class FirstWindow:
    """A span at the start of the first task, and the name of the task."""

    name: str
    span: Span

    def count(self, store: Path, shard: ShardInfo) -> int:
        """Count the documents of a shard that are in the span; only the first shard has any."""
        import pyarrow.parquet as pq

        if not shard.name.endswith(self.name):
            return 0
        table = pq.read_table(store / f"{shard.name}.docs.parquet", columns=["input", "position"])
        inputs, positions = (table[name].to_numpy() for name in ("input", "position"))
        stop = self.span.stop
        return int(((inputs == self.span.input) & (positions < stop if stop is not None else True)).sum())

    def encode(self, prepared: Prepared, folder: Path, split: str) -> Documents | None:
        """Tokenize the span into a folder; return None if the split has no document of it."""
        tokenizer = prepared.tokenizer
        engine = REFERENCES[tokenizer.kind]
        journal = Journal(folder)
        job = make_job(prepared, journal, engine, WORKER_BYTES)
        tokenizer.save(folder / "tokenizer")
        (folder / ".tasks").mkdir()
        runner = TaskRunner(job, journal, create(engine, tokenizer, job.settings.policy.special_tokens))
        input, number = map(int, self.name.split("-"))
        span = _end_with_document(prepared.files[self.span.input], self.span, job.settings.reading)
        task = Task(input=input, number=number, spans=[span], bytes=HEAD_BYTES)
        output = runner.run(task, "beginning")
        publish_task(journal, output.record, output.mark)
        shard = output.record.shards.get(split)
        return None if shard is None else open_shards(folder, [shard], tokenizer.vocab_size, "beginning")


def find_first_window(plan: Plan, options: ReadOptions) -> FirstWindow | None:
    """Find the first megabyte of the plan's first task; None if there is no task, or if it cannot be cut."""
    everything: list[Task | Stream] = [*plan.tasks, *plan.streams]
    work = min(everything, key=plan.place, default=None)
    if work is None:
        return None
    span = work.spans[0] if isinstance(work, Task) else Span(work.input, 0, work.stop)
    file = plan.inputs[span.input]
    if is_one_document(file.format, options):
        return None
    stop = span.start + _size(file, options)
    if file.format != "parquet" and file.compression == "none":
        stop = min(stop, file.bytes)
    name = work.name if isinstance(work, Task) else f"{work.name}-0000"
    return FirstWindow(name, Span(span.input, span.start, stop if span.stop is None else min(stop, span.stop)))


def _size(file: InputFile, options: ReadOptions) -> int:
    """Return the length of about a megabyte of text, in the units of the input's spans: bytes or rows."""
    num_rows = reader_for(file.format, options).count_documents(input_path(file.path))
    if num_rows is None:
        return HEAD_BYTES
    return max(1, min(HEAD_ROWS, HEAD_BYTES * num_rows // max(1, file.bytes)))


def _end_with_document(file: InputFile, span: Span, options: ReadOptions) -> Span:
    """Move the end of a span to the end of a document, for inputs that are read only from front to back."""
    reader = reader_for(file.format, options)
    if (file.compression == "none" and reader.splittable) or span.stop is None:
        return span
    for batch in read_span(file, Span(span.input), options):
        starts = np.sort([*batch.positions.tolist(), *(reject.position for reject in batch.rejects)])
        if len(starts) and starts[-1] >= span.stop:
            return Span(span.input, 0, int(starts[np.searchsorted(starts, span.stop)]))
    return Span(span.input)
