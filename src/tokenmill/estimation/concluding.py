"""From what was read and encoded to what a run would give and take."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tokenmill.engines import Tokenizer
from tokenmill.estimation.figures import Estimate, Figure, Padded
from tokenmill.estimation.rating import Rate
from tokenmill.estimation.surveying import Survey
from tokenmill.machine import usable_cores
from tokenmill.pipeline.budget import Budget, Needs
from tokenmill.pipeline.preparing import Prepared
from tokenmill.pipeline.settings import Settings
from tokenmill.remote.bucket import is_remote
from tokenmill.store.shard import BESIDE, DTYPES, dtype_for

__all__ = ["conclude"]

CONFIDENCE = 1.96
BYTES_PER_DOCUMENT = 24
"""Of the index and the table of documents, without kept fields."""
STARTUP_SECONDS = 2.0
WHOLE_RUN = 0.72
"""Of what the sample says: places and snippets take longer than whole files. Measured on 3 GB."""
PAIRED_EFFICIENCY = 0.93
"""Of a worker that shares memory and disk with others."""


def conclude(prepared: Prepared, survey: Survey, rate: Rate, budget: Budget, seq_len: int | None) -> Estimate:
    """Everything that an estimate says; `seq_len` asks about padded arrays too."""
    settings, tokenizer = prepared.settings, prepared.tokenizer
    text, documents = _extrapolate(survey, 1), _extrapolate(survey, 2)
    if settings.limit is not None and documents.value > settings.limit:
        text, documents = text.scale(settings.limit / documents.value), Figure.exact(settings.limit)
    around = (settings.policy.bos_id is not None) + (settings.policy.eos_id is not None)
    tokens = _tokens(text, documents, rate, around)
    disk = _disk(tokens, documents, tokenizer, settings)
    free = shutil.disk_usage(_existing_parent(Path(prepared.request.out))).free
    notes = list(survey.notes)
    if disk.high > free and not is_remote(prepared.request.out):
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
        engine=prepared.choice.engine,
        is_supervised=settings.supervision is not None,
        padded=None if seq_len is None else Padded(seq_len, _rows(survey, documents, rate, around, seq_len)),
        notes=notes,
    )


def _extrapolate(survey: Survey, column: int) -> Figure:
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


def _tokens(text: Figure, documents: Figure, rate: Rate, around: int) -> Figure:
    margin = CONFIDENCE * rate.error
    value = text.value * rate.tokens_per_byte
    # Independent errors: squares add up.
    relative = np.hypot(margin / max(rate.tokens_per_byte, 1e-12), (text.high - text.value) / max(text.value, 1.0))
    added = documents.value * around
    return Figure(value + added, value * max(0.0, 1 - relative) + added, value * (1 + relative) + added)


def _rows(survey: Survey, documents: Figure, rate: Rate, around: int, seq_len: int) -> Figure:
    """Rows of one document each, and of a part of one where it is longer; from the documents that were read."""
    sizes = np.array(survey.sizes, np.float64)

    def count(tokens_per_byte: float) -> float:
        return float(np.maximum(1, np.ceil((sizes * max(0.0, tokens_per_byte) + around) / seq_len)).sum())

    margin = CONFIDENCE * rate.error
    middle, share = rate.tokens_per_byte, 1 / max(1, len(sizes))
    return Figure(
        documents.value * share * count(middle),
        documents.low * share * count(middle - margin),
        documents.high * share * count(middle + margin),
    )


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


def _seconds(text: Figure, survey: Survey, rate: Rate, workers: int) -> Figure:
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
