"""`estimate`: what a run would produce and need, from a sample of its inputs, before it starts.

If all of the input can be read in a few seconds, documents and text are counted. Otherwise they are extrapolated from
places spread evenly over the input; of a large data set of the Hub, these are in a few of its files. Only snippets of
the text are encoded, some hundred bytes each from as many documents as possible, because texts differ most by their
language, and neighbouring sentences have the same. Every figure has a 95% confidence interval.
"""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.arguments import is_remote, whole_number
from tokenmill.display import Display, DisplayName, Preparation, as_display
from tokenmill.engines import Tokenizer, create
from tokenmill.engines.tokenizer_objects import TokenizerLike, tokenizer_spec
from tokenmill.errors import UsageError
from tokenmill.formatting import plural
from tokenmill.inputs.row_objects import name_items
from tokenmill.machine import usable_cores
from tokenmill.pipeline.plan.budget import Budget, Needs, make_budget
from tokenmill.pipeline.plan.prepare import Prepared, prepare
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.settings import Settings
from tokenmill.store.shard import BESIDE, DTYPES, dtype_for
from tokenmill.tools.estimate.quantities import Estimate, Interval, Padded
from tokenmill.tools.estimate.survey import Rate, Survey, measure_rate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.pipeline.run_flags import RunFlags

__all__ = ["Estimate", "estimate", "estimate_run"]

CONFIDENCE = 1.96
BYTES_PER_DOCUMENT = 24
"""In the index and the table of documents, without kept fields."""
STARTUP_SECONDS = 2.0
WHOLE_RUN = 0.72
"""A run takes this share of the time that the sample suggests, because places and snippets take longer than whole
files. Measured on 3 GB."""
PAIRED_EFFICIENCY = 0.93
"""The speed of a worker that shares memory and disk with others, relative to one that does not."""


def estimate(
    inputs: Any,
    *,
    tokenizer: TokenizerLike,
    out: str | PathLike[str] = ".",
    sample: float | None = None,
    seq_len: int | None = None,
    display: Display | DisplayName = "auto",
    **flags: Unpack[RunFlags],
) -> Estimate:
    """Estimate what `tokenmill.tokenize` would produce and need, from a share `sample` of the text; it prints itself.

    Inputs are paths and names; `out` is where the store would go. With `seq_len`, also estimate the size of the
    documents as padded arrays. `flags` are those of `tokenize`.
    """
    names = name_items(inputs, "estimate reads files; rows of a program are counted with tokenmill.tokenize")
    request = {"inputs": names, "out": str(out), "tokenizer": tokenizer_spec(tokenizer), **flags}
    return estimate_run(Request.from_flags(request), share=sample, seq_len=seq_len, display=as_display(display))


def estimate_run(
    request: Request, *, share: float | None = None, seq_len: int | None = None, display: Display | None = None
) -> Estimate:
    """Estimate a run from a `share` of its text; by default 2%, within reasonable bounds.

    With `seq_len`, also estimate the size of its documents as padded arrays.
    """
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--sample {share} must be above 0 and at most 1")
    if seq_len is not None:
        whole_number(seq_len, "--seq-len", 1)
    prepared = prepare(request, display, is_sample=True)
    tokenizer, policy = prepared.tokenizer, prepared.settings.policy
    budget = make_budget(request, len(tokenizer.files[tokenizer.main_file]))
    engine = create(prepared.choice.engine, tokenizer, policy.special_tokens)
    survey = Survey(prepared, share, display)
    survey.read()
    if display is not None:
        display.update(Preparation.step("encoding the sample"))
    return _project(prepared, survey, measure_rate(survey.snippets, engine), budget, seq_len)


def _project(prepared: Prepared, survey: Survey, rate: Rate, budget: Budget, seq_len: int | None) -> Estimate:
    """Project what was read and encoded to the whole run."""
    settings, tokenizer = prepared.settings, prepared.tokenizer
    text, documents = _extrapolate(survey, 1), _extrapolate(survey, 2)
    if settings.limit is not None and documents.value > settings.limit:
        text, documents = text.scale(settings.limit / documents.value), Interval.exact(settings.limit)
    around = (settings.policy.bos_id is not None) + (settings.policy.eos_id is not None)
    tokens = _tokens(text, documents, rate, around)
    disk = _disk(tokens, documents, tokenizer, settings)
    out = Path(prepared.request.out).absolute()
    free = shutil.disk_usage(next(place for place in (out, *out.parents) if place.exists())).free
    most = max(usable_cores(), budget.num_workers)
    worker_counts = sorted({*(1 << power for power in range(most.bit_length())), budget.num_workers})
    notes = list(survey.notes)
    if disk.high > free and not is_remote(prepared.request.out):
        notes.append(f"the disk has {free / 1e9:.1f} GB free, and the store may take {disk.high / 1e9:.1f} GB")
    if survey.num_rejects:
        notes.append(f"{plural(survey.num_rejects, 'record')} of the sample cannot be tokenized; see --on-error")
    return Estimate(
        tokens=tokens,
        documents=documents,
        text_bytes=text,
        bytes_per_token=_divide(text, tokens),
        disk_bytes=disk,
        free_bytes=free,
        memory_bytes=_memory(budget, tokenizer),
        seconds={workers: _seconds(text, survey, rate, workers) for workers in worker_counts},
        sample_bytes=rate.num_bytes,
        num_rejects=survey.num_rejects,
        engine=prepared.choice.engine,
        is_supervised=settings.supervision is not None,
        padded=None if seq_len is None else Padded(seq_len, _rows(survey, documents, rate, around, seq_len)),
        notes=notes,
    )


