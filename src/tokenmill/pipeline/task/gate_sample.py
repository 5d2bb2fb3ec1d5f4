"""What the parity gate compares: a sample of all inputs, and a set of awkward strings, with the ids of the engine.

The sample is spread over all inputs: up to 32 spans are read round-robin, and another span replaces each exhausted one,
so that both one huge file and ten thousand tiny ones yield a sample. A small corpus gives a small one: the documents
that each task sends later (`task_sample`) are the proof that grows. Short documents are compared whole. Long ones give
windows that are spread over the whole document, first one each, then more as long as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import msgspec

from tokenmill.engines import REFERENCES, Engine, open_tokenizer
from tokenmill.engines.probe_strings import make_probe_strings
from tokenmill.errors import DataError, UsageError
from tokenmill.pipeline.input_file import InputFile, Render, Span, read_span
from tokenmill.pipeline.parity import SampledText, encode_packed, pair_up
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.task.preview import (
    Preview,
    TrainedPreview,
    check_trained,
    note_dropped,
    preview_document,
    preview_trained,
)
from tokenmill.pipeline.task.task_sample import LONG_DOCUMENT, WINDOW, cut_window
from tokenmill.pipeline.text_field import MOST_RECORDS, TextField
from tokenmill.readers import reader_for
from tokenmill.readers.base import ExceedsMemory, ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.text_batch import TextBatch

__all__ = ["GateSample", "Sample", "read_first", "take_gate_sample", "take_sample"]

SAMPLE_DOCUMENTS = 1000
SAMPLE_SHARE, LEAST_BYTES, MOST_BYTES = 0.02, 500_000, 1_000_000
"""The size of the sample: a share of the inputs, within bounds. The reference takes 1 to 3 MB a second on a core."""
SPANS_AT_ONCE = 32
MOST_READ = 64_000_000
"""How many characters to read at most; if documents are longer than that together, there are enough windows."""
MOST_WINDOWS = 16


class GateSample(msgspec.Struct, tag=True, frozen=True):
    """What the gate compares, and what the first screen shows of the run."""

    num_documents: int
    num_in_parts: int
    """How many of the documents are long, so that only windows of them are compared."""
    texts: list[SampledText]
    awkward: list[SampledText]
    preview: Preview | None
    trained: TrainedPreview | None = None
    dropped: str | None = None
    """A note about records that the chat template cannot render as they are."""


@dataclass
class Sample:
    """The sampled texts: short documents in the order in which they were read, then windows of long ones."""

    texts: list[str] = field(default_factory=list)
    num_documents: int = 0
    num_in_parts: int = 0
    num_looked: int = 0
    """How many documents were searched for the --keep-keys."""
    unseen_keys: list[str] = field(default_factory=list)


def take_gate_sample(job: Job, engine: Engine, *, with_awkward: bool) -> GateSample:
    """Sample the inputs of a job and encode the sample; preview the first document."""
    is_reference = job.engine in REFERENCES.values()
    tokenizer = renderer = None
    if job.settings.supervision is not None or with_awkward:
        tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer")
        renderer = job.settings.renderer(tokenizer)
    render = renderer.render if renderer else None
    # A run that fails at the first bad record says where it is.
    found = take_sample(job.inputs, job.reading(), render, checks_field=job.on_error != "fail")
    if found.unseen_keys:
        raise UsageError(_explain_unseen(found, job))
    if renderer is not None and tokenizer is not None:
        check_trained(renderer, job.settings, tokenizer)
    # The renderer of the sample counts what it renders, so the first document, which is shown, has one of its own.
    show = job.settings.renderer(tokenizer) if renderer is not None and tokenizer is not None else None
    first = read_first(job.inputs, job.reading(), show.render if show is not None else None)
    texts: list[SampledText] = []
    awkward: list[SampledText] = []
    if not is_reference:
        texts = pair_up(found.texts, encode_packed(engine, found.texts))
        if with_awkward and tokenizer is not None:
            strings = make_probe_strings(list(tokenizer.special_tokens))
            awkward = pair_up(strings, encode_packed(engine, strings))
    return GateSample(
        num_documents=found.num_documents if texts else 0,
        num_in_parts=found.num_in_parts if texts else 0,
        texts=texts,
        awkward=awkward,
        preview=preview_document(job, engine, first) if first is not None else None,
        trained=preview_trained(renderer, tokenizer) if renderer is not None and tokenizer is not None else None,
        dropped=note_dropped(renderer) if renderer is not None else None,
    )


def take_sample(
    inputs: list[InputFile], options: ReadOptions, render: Render | None = None, *, checks_field: bool = False
) -> Sample:
    """Sample 1,000 documents, round-robin over the inputs; all documents if there are fewer.

    With `checks_field`, a file without the text field raises `DataError`.
    """
    size = sum(file.text_bytes for file in inputs)
    room = int(min(max(size * SAMPLE_SHARE, LEAST_BYTES), MOST_BYTES))
    sample = Sample()
    windows: list[list[str]] = []
    num_read = num_sampled = 0
    seen_keys: set[str] = set()
    texts = _read_round_robin(inputs, options, render, seen_keys, checks_field)
    for text in texts:
        sample.num_documents += 1
        num_read += len(text)
        if len(text) <= LONG_DOCUMENT:
            sample.texts.append(text)
            num_sampled += len(text)
        else:
            windows.append(_spread_windows(text, sample.num_documents))
        is_full = num_sampled + WINDOW * len(windows) > room
        if is_full or sample.num_documents == SAMPLE_DOCUMENTS or num_read > MOST_READ:
            break
    sample.num_in_parts = len(windows)
    sample.num_looked = sample.num_documents
    if num_read and not seen_keys.issuperset(options.keep_keys):
        # A field may be in a few records only.
        for text in texts:
            num_read += len(text)
            sample.num_looked += 1
            if sample.num_looked >= MOST_RECORDS or num_read > MOST_READ or seen_keys.issuperset(options.keep_keys):
                break
    for number, window in enumerate(filter(None, chain.from_iterable(zip_longest(*windows)))):
        if number >= len(windows) and num_sampled > room:
            break
        sample.texts.append(window)
        num_sampled += len(window)
    sample.unseen_keys = [key for key in options.keep_keys if key not in seen_keys] if num_read else []
    return sample


def _explain_unseen(sample: Sample, job: Job) -> str:
    """Say that no document has a field, and which ones the first record has."""
    key = sample.unseen_keys[0]
    wanted = msgspec.structs.replace(job.settings.reading, text_key=key, keep_keys=(), record_keys=())
    rejects = (batch.rejects for file in job.inputs[:1] for batch in _readable(read_span(file, Span(0), wanted)))
    details = [reject.detail for reject in next(rejects, []) if reject.reason == "missing-field"]
    record = details[0].partition("; ")[2].partition(". Pass ")[0] if details else ""
    return (
        f"--keep-keys {key}: none of {sample.num_looked:,} documents from all inputs has this field"
        + (f"; {record}" if record else "")
        + ". Leave it out, or pass a field that they have"
    )


def read_first(inputs: list[InputFile], options: ReadOptions, render: Render | None) -> TextBatch | None:
    """Read the batch that begins with the first document of the inputs; None if they have no document."""
    for number, file in enumerate(inputs):
        for batch in _readable(read_span(file, Span(number), options, render)):
            if len(batch.texts):
                return batch
    return None


def _spread_windows(text: str, number: int) -> list[str]:
    """Cut windows out of a long document; the first is near its start in one document, near its end in the next."""
    count = min(MOST_WINDOWS, len(text) // WINDOW)
    step = (len(text) - WINDOW) / max(1, count - 1)
    # Multiples of the golden ratio, without their whole parts, are spread evenly.
    first = int(number * 0.618034 % 1 * count)
    return [cut_window(text, int((first + turn) % count * step), WINDOW) for turn in range(count)]


def _read_round_robin(
    inputs: list[InputFile], options: ReadOptions, render: Render | None, seen_keys: set[str], checks_field: bool
) -> Iterator[str]:
    """Yield one text from each of 32 spans, then the next from each; another span replaces an exhausted one.

    The spans cover all inputs, in an order in which every prefix is spread evenly.
    """
    most = max(1, SPANS_AT_ONCE // max(1, len(inputs)))
    order = _bit_reversed(len(inputs))
    spans = (span for number in order for span in _cut_spans(number, inputs[number], options, most))
    readers: deque[Iterator[str]] = deque()
    while True:
        while len(readers) < SPANS_AT_ONCE and (span := next(spans, None)) is not None:
            field = TextField(inputs[span.input], span) if checks_field else None
            readers.append(_texts(inputs[span.input], span, options, render, seen_keys, field))
        if not readers:
            return
        text = next(readers[0], None)
        if text is None:
            readers.popleft()
        else:
            yield text
            readers.rotate(-1)


def _cut_spans(number: int, file: InputFile, options: ReadOptions, most: int) -> Iterator[Span]:
    """Cut an input into spans; compressed inputs, JSON arrays and tiny files are one span."""
    edges: list[int] = []
    if most > 1 and file.format == "parquet":
        edges = _row_groups(file, options)
    elif most > 1 and file.bytes >= 1 << 20 and file.compression == "none" and file.format in {"jsonl", "text"}:
        edges = [file.bytes * part // most for part in range(most + 1)]
    count = min(most, len(edges) - 1)
    if count < 1:
        yield Span(number)
    for part in range(count):
        first, last = (len(edges) - 1) * part // count, (len(edges) - 1) * (part + 1) // count
        yield Span(number, edges[first], edges[last])


def _row_groups(file: InputFile, options: ReadOptions) -> list[int]:
    """Return the boundaries of the row groups of a Parquet file; empty if it cannot be read."""
    try:
        return [0, *(stop for _, stop in reader_for(file.format, options).plan(input_path(file.path), 1))]
    except DataError:
        return []


def _bit_reversed(count: int) -> Iterator[int]:
    """Yield all numbers below `count` in bit-reversed order: 0 4 2 6 1 5 3 7."""
    width = max(1, (count - 1).bit_length())
    for number in range(1 << width):
        reversed_bits = int(f"{number:0{width}b}"[::-1], 2)
        if reversed_bits < count:
            yield reversed_bits


def _texts(
    file: InputFile,
    span: Span,
    options: ReadOptions,
    render: Render | None,
    seen_keys: set[str],
    text_field: TextField | None,
) -> Iterator[str]:
    for batch in _readable(read_span(file, span, options, render)):
        if text_field is not None:
            text_field.look(batch)
        for index, key in enumerate(options.keep_keys):
            if key not in seen_keys and any(row[index] is not None for row in batch.kept or ()):
                seen_keys.add(key)
        yield from batch.texts
    if text_field is not None:
        text_field.end()


def _readable(batches: Iterator[TextBatch]) -> Iterator[TextBatch]:
    try:
        yield from batches
    except (DataError, ExceedsMemory):
        # The task that reads this file reports it.
        return
