"""`estimate`: what a run would give and take, from a sample of its inputs, before it is started.

Documents and text are counted, not guessed, where all of the input can be read in a few seconds; else
they are extrapolated from places spread evenly over it. Only snippets of the text are encoded, some hundred
bytes each from as many documents as possible: what differs most between texts is their language, and neighbouring
sentences have the same. Every figure comes with an interval that holds in 19 cases of 20.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.batch import TextBatch
from tokenmill.engines import Engine, Tokenizer, choose, create, load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.files import expand_inputs
from tokenmill.machine import usable_cores
from tokenmill.pipeline.budget import Budget, Needs, make_budget
from tokenmill.pipeline.plan import InputFile, Span, inspect_inputs
from tokenmill.pipeline.reading import Render, TextStream, read_span
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.settings import Settings
from tokenmill.readers import reader_for
from tokenmill.readers.parquet import ParquetReader
from tokenmill.store.shard import BESIDE, DTYPES, dtype_for

__all__ = ["Estimate", "Figure", "estimate"]

READ_ALL_BYTES = 400_000_000
"""Inputs of less text than this are read whole: about a second."""
SNIPPET_BYTES = 600
LEAST_SAMPLE, MOST_SAMPLE = 2_000_000, 64_000_000
DEFAULT_SAMPLE = 0.02
PLACE_BYTES = 128_000
MOST_PLACES = 2048
CONFIDENCE = 1.96
BYTES_PER_DOCUMENT = 24
"""Of the index and the table of documents, without kept fields."""
STARTUP_SECONDS = 2.0
WHOLE_RUN = 0.72
"""Of what the sample says: places and snippets take longer than whole files. Measured on 3 GB."""
PAIRED_EFFICIENCY = 0.93
"""Of a worker that shares memory and disk with others."""


@dataclass(frozen=True)
class Figure:
    """An estimate and the interval it lies in."""

    value: float
    low: float
    high: float

    def scale(self, factor: float) -> Figure:
        """The figure in another unit."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)

    @classmethod
    def exact(cls, value: float) -> Figure:
        """A figure that was counted."""
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        """Whether it was counted."""
        return self.low == self.high


