"""Finding documents of a store in its inputs again.

A sample seeks where the format allows it; all documents are read front to back, which also shows a document
that the store does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.batch import TextBatch, Trained
from tokenmill.pipeline.plan import InputFile, Span, row_spans
from tokenmill.pipeline.reading import Render, read_span
from tokenmill.readers import reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import input_path
from tokenmill.store.manifest import Manifest, ShardInfo

__all__ = ["Document", "Part", "Source", "Task", "choose_documents", "tasks_of"]

SAMPLE_DOCUMENTS = 1000
MOST_EDGE_SHARDS = 250
"""Up to so many shards, the first and last document of each is in the sample: cuts are where bugs live."""
SEEK_BYTES = 1 << 20
"""Reading a document from the middle costs about as much as reading this much front to back."""

Document = tuple[str, Trained | None]
"""A text, and of supervised data what of it is trained on."""


@dataclass(frozen=True)
class Part:
    """One shard, and the number of its first document in the split."""

    split: str
    shard: ShardInfo
    first: int


@dataclass(frozen=True)
class Task:
    """The documents of one task to be compared, in input order; arrays, because there may be millions."""

    parts: list[Part]
    part: npt.NDArray[np.int64]
    inner: npt.NDArray[np.int64]
    """The document's number in its shard."""
    input: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def name(self, row: int) -> str:
        """What a user may call a document."""
        part = self.parts[self.part[row]]
        return f"document {part.first + int(self.inner[row])} of {part.split}"


def tasks_of(store: Path, manifest: Manifest, chosen: dict[str, npt.NDArray[np.int64]]) -> Iterator[Task]:
    """The documents to compare, task after task in input order; a task has a shard in each split."""
    parts: dict[str, list[Part]] = {}
    for split, info in manifest.splits.items():
        firsts = accumulate((shard.num_documents for shard in info.shards), initial=0)
        for shard, first in zip(info.shards, firsts, strict=False):
            parts.setdefault(shard.name.partition("/")[2], []).append(Part(split, shard, first))
    for name in sorted(parts, key=lambda name: [int(number) for number in name.split("-")[1:]]):
        several = parts[name]
        inner = [chosen[part.shard.name] for part in several]
        sources = [_locate(store, part.shard, wanted) for part, wanted in zip(several, inner, strict=True)]
        inputs, positions = (np.concatenate([source[i] for source in sources]) for i in (0, 1))
        part = np.repeat(np.arange(len(several)), [len(wanted) for wanted in inner])
        order = np.lexsort((positions, inputs))
        yield Task(several, part[order], np.concatenate(inner)[order], inputs[order], positions[order])


def choose_documents(manifest: Manifest, every: bool) -> dict[str, npt.NDArray[np.int64]]:
    """Which documents of each shard to compare, by their numbers in it."""
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
        chosen[shard.name] = mine
        first = stop
    return chosen


def _locate(
    store: Path, shard: ShardInfo, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and positions of documents of a shard, read row group by row group."""
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


class Source:
    """Finds texts again by input and position. What can only be read front to back is read once."""

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

    def find(self, task: Task) -> Iterator[tuple[int, Document | None]]:
        """Rows of the task with their documents, None where the input has no such one."""
        for number in np.unique(task.input).tolist():
            if number in self._files:
                start, stop = np.searchsorted(task.input, [number, number + 1]).tolist()
                for row, document in self._find_in_input(number, task.position[start:stop]):
                    yield start + row, document

    def count_unwanted(self) -> int:
        """Documents of the inputs that nobody asked for; reads what is left of all inputs."""
        self._read_to_end()
        for number in sorted(self._unread):
            self._start(number)
            self._read_to_end()
        return self._num_read - self._num_found

    def _find_in_input(self, number: int, positions: npt.NDArray[np.int64]) -> Iterator[tuple[int, Document | None]]:
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
    ) -> Iterator[tuple[int, Document | None]]:
        row = 0
        for batch in batches:
            stop = int(np.searchsorted(positions, batch.positions[-1], "right")) if len(batch.positions) else row
            places = np.searchsorted(batch.positions, positions[row:stop])
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
        if file.format == "parquet":
            spans = row_spans(number, file, self._options, self._task_bytes)
        self._batches = chain.from_iterable(read_span(file, span, self._options, self._render) for span in spans)
        self._next()

    def _next(self) -> None:
        self._batch = next(self._batches, None)
        self._num_read += len(self._batch.texts) if self._batch is not None else 0

    def _from_here(self) -> Iterator[TextBatch]:
        """Batches front to back; the one in which the caller stops comes first in the next call."""
        while self._batch is not None:
            yield self._batch
            self._next()

    def _read_to_end(self) -> None:
        """A sample has no use for what is behind it; when all documents count, this counts them."""
        while self._sequential and self._batch is not None:
            self._next()


def _spans(file: InputFile, positions: npt.NDArray[np.int64], options: ReadOptions) -> list[tuple[int, int]] | None:
    """Spans in which documents at sorted positions start; None: the input can only be read front to back."""
    reader = reader_for(file.format, options)
    if isinstance(reader, ParquetReader):
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
