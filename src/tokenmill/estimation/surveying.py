"""Reading inputs for an estimate: whole or in places, counted, with snippets of their text at even distances."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tokenmill.batch import TextBatch
from tokenmill.pipeline.plan import InputFile, Span
from tokenmill.pipeline.preparing import Prepared
from tokenmill.pipeline.reading import Render, TextStream, read_span
from tokenmill.readers import reader_for
from tokenmill.readers.parquet import ParquetReader

__all__ = ["Survey"]

READ_ALL_BYTES = 400_000_000
"""Inputs of less text than this are read whole: about a second."""
SNIPPET_BYTES = 600
LEAST_SAMPLE, MOST_SAMPLE = 2_000_000, 64_000_000
DEFAULT_SAMPLE = 0.02
PLACE_BYTES = 128_000
MOST_PLACES = 2048


class Survey:
    """Reads inputs, whole or in places, counts, and takes snippets at even distances."""

    def __init__(self, prepared: Prepared, share: float | None) -> None:
        self._files = files = prepared.files
        self._options = prepared.settings.reading
        renderer = prepared.settings.renderer(prepared.tokenizer)
        self._render: Render | None = renderer.render if renderer is not None else None
        self._weights = prepared.weights or (1.0,) * len(files)
        self.disk_bytes = sum(file.bytes * weight for file, weight in zip(files, self._weights, strict=True))
        self.total_bytes = sum(file.text_bytes for file in files)
        self._is_sampled = any(weight != 1.0 for weight in self._weights)
        self._reads_whole = self.total_bytes <= READ_ALL_BYTES
        self.reads_all = self._reads_whole and not self._is_sampled
        """Whether the figures are counts: no file is left out, and no part of one."""
        wanted = self.total_bytes * (share if share is not None else DEFAULT_SAMPLE)
        if share is None:
            wanted = min(max(wanted, LEAST_SAMPLE), MOST_SAMPLE, self.total_bytes)
        self._distance = self._mean_distance = max(1.0, SNIPPET_BYTES * self.total_bytes / max(1.0, wanted))
        self._until_next = self._distance / 2
        # Of files that stand for many, as many more snippets: all text has to have the same chance.
        self._mean_weight = self.disk_bytes / max(1, sum(file.bytes for file in files))
        self.snippets: list[str] = []
        self.num_text_bytes = self.num_rejects = 0
        self.sizes = array("q")
        """Bytes of text of each document that was read."""
        self.places: list[tuple[float, float, float]] = []
        """Bytes on disk, bytes of text, and documents of each place."""
        self.seconds = 0.0
        self.notes: list[str] = []

    def read(self) -> None:
        """Read all inputs, or as much of them as takes seconds."""
        for number, (file, weight) in enumerate(zip(self._files, self._weights, strict=True)):
            started, num_places = time.perf_counter(), len(self.places)
            self._distance = max(SNIPPET_BYTES, self._mean_distance * self._mean_weight / weight)
            if self._reads_whole or file.bytes == 0:
                self._count(read_span(file, Span(number), self._options, self._render), file.bytes)
            elif file.format == "parquet" or (file.compression == "none" and file.format in {"jsonl", "text"}):
                self._read_places(number, file)
            else:
                self._read_start(file)
            if self._is_sampled:
                self._weigh(num_places, file.bytes * weight)
            self.seconds += time.perf_counter() - started
        if self._is_sampled:
            files = "1 file was" if len(self._files) == 1 else f"{len(self._files):,} files were"
            self._note(f"{files} looked at, and stand for all of the data set; the others may differ")

    def _weigh(self, first: int, size: float) -> None:
        """Have the places of a file speak together for all that it stands for; files differ more than places of one."""
        together = np.array(self.places[first:], np.float64).reshape(-1, 3).sum(axis=0)
        disk_bytes, text_bytes, documents = (together * size / max(1.0, together[0])).tolist()
        self.places[first:] = [(disk_bytes, text_bytes, documents)]

    def _read_places(self, number: int, file: InputFile) -> None:
        """Some of the spans that an input can be cut into, evenly spread."""
        reader = reader_for(file.format, self._options)
        spans = reader.plan(Path(file.path), PLACE_BYTES)
        wanted = max(1, min(MOST_PLACES * file.text_bytes // self.total_bytes, len(spans)))
        last = max(1, spans[-1][1]) if spans else 1
        for place in np.linspace(0, len(spans), wanted, endpoint=False).astype(int).tolist() if spans else ():
            start, stop = spans[place]
            batches = read_span(file, Span(number, start, stop), self._options, self._render)
            self._count(batches, (stop - start) * file.bytes / last)

    def _read_start(self, file: InputFile) -> None:
        """The first part of an input that can only be read front to back, in several places for the interval."""
        reader = reader_for(file.format, self._options)
        assert not isinstance(reader, ParquetReader)
        stream = TextStream(file, self._options)
        share = READ_ALL_BYTES * file.text_bytes // self.total_bytes
        taken = consumed = 0
        for batch in reader.read_stream(stream):
            taken += batch.num_bytes
            size, consumed = stream.consumed - consumed, stream.consumed
            self._count([batch if self._render is None else self._render(batch)], size)
            if taken >= share:
                self._note("of large compressed inputs only the first part was read; what comes later may differ")
                break

    def _count(self, batches: Iterable[TextBatch], size: float) -> None:
        """Take in what lies in one place, which is `size` bytes on disk."""
        documents = text_bytes = 0
        for batch in batches:
            documents += len(batch.texts)
            text_bytes += self._take(batch)
            self.num_rejects += sum(reject.num_documents for reject in batch.rejects)
        self.num_text_bytes += text_bytes
        self.places.append((size, text_bytes, documents))

    def _take(self, batch: TextBatch) -> int:
        """Take snippets of a batch's texts, one for each distance that lies in it; the bytes of all texts."""
        total = 0
        for text in batch.texts:
            size = len(text) if text.isascii() else len(text.encode())
            total += size
            self.sizes.append(size)
            while self._until_next < size:
                self.snippets.append(_cut(text, self._until_next / size, SNIPPET_BYTES / size))
                self._until_next += self._distance
            self._until_next -= size
        return total

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _cut(text: str, at: float, share: float) -> str:
    """Some hundred bytes around a place, between words where the text has any, so that tokens stay what they are."""
    width = int(share * len(text)) + 1
    start = max(0, min(int(at * len(text)) - width // 2, len(text) - width))
    stop = start + width
    if start:
        space = text.find(" ", start, start + 80)
        start = space if space >= 0 else start
    space = text.find(" ", stop, stop + 80)
    return text[start : space if space >= 0 else stop]
