"""Find documents of a store again in its inputs, by the input and position that the store keeps for each.

For a sample this seeks, if the format allows it. For all documents it reads front to back, which also finds documents
that the store does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.pipeline.input_file import InputFile, Render, Span, read_span
from tokenmill.pipeline.plan.tasks import row_spans
from tokenmill.readers import reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.text_batch import TextBatch, Trained

__all__ = ["SourceDocument", "SourceReader", "StoredTask", "TaskShard", "choose_documents", "tasks_of"]

SAMPLE_DOCUMENTS = 1000
MOST_EDGE_SHARDS = 250
"""Up to this many shards, the sample has the first and the last document of each, because cuts are error-prone."""
SEEK_BYTES = 1 << 20
"""Reading a document from the middle costs about as much as reading this much front to back."""

SourceDocument = tuple[str, Trained | None]
"""A text and, in supervised data, the parts of it that are trained on."""


@dataclass(frozen=True)
class TaskShard:
    """One shard of a task, and the number of its first document in the split."""

    split: str
    shard: ShardInfo
    first: int


@dataclass(frozen=True)
class StoredTask:
    """The documents of one task to be compared, in input order; arrays, because there may be millions."""

    shards: list[TaskShard]
    shard: npt.NDArray[np.int64]
    inner: npt.NDArray[np.int64]
    """The document's number in its shard."""
    input: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def name(self, row: int) -> str:
        """Name a document as the user does."""
        shard = self.shards[self.shard[row]]
        return f"document {shard.first + int(self.inner[row])} of {shard.split}"


def tasks_of(store: Path, manifest: Manifest, chosen: dict[str, npt.NDArray[np.int64]]) -> Iterator[StoredTask]:
    """Yield the documents to compare, task by task in input order; a task has a shard in each split."""
    tasks: dict[str, list[TaskShard]] = {}
    for split, info in manifest.splits.items():
        firsts = accumulate((shard.num_documents for shard in info.shards), initial=0)
        for shard, first in zip(info.shards, firsts, strict=False):
            tasks.setdefault(shard.name.partition("/")[2], []).append(TaskShard(split, shard, first))
    for name in sorted(tasks, key=lambda name: [int(number) for number in name.split("-")[1:]]):
        shards = tasks[name]
        inner = [chosen[one.shard.name] for one in shards]
        sources = [_locate(store, one.shard, wanted) for one, wanted in zip(shards, inner, strict=True)]
        inputs, positions = (np.concatenate([source[i] for source in sources]) for i in (0, 1))
        places = np.repeat(np.arange(len(shards)), [len(wanted) for wanted in inner])
        order = np.lexsort((positions, inputs))
        yield StoredTask(shards, places[order], np.concatenate(inner)[order], inputs[order], positions[order])


def choose_documents(manifest: Manifest, every: bool) -> dict[str, npt.NDArray[np.int64]]:
    """Choose the documents of each shard to compare, by their numbers in it."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    if every or manifest.num_documents <= SAMPLE_DOCUMENTS:
        return {shard.name: np.arange(shard.num_documents) for shard in shards}
    spread = np.linspace(0, manifest.num_documents - 1, SAMPLE_DOCUMENTS).astype(np.int64)
    chosen = {}
    first = 0
    for shard in shards:
        stop = first + shard.num_documents
        mine = spread[(spread >= first) & (spread < stop)] - first
        if len(shards) <= MOST_EDGE_SHARDS:
            mine = np.unique(np.concatenate([mine, [0, shard.num_documents - 1]]))
        if manifest.has_pairs:
            mine = np.unique(np.concatenate([mine // 2 * 2, mine // 2 * 2 + 1]))
        chosen[shard.name] = mine
        first = stop
    return chosen


def _locate(
    store: Path, shard: ShardInfo, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Read the inputs and positions of documents of a shard, row group by row group."""
    import pyarrow.parquet as pq

    found = [np.empty((2, 0), np.int64)]
    row = 0
    with pq.ParquetFile(store / f"{shard.name}.docs.parquet") as file:
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            mine = wanted[(wanted >= row) & (wanted < row + count)] - row
            if len(mine):
                table = file.read_row_group(group, columns=["input", "position"])
                found.append(np.stack([column.to_numpy()[mine].astype(np.int64) for column in table.columns]))
            row += count
    inputs, positions = np.concatenate(found, axis=1)
    return inputs, positions


