"""The first documents of a run at once, for whoever cannot wait for its first shard.

A shard may take minutes when the text is large and the tokenizer slow. The first megabyte of it is encoded
here, in this process, by the reference: it needs no parity gate. The documents are those that the first
shard begins with, and once that is published they are read from there.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.engines import REFERENCES, create
from tokenmill.pipeline.plan import InputFile, Plan, Span, Stream, Task
from tokenmill.pipeline.preparing import Prepared, make_job
from tokenmill.pipeline.reading import read_span
from tokenmill.pipeline.task import TaskRunner
from tokenmill.readers import reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import input_path
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import ShardInfo
from tokenmill.store.shard import dtype_for
from tokenmill.store.store import open_shards

__all__ = ["Beginning", "find_beginning"]

HEAD_BYTES = 1 << 20
HEAD_ROWS = 1024
WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class Beginning:
    """A span at the start of the first task, and the name of the task."""

    name: str
    span: Span

    def count(self, store: Path, shard: ShardInfo) -> int:
        """How many documents of a shard are in the span: the first ones of the first shard, and none of others."""
        import pyarrow.parquet as pq

        if not shard.name.endswith(self.name):
            return 0
        table = pq.read_table(store / f"{shard.name}.docs.parquet", columns=["input", "position"])
        inputs, positions = (table[name].to_numpy() for name in ("input", "position"))
        stop = self.span.stop
        return int(((inputs == self.span.input) & (positions < stop if stop is not None else True)).sum())

    def encode(self, prepared: Prepared, folder: Path, split: str) -> Documents | None:
        """Tokenize the span into a folder of its own; None if no document of it is in the split."""
        tokenizer = prepared.tokenizer
        engine = REFERENCES[tokenizer.kind]
        job = msgspec.structs.replace(make_job(prepared, engine, WORKER_BYTES), store=str(folder))
        tokenizer.save(folder / "tokenizer")
        (folder / ".tasks").mkdir()
        runner = TaskRunner(job, create(engine, tokenizer, job.settings.policy.special_tokens), lambda _: None)
        input, number = map(int, self.name.split("-"))
        span = _end_with_document(prepared.files[self.span.input], self.span, job.settings.reading)
        task = Task(input=input, number=number, spans=[span], bytes=HEAD_BYTES)
        shard = runner.run(task, "beginning").publish().shards.get(split)
        if shard is None:
            return None
        documents = open_shards(folder, [shard], dtype_for(tokenizer.vocab_size), "beginning")
        documents.vocab_size = tokenizer.vocab_size
        return documents


def find_beginning(plan: Plan, options: ReadOptions) -> Beginning | None:
    """The first megabyte of what the plan does first; None where there is nothing, or no start can be cut off."""
    everything: list[Task | Stream] = [*plan.tasks, *plan.streams]
    work = min(everything, key=plan.place, default=None)
    if work is None or options.whole_files:
        return None
    span = work.spans[0] if isinstance(work, Task) else Span(work.input, 0, work.stop)
    file = plan.inputs[span.input]
    stop = span.start + _size(file, options)
    if file.format != "parquet" and file.compression == "none":
        stop = min(stop, file.bytes)
    name = work.name if isinstance(work, Task) else f"{work.name}-0000"
    return Beginning(name, Span(span.input, span.start, stop if span.stop is None else min(stop, span.stop)))


def _size(file: InputFile, options: ReadOptions) -> int:
    """About a megabyte of text, in what spans of the input are counted in: bytes, or rows."""
    if file.format != "parquet":
        return HEAD_BYTES
    num_rows = ParquetReader(options).count_documents(input_path(file.path))
    return max(1, min(HEAD_ROWS, HEAD_BYTES * num_rows // max(1, file.bytes)))


def _end_with_document(file: InputFile, span: Span, options: ReadOptions) -> Span:
    """The same documents, where a span must end with one: what is read front to back is cut off at its end."""
    reader = reader_for(file.format, options)
    if isinstance(reader, ParquetReader) or (file.compression == "none" and reader.splittable) or span.stop is None:
        return span
    for batch in read_span(file, Span(span.input), options):
        starts = np.sort([*batch.positions.tolist(), *(reject.position for reject in batch.rejects)])
        if len(starts) and starts[-1] >= span.stop:
            return Span(span.input, 0, int(starts[np.searchsorted(starts, span.stop)]))
    return Span(span.input)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Where a beginning is kept while this process needs it."""
    return tempfile.TemporaryDirectory(prefix="tokenmill-", ignore_cleanup_errors=True)