@dataclass(frozen=True)
class Estimate:
    """What a run would give and take."""

    tokens: Figure
    documents: Figure
    text_bytes: Figure
    bytes_per_token: Figure
    disk_bytes: Figure
    free_bytes: int
    memory_bytes: Figure
    seconds: dict[int, Figure]
    """By number of workers."""
    sample_bytes: int
    num_rejects: int
    engine: str
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values, and the intervals beside them."""
        figures = {name: getattr(self, name) for name in ("tokens", "documents", "disk_bytes", "memory_bytes")}
        return {
            **{name: round(figure.value) for name, figure in figures.items()},
            "seconds": {str(workers): round(figure.value, 1) for workers, figure in self.seconds.items()},
            "text_bytes": round(self.text_bytes.value),
            "bytes_per_token": round(self.bytes_per_token.value, 4),
            "free_bytes": self.free_bytes,
            "intervals": {
                **{name: [round(figure.low), round(figure.high)] for name, figure in figures.items()},
                "seconds": {str(n): [round(f.low, 1), round(f.high, 1)] for n, f in self.seconds.items()},
            },
            "sample_bytes": self.sample_bytes,
            "rejects_in_sample": self.num_rejects,
            "engine": self.engine,
            "notes": self.notes,
        }


def estimate(request: Request, *, share: float | None = None) -> Estimate:
    """Estimate a run from a `share` of its text; by default two hundredths, within reasonable bounds."""
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--sample {share} must be above 0 and at most 1")
    tokenizer = load_tokenizer(request.tokenizer)
    choice = choose(tokenizer, request.engine, request.specials_in_text(tokenizer))
    files = inspect_inputs(expand_inputs(request.inputs), request.format, request.reading())
    settings = request.settings(tokenizer, files)
    budget = make_budget(request, len(tokenizer.files[tokenizer.main_file]))
    engine = create(choice.engine, tokenizer, settings.policy.special_tokens)
    survey = _Survey(files, settings, tokenizer, share)
    survey.read()
    rate = _measure_tokens(survey.snippets, engine)
    return _conclude(request, settings, tokenizer, survey, rate, budget, choice.engine)


class _Survey:
    """Reads inputs, whole or in places, counts, and takes snippets at even distances."""

    def __init__(self, files: list[InputFile], settings: Settings, tokenizer: Tokenizer, share: float | None) -> None:
        self._files = files
        self._options = settings.reading
        renderer = settings.renderer(tokenizer)
        self._render: Render | None = renderer.render if renderer is not None else None
        self.disk_bytes = sum(file.bytes for file in files)
        self.total_bytes = sum(file.text_bytes for file in files)
        self.reads_all = self.total_bytes <= READ_ALL_BYTES
        wanted = self.total_bytes * (share if share is not None else DEFAULT_SAMPLE)
        if share is None:
            wanted = min(max(wanted, LEAST_SAMPLE), MOST_SAMPLE, self.total_bytes)
        self._distance = max(1.0, SNIPPET_BYTES * self.total_bytes / max(1.0, wanted))
        self._until_next = self._distance / 2
        self.snippets: list[str] = []
        self.num_text_bytes = self.num_rejects = 0
        self.places: list[tuple[float, int, int]] = []
        """Bytes on disk, bytes of text, and documents of each place."""
        self.seconds = 0.0
        self.notes: list[str] = []

    def read(self) -> None:
        for number, file in enumerate(self._files):
            started = time.perf_counter()
            if self.reads_all or file.bytes == 0:
                self._count(read_span(file, Span(number), self._options, self._render), file.bytes)
            elif file.format == "parquet" or (file.compression == "none" and file.format in {"jsonl", "text"}):
                self._read_places(number, file)
            else:
                self._read_start(file)
            self.seconds += time.perf_counter() - started

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


@dataclass(frozen=True)
class _Rate:
    """Tokens per byte of text, its standard error, and how fast one worker encodes."""

    tokens_per_byte: float
    error: float
    cold_bytes_per_second: float
    warm_bytes_per_second: float
    num_bytes: int


def _measure_tokens(snippets: list[str], engine: Engine) -> _Rate:
    if not snippets:
        return _Rate(0.0, 0.0, 1e8, 1e8, 0)
    sizes = np.array([len(snippet.encode()) for snippet in snippets], np.float64)
    started = time.perf_counter()
    counts = _encode(snippets, engine)
    cold = time.perf_counter() - started
    started = time.perf_counter()
    _encode(snippets, engine)
    warm = time.perf_counter() - started
    # Places are even in bytes of text, so each snippet stands for as much of it, whatever its own size.
    rates = counts / np.maximum(1.0, sizes)
    error = float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else 0.0
    total = float(sizes.sum())
    return _Rate(float(rates.mean()), error, total / max(cold, 1e-6), total / max(warm, 1e-6), int(total))


def _encode(snippets: list[str], engine: Engine) -> npt.NDArray[np.float64]:
    lengths = [np.diff(engine.encode(snippets[at : at + 512]).offsets) for at in range(0, len(snippets), 512)]
    return np.concatenate(lengths).astype(np.float64)


def _extrapolate(survey: _Survey, column: int) -> Figure:
    """Text bytes (1) or documents (2) of all inputs, from those of the places that were read."""
    places = np.array(survey.places, np.float64).reshape(-1, 3)
    if survey.reads_all:
        return Figure.exact(float(places[:, column].sum()))
    size, values = places[:, 0], places[:, column]
    ratio = values.sum() / max(1.0, size.sum())
    degrees = max(1, len(places) - 1)
    error = np.sqrt(((values - ratio * size) ** 2).sum() * len(places) / degrees) / max(1.0, size.sum())
    margin = CONFIDENCE * error
    return Figure(*(float(max(0.0, some) * survey.disk_bytes) for some in (ratio, ratio - margin, ratio + margin)))


def _conclude(
    request: Request,
    settings: Settings,
    tokenizer: Tokenizer,
    survey: _Survey,
    rate: _Rate,
    budget: Budget,
    engine: str,
) -> Estimate:
    text, documents = _extrapolate(survey, 1), _extrapolate(survey, 2)
    if settings.limit is not None and documents.value > settings.limit:
        text, documents = text.scale(settings.limit / documents.value), Figure.exact(settings.limit)
    around = (settings.policy.bos_id is not None) + (settings.policy.eos_id is not None)
    tokens = _tokens(text, documents, rate, around)
    disk = _disk(tokens, documents, tokenizer, settings)
    free = shutil.disk_usage(_existing_parent(Path(request.out))).free
    notes = list(survey.notes)
    if disk.high > free:
        notes.append(f"the disk has {free / 1e9:.1f} GB free, and the store may take {disk.high / 1e9:.1f} GB")
    if survey.num_rejects:
        notes.append(f"{survey.num_rejects:,} records that were read cannot be tokenized; see --on-error")
    return Estimate(
        tokens=tokens,
        documents=documents,
        text_bytes=text,
        bytes_per_token=_divide(text, tokens),
        disk_bytes=disk,
        free_bytes=free,
        memory_bytes=_memory(budget, tokenizer),
        seconds={workers: _seconds(text, survey, rate, workers) for workers in _worker_counts(budget)},
        sample_bytes=rate.num_bytes,
        num_rejects=survey.num_rejects,
        engine=engine,
        notes=notes,
    )


def _tokens(text: Figure, documents: Figure, rate: _Rate, around: int) -> Figure:
    margin = CONFIDENCE * rate.error
    value = text.value * rate.tokens_per_byte
    # Independent errors: squares add up.
    relative = np.hypot(margin / max(rate.tokens_per_byte, 1e-12), (text.high - text.value) / max(text.value, 1.0))
    added = documents.value * around
    return Figure(value + added, value * max(0.0, 1 - relative) + added, value * (1 + relative) + added)


def _divide(text: Figure, tokens: Figure) -> Figure:
    value = text.value / max(1.0, tokens.value)
    return Figure(value, text.value / max(1.0, tokens.high), text.value / max(1.0, tokens.low))


def _disk(tokens: Figure, documents: Figure, tokenizer: Tokenizer, settings: Settings) -> Figure:
    per_token = DTYPES[dtype_for(tokenizer.vocab_size)][1].itemsize
    if settings.supervision is not None:
        per_token += BESIDE[".mask"].itemsize
        per_token += BESIDE[".weight"].itemsize if settings.supervision.weight_key is not None else 0
    fixed = documents.value * BYTES_PER_DOCUMENT + sum(map(len, tokenizer.files.values()))
    return Figure(*(some * per_token + fixed for some in (tokens.value, tokens.low, tokens.high)))


def _memory(budget: Budget, tokenizer: Tokenizer) -> Figure:
    """Between what workers need and what the budget lets their caches grow to."""
    needed = Needs(len(tokenizer.files[tokenizer.main_file])).total(budget.num_workers)
    usual = min(budget.memory_bytes, needed)
    return Figure(usual, usual * 0.6, max(usual, min(budget.memory_bytes, usual * 1.8)))


def _seconds(text: Figure, survey: _Survey, rate: _Rate, workers: int) -> Figure:
    """Reading was measured; encoding is measured cold and warm, and a long run is warm for most of its time."""
    reading = survey.seconds / max(1, survey.num_text_bytes)
    efficiency = PAIRED_EFFICIENCY if workers > 1 else 1.0

    def needed(bytes_per_second: float) -> float:
        return STARTUP_SECONDS + text.value * (reading + 1.15 / bytes_per_second) / (workers * efficiency)

    fast, slow = needed(rate.warm_bytes_per_second), needed(rate.cold_bytes_per_second)
    warm_up = min(1.0, 200e6 / max(1.0, text.value / workers))
    value = fast + (slow - fast) * warm_up * 0.5
    return Figure(value * WHOLE_RUN, fast * 0.55, max(slow, value))


def _worker_counts(budget: Budget) -> list[int]:
    most = max(usable_cores(), budget.num_workers)
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return sorted({*counts, budget.num_workers})


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