def _extrapolate(survey: Survey, column: int) -> Interval:
    """Extrapolate the text bytes (column 1) or the documents (column 2) of all inputs from the places read."""
    places = np.array(survey.places, np.float64).reshape(-1, 3)
    if survey.reads_all:
        return Interval.exact(float(places[:, column].sum()))
    size, values = places[:, 0], places[:, column]
    ratio = values.sum() / max(1.0, size.sum())
    degrees = max(1, len(places) - 1)
    error = np.sqrt(((values - ratio * size) ** 2).sum() * len(places) / degrees) / max(1.0, size.sum())
    margin = CONFIDENCE * error
    return Interval(*(float(max(0.0, some) * survey.disk_bytes) for some in (ratio, ratio - margin, ratio + margin)))


def _tokens(text: Interval, documents: Interval, rate: Rate, around: int) -> Interval:
    margin = CONFIDENCE * rate.error
    value = text.value * rate.tokens_per_byte
    # The errors are independent, so their squares add up.
    relative = np.hypot(margin / max(rate.tokens_per_byte, 1e-12), (text.high - text.value) / max(text.value, 1.0))
    added = documents.value * around
    return Interval(value + added, value * max(0.0, 1 - relative) + added, value * (1 + relative) + added)


def _rows(survey: Survey, documents: Interval, rate: Rate, around: int, seq_len: int) -> Interval:
    """Count padded rows from the documents that were read; a document longer than a row takes several."""
    sizes = np.array(survey.sizes, np.float64)

    def count(tokens_per_byte: float) -> float:
        return float(np.maximum(1, np.ceil((sizes * max(0.0, tokens_per_byte) + around) / seq_len)).sum())

    margin = CONFIDENCE * rate.error
    middle, share = rate.tokens_per_byte, 1 / max(1, len(sizes))
    return Interval(
        documents.value * share * count(middle),
        documents.low * share * count(middle - margin),
        documents.high * share * count(middle + margin),
    )


def _divide(text: Interval, tokens: Interval) -> Interval:
    value = text.value / max(1.0, tokens.value)
    return Interval(value, text.value / max(1.0, tokens.high), text.value / max(1.0, tokens.low))


def _disk(tokens: Interval, documents: Interval, tokenizer: Tokenizer, settings: Settings) -> Interval:
    per_token = DTYPES[dtype_for(tokenizer.vocab_size)][1].itemsize
    if settings.supervision is not None:
        per_token += BESIDE[".mask"].itemsize
        per_token += BESIDE[".weight"].itemsize if settings.supervision.weight_key is not None else 0
    fixed = documents.value * BYTES_PER_DOCUMENT + sum(map(len, tokenizer.files.values()))
    return Interval(*(some * per_token + fixed for some in (tokens.value, tokens.low, tokens.high)))


def _memory(budget: Budget, tokenizer: Tokenizer) -> Interval:
    """Between the memory that workers need and the budget up to which their caches may grow."""
    needed = Needs(len(tokenizer.files[tokenizer.main_file])).total(budget.num_workers)
    usual = min(budget.memory_bytes, needed)
    return Interval(usual, usual * 0.6, max(usual, min(budget.memory_bytes, usual * 1.8)))


def _seconds(text: Interval, survey: Survey, rate: Rate, workers: int) -> Interval:
    """Reading was measured; encoding was measured cold and warm, and a long run is warm for most of its time."""
    reading = survey.seconds / max(1, survey.num_text_bytes)
    efficiency = PAIRED_EFFICIENCY if workers > 1 else 1.0

    def needed(bytes_per_second: float) -> float:
        return STARTUP_SECONDS + text.value * (reading + 1.15 / bytes_per_second) / (workers * efficiency)

    fast, slow = needed(rate.warm_bytes_per_second), needed(rate.cold_bytes_per_second)
    warm_up = min(1.0, 200e6 / max(1.0, text.value / workers))
    value = fast + (slow - fast) * warm_up * 0.5
    return Interval(value * WHOLE_RUN, fast * 0.55, max(slow, value))
