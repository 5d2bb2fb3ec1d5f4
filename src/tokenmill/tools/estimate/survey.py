"""Read inputs for an estimate, whole or in places, and encode snippets of their text."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.display import Display, Preparation, Silence
from tokenmill.engines import Engine
from tokenmill.errors import DataError
from tokenmill.pipeline.input_file import InputFile, Render, Span, TextStream, read_span
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.readers import reader_for
from tokenmill.text_batch import Reject, TextBatch

__all__ = ["Rate", "Survey", "measure_rate"]

READ_ALL_BYTES = 400_000_000
"""Inputs with less text than this are read whole, which takes about a second."""
SNIPPET_BYTES = 600
LEAST_SAMPLE, MOST_SAMPLE = 2_000_000, 64_000_000
START_BYTES = 16_000_000
"""The least text to read of an input that can only be read front to back, if it has as much: decompressing is up to
100 kB ahead of the text, which would count too much of a shorter part as read."""
DEFAULT_SAMPLE = 0.02
PLACE_BYTES = 128_000
MOST_PLACES = 2048
SHOW_SECONDS = 0.2


class Survey:
    """Reads inputs whole or in places, counts them, and takes snippets at even distances."""

    def __init__(self, prepared: Prepared, share: float | None, display: Display | None = None) -> None:
        self._display = display or Silence()
        self._began = self._shown = time.monotonic()
        self._done_bytes = 0
        """The size of the files that have been looked at."""
        self._files = files = prepared.files
        self._options = prepared.settings.reading
        renderer = prepared.settings.renderer(prepared.tokenizer)
        self._render: Render | None = renderer.render if renderer is not None else None
        self._weights = list(prepared.weights or (1.0,) * len(files))
        self.disk_bytes = sum(file.bytes * weight for file, weight in zip(files, self._weights, strict=True))
        self.total_bytes = sum(file.text_bytes for file in files)
        self._is_sampled = any(weight != 1.0 for weight in self._weights)
        self._reads_whole = self.total_bytes <= READ_ALL_BYTES
        self.reads_all = self._reads_whole and not self._is_sampled
        """Whether the figures are counts, because every file is read to its end."""
        wanted = self.total_bytes * (share if share is not None else DEFAULT_SAMPLE)
        if share is None:
            wanted = min(max(wanted, LEAST_SAMPLE), MOST_SAMPLE, self.total_bytes)
        self._distance = self._mean_distance = max(1.0, SNIPPET_BYTES * self.total_bytes / max(1.0, wanted))
        self._until_next = self._distance / 2
        # A file that stands for many others gives as many more snippets, so that all text has the same chance.
        self._mean_weight = self.disk_bytes / max(1, sum(file.bytes for file in files))
        self.snippets: list[str] = []
        self._first_texts: list[str] = []
        """The snippets of inputs that are shorter than one."""
        self.num_text_bytes = self.num_rejects = 0
        self.first_reject: tuple[InputFile, Reject] | None = None
        self.sizes = array("q")
        """Bytes of text of each document."""
        self.places: list[tuple[float, float, float]] = []
        """Bytes on disk, bytes of text, and documents of each place."""
        self.seconds = 0.0
        self.notes: list[str] = []
        self._thinned = set() if self._reads_whole else self._thin_out()
        """Inputs that others stand for, and those others."""

    def read(self) -> None:
        """Read all inputs, or as much of them as can be read in seconds; raise if no record of that has a text."""
        for number, (file, weight) in enumerate(zip(self._files, self._weights, strict=True)):
            started, num_places = time.perf_counter(), len(self.places)
            self._done_bytes += file.bytes
            if not weight:
                continue
            self._distance = max(SNIPPET_BYTES, self._mean_distance * self._mean_weight / weight)
            if self._reads_whole or file.bytes == 0:
                self._count(file, read_span(file, Span(number), self._options, self._render), file.bytes)
            elif self._has_places(file):
                self._read_places(number, file)
            else:
                self._read_start(file)
            if self._is_sampled or number in self._thinned:
                self._weigh(num_places, file.bytes * weight)
            self.seconds += time.perf_counter() - started
        self.snippets = self.snippets or self._first_texts
        if self.first_reject is not None and not self.sizes:
            file, reject = self.first_reject
            reason = f"none of the {self.num_rejects:,} records that were read can be tokenized: {reject.detail}"
            raise DataError(file.shown, reason)
        if self._is_sampled:
            files = "1 file was" if len(self._files) == 1 else f"{len(self._files):,} files were"
            self._note(f"{files} looked at, and stand for all of the data set; the others may differ")

    def _has_places(self, file: InputFile) -> bool:
        """Whether a file can be read from several places."""
        return file.compression == "none" and reader_for(file.format, self._options).splittable

    def _thin_out(self) -> set[int]:
        """Of many inputs that can only be read front to back, let some stand for all; return the numbers of all."""
        streams = [number for number, file in enumerate(self._files) if file.bytes and not self._has_places(file)]
        least = sum(min(START_BYTES, self._files[number].text_bytes) for number in streams)
        step = -(-least // READ_ALL_BYTES)
        if step < 2:
            return set()
        chosen = streams[step // 2 :: step] or streams[:1]
        sizes = {number: self._files[number].bytes * self._weights[number] for number in streams}
        factor = sum(sizes.values()) / sum(sizes[number] for number in chosen)
        for number in streams:
            self._weights[number] *= factor if number in chosen else 0.0
        self._note(f"{len(chosen):,} of {len(streams):,} compressed inputs were read; the others may differ")
        return set(streams)

    def _show(self, file: InputFile, share: float) -> None:
        """Show that a share of a file has been looked at."""
        now = time.monotonic()
        if now - self._shown >= SHOW_SECONDS:
            self._shown = now
            self._display.update(
                Preparation(
                    action="looking",
                    what=file.shown,
                    unit="bytes",
                    seconds=now - self._began,
                    total=sum(file.bytes for file in self._files),
                    done=self._done_bytes - int(file.bytes * (1 - share)),
                )
            )

    def _weigh(self, first: int, size: float) -> None:
        """Replace the places of a file by one of `size` bytes: files differ more than the places within a file."""
        together = np.array(self.places[first:], np.float64).reshape(-1, 3).sum(axis=0)
        disk_bytes, text_bytes, documents = (together * size / max(1.0, together[0])).tolist()
        self.places[first:] = [(disk_bytes, text_bytes, documents)]

    def _read_places(self, number: int, file: InputFile) -> None:
        """Read some of the spans that an input can be cut into, evenly spread."""
        reader = reader_for(file.format, self._options)
        spans = reader.plan(Path(file.path), PLACE_BYTES)
        wanted = max(1, min(MOST_PLACES * file.text_bytes // self.total_bytes, len(spans)))
        last = max(1, spans[-1][1]) if spans else 1
        for place in np.linspace(0, len(spans), wanted, endpoint=False).astype(int).tolist() if spans else ():
            start, stop = spans[place]
            self._show(file, place / len(spans))
            batches = read_span(file, Span(number, start, stop), self._options, self._render)
            self._count(file, batches, (stop - start) * file.bytes / last)

    def _read_start(self, file: InputFile) -> None:
        """Read the first part of an input that can only be read front to back; each batch is one place."""
        with closing(TextStream(file, self._options)) as stream:
            share = max(START_BYTES, READ_ALL_BYTES * file.text_bytes // self.total_bytes)
            taken = consumed = 0
            for batch in stream.reader.read_stream(stream):
                if taken >= share and stream.consumed > consumed:
                    # All text of the bytes that were consumed before this batch has been counted.
                    self._note("only the first part of large compressed inputs was read; the rest may differ")
                    break
                taken += batch.num_bytes
                self._show(file, min(1.0, taken / max(1, share)))
                size, consumed = stream.consumed - consumed, stream.consumed
                self._count(file, [batch if self._render is None else self._render(batch)], size)

    def _count(self, file: InputFile, batches: Iterable[TextBatch], size: float) -> None:
        """Count the documents of one place, which is `size` bytes on disk."""
        documents = text_bytes = 0
        for batch in batches:
            if self._reads_whole:
                self._show(file, min(1.0, text_bytes / max(1, file.text_bytes)))
            documents += len(batch.texts)
            text_bytes += self._take(batch)
            self.num_rejects += sum(reject.num_documents for reject in batch.rejects)
            if batch.rejects and self.first_reject is None:
                self.first_reject = file, batch.rejects[0]
        self.num_text_bytes += text_bytes
        self.places.append((size, text_bytes, documents))

    def _take(self, batch: TextBatch) -> int:
        """Take a snippet at every distance in a batch, and return the bytes of its texts."""
        total = 0
        for text in batch.texts:
            size = len(text) if text.isascii() else len(text.encode())
            total += size
            self.sizes.append(size)
            if not self.snippets and sum(map(len, self._first_texts)) + size < SNIPPET_BYTES:
                self._first_texts.append(text)
            while self._until_next < size:
                self.snippets.append(_cut(text, self._until_next / size, SNIPPET_BYTES / size))
                self._until_next += self._distance
            self._until_next -= size
        return total

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _cut(text: str, at: float, share: float) -> str:
    """Cut a snippet around a place, at spaces if the text has any, so that its tokens are those of the whole text."""
    width = int(share * len(text)) + 1
    start = max(0, min(int(at * len(text)) - width // 2, len(text) - width))
    stop = start + width
    if start:
        space = text.find(" ", start, start + 80)
        start = space if space >= 0 else start
    space = text.find(" ", stop, stop + 80)
    return text[start : space if space >= 0 else stop]


@dataclass(frozen=True)
class Rate:
    """Tokens per byte of text with its standard error, and how fast one worker encodes."""

    tokens_per_byte: float
    error: float
    cold_bytes_per_second: float
    warm_bytes_per_second: float
    num_bytes: int


def measure_rate(snippets: list[str], engine: Engine) -> Rate:
    """Encode all snippets twice: with empty caches and with full ones."""
    if not snippets:
        return Rate(0.0, 0.0, 1e8, 1e8, 0)
    sizes = np.array([len(snippet.encode()) for snippet in snippets], np.float64)
    started = time.perf_counter()
    counts = _count_tokens(snippets, engine)
    cold = time.perf_counter() - started
    started = time.perf_counter()
    _count_tokens(snippets, engine)
    warm = time.perf_counter() - started
    # Snippets are evenly spaced in bytes of text, so each stands for the same amount of it, whatever its own size.
    rates = counts / np.maximum(1.0, sizes)
    error = float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else 0.0
    total = float(sizes.sum())
    return Rate(float(rates.mean()), error, total / max(cold, 1e-6), total / max(warm, 1e-6), int(total))


def _count_tokens(snippets: list[str], engine: Engine) -> npt.NDArray[np.float64]:
    lengths = [np.diff(engine.encode(snippets[at : at + 512]).offsets) for at in range(0, len(snippets), 512)]
    return np.concatenate(lengths).astype(np.float64)
