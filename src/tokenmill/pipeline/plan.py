"""Planning a run: which inputs, cut into which tasks, before any worker is chosen.

A task is a span of input cut by size alone, so shard names and contents never depend on
workers or timing. Three kinds of input give three kinds of task:

- plain JSON lines and text, and Parquet: ranges of bytes, or of row groups;
- small inputs of any kind: several whole ones share a task;
- large inputs that can only be read front to back (compressed ones, JSON arrays): a
  `Stream`, which is cut into tasks while it is being decompressed, every `task_bytes`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.errors import DataError
from tokenmill.files import (
    WHOLE_FINGERPRINT_BYTES,
    changed_while_read,
    detect_compression,
    fingerprint,
)
from tokenmill.inputs import Input, name_inputs
from tokenmill.pipeline.settings import Settings
from tokenmill.readers import detect_format, format_by_name, reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import input_path, is_remote

__all__ = [
    "InputFile",
    "Plan",
    "Span",
    "Stream",
    "Task",
    "check_unchanged",
    "default_task_bytes",
    "explain_formats",
    "inspect_inputs",
    "make_plan",
    "row_spans",
]

COMPRESSION_RATIO = 4
"""Text is taken to be this many times larger than its compressed file, when tasks are sized."""
HEAD_BYTES = 1 << 16
TASKS_PER_RUN = 128
SMALLEST_TASK, LARGEST_TASK = 4 << 20, 256 << 20


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One input as it was found when the run was planned."""

    path: str
    name: str
    bytes: int
    fingerprint: str
    mtime_ns: int
    format: str
    compression: str
    origin: str | None = None
    """What it was fetched from, down to the revision."""

    @property
    def text_bytes(self) -> int:
        """About how much text it holds: exact for plain files, an estimate for compressed ones."""
        return self.bytes if self.compression == "none" else self.bytes * COMPRESSION_RATIO

    @property
    def is_sampled(self) -> bool:
        """Whether the fingerprint is of a part of the content only."""
        return self.bytes > WHOLE_FINGERPRINT_BYTES and not is_remote(self.path)

    @property
    def stamp(self) -> int:
        """Another number when somebody has touched it: the time of modification; of what was fetched, the revision.

        Copies that several machines have fetched differ in the time.
        """
        return self.mtime_ns if self.origin is None else zlib.crc32(self.origin.encode())

    @property
    def shown(self) -> str:
        """Its path as a user finds it, from the working directory where it is below; of what was fetched, its name."""
        return self.path.removeprefix(f"{Path.cwd()}/") if self.origin is None else self.name


