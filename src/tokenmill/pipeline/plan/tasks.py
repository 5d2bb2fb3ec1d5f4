"""Cut the inputs of a run into tasks, before any worker is chosen.

A task is a span of input. Cuts depend on sizes alone, so shard names and contents never depend
on workers or timing. There are three kinds of input:

- plain JSON lines and text, and Parquet, are cut into ranges of bytes or of row groups;
- small inputs of any kind share a task with their neighbours;
- large inputs that can only be read front to back (compressed ones, JSON arrays) become a
  `Stream`, which is cut into tasks every `task_bytes` while it is being decompressed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokenmill.errors import DataError
from tokenmill.pipeline.input_file import Damage, InputFile, Span, read_span
from tokenmill.pipeline.settings import Settings
from tokenmill.readers import is_one_document, reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.text_batch import Refusal

__all__ = ["Plan", "Stream", "Task", "make_plan", "row_spans"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of work; `input` and `number` name its shards."""

    input: int
    number: int
    spans: list[Span]
    bytes: int
    """The size on disk of its spans, for progress and for the order of work."""
    spool: str | None = None
    """A file with the decompressed text of its only span, if the task was cut from a stream."""
    first_line: int = 0
    damage: Refusal | None = None
    """Why the stream ends after its text."""

    @property
    def name(self) -> str:
        """The name of its shards and of its journal entry."""
        return f"{self.input:05d}-{self.number:04d}"


class Stream(msgspec.Struct, frozen=True):
    """A large input that is cut into tasks as it is read front to back."""

    input: int
    stop: int | None = None
    damage: Damage | None = None
    """The damage, if the stream is read for the second time, up to the damaged frame."""

    @property
    def span(self) -> Span:
        """All of it."""
        return Span(self.input, 0, self.stop, self.damage)

    @property
    def name(self) -> str:
        """The prefix of the names of its tasks."""
        return f"{self.input:05d}"

    def task_name(self, number: int) -> str:
        """Return the name of one of its tasks."""
        return f"{self.name}-{number:04d}"


class Plan(msgspec.Struct, frozen=True):
    """The work of a run."""

    inputs: list[InputFile]
    tasks: list[Task]
    streams: list[Stream]
    order: dict[str, int] = {}
    """The position of tasks and streams, by name, if a consumer needs them in order; else the largest come first."""

    def place(self, work: Task | Stream) -> tuple[int, ...]:
        """Return the sort key of a task or a stream, also of a task cut from a stream; the smallest runs first."""
        number = work.number if isinstance(work, Task) else 0
        named = self.order.get(work.name, self.order.get(f"{work.input:05d}"))
        if named is not None:
            return named, number
        size = work.bytes if isinstance(work, Task) else self.inputs[work.input].bytes
        return -size, work.input, number

    def weigh(self, work: Task | Stream) -> int:
        """Estimate the bytes of text of a task or a stream, which decide how long it takes."""
        if isinstance(work, Stream):
            return self.inputs[work.input].text_bytes
        files = [self.inputs[span.input] for span in work.spans]
        return work.bytes * sum(file.text_bytes for file in files) // max(1, sum(file.bytes for file in files))

    def size_on_disk(self, tasks: Iterable[Task], streams: Iterable[Stream]) -> int:
        """Sum the bytes on disk that tasks and streams read."""
        return sum(task.bytes for task in tasks) + sum(self.inputs[stream.input].bytes for stream in streams)


def make_plan(inputs: list[InputFile], settings: Settings) -> Plan:
    """Cut the inputs into tasks; the result depends only on their sizes and the settings."""
    plan = Plan(inputs, [], [])
    builder = _PlanBuilder(plan, settings.reading, settings.task_bytes)
    remaining = settings.limit
    for number, file in enumerate(inputs):
        stop = None
        if remaining is not None:
            if remaining <= 0:
                break
            count, stop = _count_documents(file, settings.reading, remaining)
            remaining -= count
        builder.add(number, file, stop)
    builder.close()
    return plan


def row_spans(number: int, file: InputFile, options: ReadOptions, task_bytes: int) -> list[Span]:
    """Cut a Parquet input into the spans of tasks, between row groups."""
    if file.text_bytes <= task_bytes or is_one_document(file.format, options):
        return [Span(number)]
    try:
        ranges = reader_for(file.format, options).plan(input_path(file.path), task_bytes)
    except DataError:
        # The task that reads the file reports the damage, and knows whether it ends the run.
        return [Span(number)]
    return [Span(number, start, stop) for start, stop in ranges]


@dataclass
class _PlanBuilder:
    """Adds inputs to a plan one after another, joining small neighbours into one task."""

    plan: Plan
    options: ReadOptions
    task_bytes: int
    group: list[Span] = field(default_factory=list)
    """Small inputs that will share a task."""
    group_text: int = 0
    group_bytes: int = 0

    def add(self, number: int, file: InputFile, stop: int | None) -> None:
        """Cut an input, up to `stop`, and add its tasks or its stream."""
        reader = reader_for(file.format, self.options)
        if file.text_bytes <= self.task_bytes or is_one_document(file.format, self.options):
            self._add_to_group(number, file, stop)
            return
        self.close()
        if reader.counts_rows:
            spans = row_spans(number, file, self.options, self.task_bytes)
            if spans == [Span(number)]:
                self._add_to_group(number, file, stop)
                return
            ranges = [(span.start, span.stop or 0) for span in spans]
            self._add_ranges(
                number, file, [(a, b if stop is None else min(b, stop)) for a, b in ranges if stop is None or a < stop]
            )
        elif file.compression == "none" and reader.splittable:
            size = file.bytes if stop is None else min(stop, file.bytes)
            starts = range(0, size, self.task_bytes)
            self._add_ranges(number, file, [(start, min(start + self.task_bytes, size)) for start in starts])
        else:
            self.plan.streams.append(Stream(number, stop))

    def close(self) -> None:
        """Add the task of the small inputs collected so far."""
        if self.group:
            first = self.group[0].input
            self.plan.tasks.append(Task(input=first, number=0, spans=self.group, bytes=self.group_bytes))
        self.group, self.group_text, self.group_bytes = [], 0, 0

    def _add_to_group(self, number: int, file: InputFile, stop: int | None) -> None:
        if self.group_text + file.text_bytes > self.task_bytes:
            self.close()
        self.group.append(Span(number, 0, stop))
        self.group_text += file.text_bytes
        self.group_bytes += file.bytes

    def _add_ranges(self, number: int, file: InputFile, ranges: list[tuple[int, int]]) -> None:
        whole = max(1, ranges[-1][1]) if ranges else 1
        for index, (start, stop) in enumerate(ranges):
            size = file.bytes * stop // whole - file.bytes * start // whole
            self.plan.tasks.append(Task(input=number, number=index, spans=[Span(number, start, stop)], bytes=size))


def _count_documents(file: InputFile, options: ReadOptions, most: int) -> tuple[int, int | None]:
    """Count the documents of an input up to `most`, and find where the next one starts."""
    reader = reader_for(file.format, options)
    num_rows = reader.count_documents(input_path(file.path))
    if num_rows is not None:
        # Every row is a document or a reject, also where damage hides many of them.
        return (num_rows, None) if num_rows <= most else (most, most)
    count = 0
    for batch in read_span(file, Span(0), options):
        starts = np.concatenate([batch.positions, [reject.position for reject in batch.rejects]]).astype(np.int64)
        if count + len(starts) > most:
            return most, int(np.sort(starts)[most - count])
        count += len(starts)
    return count, None
