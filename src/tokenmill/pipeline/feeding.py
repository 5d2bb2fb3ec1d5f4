"""Cutting a stream into tasks as it is read front to back, each with its text in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tokenmill.pipeline.plan import Span, Stream, Task
from tokenmill.pipeline.reading import TextStream
from tokenmill.pipeline.task import Job
from tokenmill.readers import reader_for
from tokenmill.readers.cutting import cut_stream
from tokenmill.readers.parquet import ParquetReader

__all__ = ["cut_tasks"]


def cut_tasks(job: Job, stream: Stream, slot: Callable[[int], Path | None]) -> Iterator[tuple[int, Task | None, float]]:
    """The tasks of a stream with their numbers, and the seconds that it took to read on to the end of each.

    `slot` says which file the text of a task goes to; None passes over it, and None is given in its place.
    """
    file = job.inputs[stream.input]
    reader = reader_for(file.format, job.settings.reading)
    assert not isinstance(reader, ParquetReader)
    text = TextStream(file, job.settings.reading, stop=stream.stop)
    slots: dict[int, Path] = {}

    def sink(number: int) -> BinaryIO | None:
        path = slot(number)
        if path is None:
            return None
        slots[number] = path
        return path.open("r+b" if path.exists() else "w+b", buffering=0)

    consumed, reported = 0, 0.0
    for cut in cut_stream(text, delimiter=reader.delimiter, task_bytes=job.settings.task_bytes, sink=sink):
        size, consumed = text.consumed - consumed, text.consumed
        if cut.damage is not None and cut.number not in slots and (empty := sink(cut.number)) is not None:
            # Damage right at a cut, or at the very start, has no text of its own but must be told.
            empty.truncate(0)
            empty.close()
        path = slots.pop(cut.number, None)
        seconds, reported = text.seconds - reported, text.seconds
        if path is None:
            yield cut.number, None, seconds
            continue
        task = Task(
            input=stream.input,
            number=cut.number,
            spans=[Span(stream.input, cut.start, cut.stop)],
            bytes=size,
            spool=str(path),
            first_line=cut.first_line,
            damage=cut.damage,
        )
        yield cut.number, task, seconds