class Span(msgspec.Struct, frozen=True):
    """A part of one input: bytes of decompressed text, or rows. `stop` None is the input's end."""

    input: int
    start: int = 0
    stop: int | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of tokenizing. `input` and `number` name its shards."""

    input: int
    number: int
    spans: list[Span]
    bytes: int
    """Size on disk of what it reads, for progress and for the order of work."""
    spool: str | None = None
    """A file with the text of the one span, when a feeder has decompressed it."""
    first_line: int = 0
    damage: str | None = None

    @property
    def name(self) -> str:
        """What its shards and journal entry are called."""
        return f"{self.input:05d}-{self.number:04d}"


class Stream(msgspec.Struct, frozen=True):
    """A large input that is cut into tasks as it is read front to back."""

    input: int
    stop: int | None = None

    @property
    def name(self) -> str:
        """What names of its tasks begin with."""
        return f"{self.input:05d}"

    def task_name(self, number: int) -> str:
        """What one of its tasks is called."""
        return f"{self.name}-{number:04d}"


class Plan(msgspec.Struct, frozen=True):
    """The work of a run."""

    inputs: list[InputFile]
    tasks: list[Task]
    streams: list[Stream]
    order: dict[str, int] = {}
    """The place of each task and stream, by name, where somebody waits for them; else the largest come first."""

    def place(self, work: Task | Stream) -> tuple[int, ...]:
        """What sorts tasks, also those that a stream was cut into, and streams: the first to be done has the least."""
        number = work.number if isinstance(work, Task) else 0
        named = self.order.get(work.name, self.order.get(f"{work.input:05d}"))
        if named is not None:
            return named, number
        size = work.bytes if isinstance(work, Task) else self.inputs[work.input].bytes
        return -size, work.input, number


def default_task_bytes(inputs: Iterable[InputFile]) -> int:
    """About 128 tasks, each of 4 to 256 MiB of text: 64 cores have two apiece on 10 GB."""
    text_bytes = sum(file.text_bytes for file in inputs)
    wanted = min(max(text_bytes // TASKS_PER_RUN, SMALLEST_TASK), LARGEST_TASK)
    return max(wanted >> 20 << 20, SMALLEST_TASK)


def inspect_inputs(inputs: Sequence[Input], format: str, options: ReadOptions) -> list[InputFile]:
    """Look at each input: size, content fingerprint, compression and format."""
    names = name_inputs(inputs)
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda pair: _inspect(pair[0], pair[1], format, options), zip(inputs, names, strict=True)))


def _inspect(item: Input, name: str, format: str, options: ReadOptions) -> InputFile:
    path = input_path(item.path)
    try:
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        compression = detect_compression(head, str(path))
        format = detect_format(path, head, options) if format == "auto" else format
        if format == "parquet" and compression != "none":
            raise DataError(str(path), "is compressed Parquet; decompress it: Parquet compresses inside")
        return InputFile(
            path=str(path.absolute()),
            name=name,
            bytes=status.st_size,
            fingerprint=fingerprint(path),
            mtime_ns=status.st_mtime_ns,
            format=format,
            compression=compression,
            origin=item.origin,
        )
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}") from None


def explain_formats(files: Iterable[InputFile]) -> str | None:
    """What to tell of inputs that are called text and hold JSON lines."""
    renamed = [file for file in files if file.format == "jsonl" and format_by_name(input_path(file.path)) == "text"]
    if not renamed:
        return None
    names = renamed[0].shown + (f" and {len(renamed) - 1:,} more" if len(renamed) > 1 else "")
    return f"{names}: JSON lines by content, and read as such; pass --format text to tokenize the lines as they are"


def check_unchanged(files: Iterable[InputFile]) -> list[InputFile]:
    """Refuse inputs that are no longer what they were when the run began: spans of them may be of either content.

    One that was touched and has the same size and fingerprint passes; it is given back if its fingerprint is of a
    sample of its content and no proof.
    """
    doubtful = []
    for file in files:
        try:
            path = input_path(file.path)
            status = path.stat()
            if isinstance(path, Path) and (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
                continue
            if status.st_size == file.bytes and fingerprint(path) == file.fingerprint:
                if file.is_sampled:
                    doubtful.append(file)
                continue
        except OSError as error:
            raise DataError(file.shown, f"cannot be read any more: {error.strerror}") from None
        raise DataError(file.shown, changed_while_read(status.st_size, file.bytes))
    return doubtful


def make_plan(inputs: list[InputFile], settings: Settings) -> Plan:
    """Cut the inputs into tasks; the result depends on their sizes and the settings alone."""
    plan = Plan(inputs, [], [])
    cutter = _Cutter(plan, settings)
    remaining = settings.limit
    for number, file in enumerate(inputs):
        stop = None
        if remaining is not None:
            if remaining <= 0:
                break
            count, stop = _count_documents(file, settings.reading, remaining)
            remaining -= count
        cutter.add(number, file, stop)
    cutter.close()
    return plan


def row_spans(number: int, file: InputFile, options: ReadOptions, task_bytes: int) -> list[Span]:
    """How tasks share a Parquet input: a damaged page hides what is left of its span, and nothing behind that."""
    if file.text_bytes <= task_bytes or options.whole_files:
        return [Span(number)]
    try:
        ranges = ParquetReader(options).plan(input_path(file.path), task_bytes)
    except DataError:
        # Whoever reads it says what is wrong, and knows whether that ends the run.
        return [Span(number)]
    return [Span(number, start, stop) for start, stop in ranges]


class _Cutter:
    """Turns inputs into tasks one after another, joining small neighbours."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self._plan = plan
        self._options = settings.reading
        self._task_bytes = settings.task_bytes
        self._group: list[Span] = []
        self._group_text = 0
        self._group_bytes = 0

    def add(self, number: int, file: InputFile, stop: int | None) -> None:
        reader = reader_for(file.format, self._options)
        if file.text_bytes <= self._task_bytes or self._options.whole_files:
            self._add_to_group(number, file, stop)
            return
        self.close()
        if isinstance(reader, ParquetReader):
            spans = row_spans(number, file, self._options, self._task_bytes)
            if spans == [Span(number)]:
                self._add_to_group(number, file, stop)
                return
            ranges = [(span.start, span.stop or 0) for span in spans]
            self._add_ranges(
                number, file, [(a, b if stop is None else min(b, stop)) for a, b in ranges if stop is None or a < stop]
            )
        elif file.compression == "none" and reader.splittable:
            size = file.bytes if stop is None else min(stop, file.bytes)
            starts = range(0, size, self._task_bytes)
            self._add_ranges(number, file, [(start, min(start + self._task_bytes, size)) for start in starts])
        else:
            self._plan.streams.append(Stream(number, stop))

    def close(self) -> None:
        """End the task of small inputs that is being filled."""
        if self._group:
            first = self._group[0].input
            self._plan.tasks.append(Task(input=first, number=0, spans=self._group, bytes=self._group_bytes))
        self._group, self._group_text, self._group_bytes = [], 0, 0

    def _add_to_group(self, number: int, file: InputFile, stop: int | None) -> None:
        if self._group_text + file.text_bytes > self._task_bytes:
            self.close()
        self._group.append(Span(number, 0, stop))
        self._group_text += file.text_bytes
        self._group_bytes += file.bytes

    def _add_ranges(self, number: int, file: InputFile, ranges: list[tuple[int, int]]) -> None:
        whole = max(1, ranges[-1][1]) if ranges else 1
        for index, (start, stop) in enumerate(ranges):
            size = file.bytes * stop // whole - file.bytes * start // whole
            self._plan.tasks.append(Task(input=number, number=index, spans=[Span(number, start, stop)], bytes=size))


def _count_documents(file: InputFile, options: ReadOptions, most: int) -> tuple[int, int | None]:
    """How many documents an input has, up to `most`, and where the one after them starts."""
    from tokenmill.pipeline.reading import read_span

    reader = reader_for(file.format, options)
    if isinstance(reader, ParquetReader):
        # Every row is a document or a reject, also where damage hides many of them.
        num_rows = reader.count_documents(input_path(file.path))
        return (num_rows, None) if num_rows <= most else (most, most)
    count = 0
    for batch in read_span(file, Span(0), options):
        starts = np.concatenate([batch.positions, [reject.position for reject in batch.rejects]]).astype(np.int64)
        if count + len(starts) > most:
            return most, int(np.sort(starts)[most - count])
        count += len(starts)
    return count, None
