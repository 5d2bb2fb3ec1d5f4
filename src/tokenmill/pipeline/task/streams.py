"""Cut a stream into tasks while it is read front to back; the text of each goes to a file of its own.

On a shared disk these are spool files: one process reads the stream, and others tokenize its tasks. A task holds the
documents that start in its `task_bytes` of the stream, as a range of a plain file would, so tasks are the same whether
an input is compressed or not. The cutter must keep pace with decompression: it searches for a delimiter only next to a
cut, and counts lines without locating them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from tokenmill.compression import ByteStream, DamagedInput
from tokenmill.errors import StoreError
from tokenmill.files import InputStream
from tokenmill.pipeline.input_file import Damage, InputFile, Render, Span, TextStream
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.plan.tasks import Stream, Task
from tokenmill.readers import delimited_reader_for
from tokenmill.readers.base import BLOCK_BYTES, ReadOptions
from tokenmill.text_batch import Refusal, TextBatch

__all__ = [
    "CutSpan",
    "create_spool",
    "cut_stream",
    "cut_tasks",
    "first_doubtful",
    "read_spool",
    "reclaim_files",
    "release_file",
    "take_file",
]

LOOK_SECONDS = 0.005


def cut_tasks(job: Job, stream: Stream, slot: Callable[[int], Path | None]) -> Iterator[tuple[int, Task | None, float]]:
    """Yield the tasks of a stream with their numbers and the seconds that it took to read each.

    `slot` returns the file for the text of a task; if it returns None, the task is skipped and None is yielded instead.
    Raises `UnconfirmedText` at a damaged frame, unless --on-error keep-damaged keeps what was read of it.
    """
    slots: dict[int, Path] = {}

    def sink(number: int) -> BinaryIO | None:
        path = slot(number)
        if path is None:
            return None
        slots[number] = path
        return path.open("r+b" if path.exists() else "w+b", buffering=0)

    consumed, reported = 0, 0.0
    file, confirmed_only = job.inputs[stream.input], not job.settings.keeps_damaged
    with closing(TextStream(file, job.settings.reading, stream.span, confirmed_only=confirmed_only)) as text:
        for cut in cut_stream(text, delimiter=text.reader.delimiter, task_bytes=job.settings.task_bytes, sink=sink):
            size, consumed = text.consumed - consumed, text.consumed
            if cut.damage is not None and cut.number not in slots and (empty := sink(cut.number)) is not None:
                # Damage directly at a cut, or at the start, has no text before it, but a task must report it.
                empty.truncate(0)
                empty.close()
            task, path = None, slots.pop(cut.number, None)
            if path is not None:
                task = Task(
                    input=stream.input,
                    number=cut.number,
                    spans=[Span(stream.input, cut.start, cut.stop)],
                    bytes=size,
                    spool=str(path),
                    first_line=cut.first_line,
                    damage=cut.damage,
                )
            seconds, reported = text.seconds - reported, text.seconds
            yield cut.number, task, seconds


def first_doubtful(numbers: Collection[int], damage: Damage, task_bytes: int) -> int:
    """Return the first task of a damaged stream that may have text of the damaged frame.

    The documents of task k start before byte `(k + 1) * task_bytes`. If that byte is in front of the frame, only the
    last document of the last such task can reach into the frame.
    """
    return max((number for number in numbers if (number + 1) * task_bytes <= damage.confirmed), default=0)


def read_spool(file: InputFile, task: Task, options: ReadOptions, render: Render | None = None) -> Iterator[TextBatch]:
    """Read the documents of a task whose text the reader of a stream has written to a file."""
    assert task.spool is not None
    reader = delimited_reader_for(file.format, options)
    with InputStream(Path(task.spool), "none") as stream:
        batches = reader.read_stream(stream, position=task.spans[0].start)
        yield from batches if render is None else map(render, batches)


def create_spool(folder: Path, num_files: int) -> None:
    """Create the files that carry the text of streams from one process to others, all of them free.

    Their number is fixed, which bounds their disk space and page cache. They are reused, so the system need not
    allocate the pages again. A file's name shows its owner: `free-3`, or the stream whose text it holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (folder / f"free-{number}").touch()


def take_file(folder: Path, stream: str) -> Path:
    """Take a free file for a stream by renaming it; wait if none is free."""
    while True:
        for path in folder.glob("free-*"):
            mine = path.with_name(f"{stream}-{path.name.removeprefix('free-')}")
            try:
                path.rename(mine)
            except FileNotFoundError:
                # Another reader was faster.
                continue
            return mine
        if not folder.exists():
            # Without locks, a second process of the same rank may have swept it away.
            raise StoreError(f"{folder} was removed by another run; let one run at a time work on a store")
        time.sleep(LOOK_SECONDS)


def release_file(path: Path) -> None:
    """Free a file after its text was tokenized."""
    path.rename(path.with_name(f"free-{path.name.rpartition('-')[2]}"))


def reclaim_files(folder: Path, stream: str, in_use: Collection[str | None]) -> None:
    """Free the files that a dead reader of a stream had taken and not yet passed on."""
    for path in folder.glob(f"{stream}-*"):
        if str(path) not in in_use:
            release_file(path)