class SourceReader:
    """Finds texts again by input and position; reads an input that cannot be seeked only once."""

    def __init__(
        self,
        files: dict[int, InputFile],
        options: ReadOptions,
        render: Render | None,
        *,
        task_bytes: int,
        sequential: bool,
    ) -> None:
        self._files = files
        self._options = options
        self._render = render
        self._task_bytes = task_bytes
        self._sequential = sequential
        self._unread = set(files)
        self._input = -1
        self._batches: Iterator[TextBatch] = iter(())
        self._batch: TextBatch | None = None
        self._num_read = 0
        self._num_found = 0

    def find(self, task: StoredTask) -> Iterator[tuple[int, SourceDocument | None]]:
        """Yield the rows of the task with their documents, None if the input has no document there."""
        for number in np.unique(task.input).tolist():
            if number in self._files:
                start, stop = np.searchsorted(task.input, [number, number + 1]).tolist()
                for row, document in self._find_in_input(number, task.position[start:stop]):
                    yield start + row, document

    def count_unclaimed(self) -> int:
        """Read the rest of all inputs, and count the documents that `find` was not asked for."""
        self._read_to_end()
        for number in sorted(self._unread):
            self._start(number)
            self._read_to_end()
        return self._num_read - self._num_found

    def _find_in_input(
        self, number: int, positions: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, SourceDocument | None]]:
        spans = None if self._sequential else _spans(self._files[number], positions, self._options)
        if spans is None:
            if self._input != number:
                self._read_to_end()
                self._start(number)
            yield from self._pick(positions, self._from_here())
            return
        done = 0
        for start, stop in spans:
            count = int(np.searchsorted(positions, stop)) - done
            batches = read_span(self._files[number], Span(number, start, stop), self._options, self._render)
            for row, document in self._pick(positions[done : done + count], batches):
                yield done + row, document
            done += count

    def _pick(
        self, positions: npt.NDArray[np.int64], batches: Iterator[TextBatch]
    ) -> Iterator[tuple[int, SourceDocument | None]]:
        row = 0
        for batch in batches:
            stop = int(np.searchsorted(positions, batch.positions[-1], "right")) if len(batch.positions) else row
            places = np.searchsorted(batch.positions, positions[row:stop])
            if batch.per_record == 2:
                # Both texts of a pair are at one position, and both are looked for.
                places += np.arange(len(places)) % 2
            found = batch.positions[places] == positions[row:stop]
            self._num_found += int(found.sum())
            for place, is_there in zip(places.tolist(), found.tolist(), strict=True):
                trained = batch.trained[place] if batch.trained is not None and is_there else None
                yield row, (batch.texts[place], trained) if is_there else None
                row += 1
            if row == len(positions):
                return
        for lost in range(row, len(positions)):
            yield lost, None

    def _start(self, number: int) -> None:
        self._unread.discard(number)
        self._input = number
        file = self._files[number]
        spans = [Span(number)]
        if reader_for(file.format, self._options).counts_rows:
            spans = row_spans(number, file, self._options, self._task_bytes)
        self._batches = chain.from_iterable(read_span(file, span, self._options, self._render) for span in spans)
        self._next()

    def _next(self) -> None:
        self._batch = next(self._batches, None)
        self._num_read += len(self._batch.texts) if self._batch is not None else 0

    def _from_here(self) -> Iterator[TextBatch]:
        """Yield batches front to back; the next call begins with the batch in which the caller stopped."""
        while self._batch is not None:
            yield self._batch
            self._next()

    def _read_to_end(self) -> None:
        """Count the documents that are left; a sample does not need them."""
        while self._sequential and self._batch is not None:
            self._next()


def _spans(file: InputFile, positions: npt.NDArray[np.int64], options: ReadOptions) -> list[tuple[int, int]] | None:
    """Spans in which documents at sorted positions start; None if the input can only be read front to back."""
    reader = reader_for(file.format, options)
    if reader.counts_rows:
        groups = np.array([stop for _, stop in reader.plan(input_path(file.path), 1)], np.int64)
        group = np.searchsorted(groups, positions, "right")
        last = np.flatnonzero(np.diff(group, append=-1))
        first = np.concatenate([[0], last[:-1] + 1])
        return [*zip(positions[first].tolist(), (positions[last] + 1).tolist(), strict=True)]
    if file.compression != "none" or not reader.splittable:
        return None
    if int(positions[-1] - positions[0]) < len(positions) * SEEK_BYTES:
        return [(int(positions[0]), int(positions[-1]) + 1)]
    return [(position, position + 1) for position in positions.tolist()]