class CutSpan(msgspec.Struct, frozen=True):
    """Bytes `start` to `stop` of a stream: the whole documents that start in span `number`."""

    number: int
    start: int
    stop: int
    first_line: int
    num_lines: int
    damage: Refusal | None = None
    """Why the stream ends here; the span does not include the truncated document."""


def cut_stream(
    stream: ByteStream, *, delimiter: bytes, task_bytes: int, sink: Callable[[int], BinaryIO | None]
) -> Iterator[CutSpan]:
    """Cut a stream so that span k holds the documents that start in bytes `[k, k + 1) * task_bytes`.

    The bytes of span k go to the unbuffered file `sink(k)`, which is closed with exactly their length before the span
    is yielded. If `sink` returns None, they are skipped. Spans inside one huge document are empty and are left out.
    Without a delimiter there is a single span.
    """
    damage: Refusal | None = None
    with closing(_StreamCutter(delimiter, task_bytes, sink)) as cutter:
        try:
            while data := stream.read(BLOCK_BYTES):
                yield from cutter.take(data)
        except DamagedInput as error:
            damage = Refusal("damaged", error.reason, error.num_documents)
        last = cutter.finish(damage)
        if last is not None:
            yield last


@dataclass
class _StreamCutter:
    """The span that is being written, and the state that is needed to find its end."""

    delimiter: bytes
    task_bytes: int
    sink: Callable[[int], BinaryIO | None]
    file: BinaryIO | None = None
    position: int = 0
    start: int = 0
    first_line: int = 0
    num_lines: int = 0
    last_end: int = 0
    """Where the last delimiter ended; damage after it truncates a document."""
    seam: bytes = b""
    """The last bytes before `position`, in which a delimiter may have begun."""

    @property
    def _number(self) -> int:
        return self.start // self.task_bytes if self.delimiter else 0

    def take(self, data: bytes) -> Iterator[CutSpan]:
        """Write the next bytes, and yield each span that ends in them."""
        end = self.position + len(data)
        while self.delimiter and end >= (cut := (self._number + 1) * self.task_bytes):
            offset = self._find_end(data, cut)
            if offset is None:
                break
            self._write(data[:offset])
            data = data[offset:]
            yield self._end_span(self.position)
        if data:
            self._write(data)

    def _find_end(self, data: bytes, cut: int) -> int | None:
        """Find the end, in `data`, of the first delimiter that ends at or after `cut`."""
        size = len(self.delimiter)
        window = self.seam + data
        least = cut - size - (self.position - len(self.seam))
        found = window.find(self.delimiter, max(0, least) if size == 1 else 0)
        while 0 <= found < least:
            # Search one by one: where a delimiter can overlap itself, each match depends on all matches before.
            found = window.find(self.delimiter, found + size)
        return None if found < 0 else found + size - len(self.seam)

    def _write(self, data: bytes) -> None:
        if self.position == self.start:
            self.file = self.sink(self._number)
        if self.file is not None:
            rest = memoryview(data)
            while rest:
                rest = rest[self.file.write(rest) :]
        if self.delimiter:
            self._count(data)
        self.position += len(data)

    def _count(self, data: bytes) -> None:
        """Count the delimiters that end in `data`, and remember where the last one ends."""
        if len(self.delimiter) == 1:
            num_ends = _count_byte(data, self.delimiter)
            num_after = len(data) - 1 - data.rfind(self.delimiter)
        else:
            pieces = (self.seam + data).split(self.delimiter)
            num_ends = len(pieces) - 1
            num_after = len(pieces[-1])
            self.seam = pieces[-1][-len(self.delimiter) + 1 :]
        self.num_lines += num_ends
        if num_ends:
            self.last_end = self.position + len(data) - num_after

    def _end_span(self, stop: int, damage: Refusal | None = None) -> CutSpan:
        span = CutSpan(self._number, self.start, stop, self.first_line, self.num_lines, damage)
        if self.file is not None:
            self.file.truncate(stop - self.start)
        self.close()
        self.start = self.last_end = stop
        self.first_line += self.num_lines
        self.num_lines = 0
        return span

    def finish(self, damage: Refusal | None) -> CutSpan | None:
        """Return the last span, if it is not empty or there is damage to report."""
        if damage is not None:
            return self._end_span(max(self.last_end, self.start), damage)
        if self.position == self.start:
            return None
        if self.last_end < self.position:
            self.num_lines += 1
        return self._end_span(self.position)

    def close(self) -> None:
        """Close the current file."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _count_byte(data: bytes, byte: bytes) -> int:
    """Count a byte at 6 to 13 GB/s; `bytes.count` reaches 3."""
    count, at = data.count(byte, 0, 8192), data.find(byte, 8192)
    most = count + len(data) // 512 if count <= 16 else -1
    while at >= 0 and count < most:
        count, at = count + 1, data.find(byte, at + 1)
    return count + (int(np.count_nonzero(np.frombuffer(data[at:], np.uint8) == byte[0])) if at >= 0 else 0)
