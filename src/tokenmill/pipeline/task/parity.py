"""The parity gate: check that the engine's ids equal the reference's before a run publishes anything.

It compares a sample of the user's own documents and a built-in set of awkward strings. The run prints the result and
stores it in the manifest.

The sample is spread over all inputs: up to 32 spans are read round-robin, and another span replaces each exhausted one,
so that both one huge file and ten thousand tiny ones yield a sample. The reference is slow and takes up to 300 bytes of
memory per byte of text, so short documents are preferred. Some megabytes of long documents are compared whole, piece by
piece; of the others, parts that are spread over the whole document are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.engines import REFERENCES, Engine, create, open_tokenizer
from tokenmill.engines.probe_strings import make_probe_strings
from tokenmill.errors import DataError
from tokenmill.pipeline.input_file import InputFile, Render, Span, read_span
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.task.preview import Preview, TrainedPreview, check_trained, preview_document, preview_trained
from tokenmill.pipeline.text_field import TextField
from tokenmill.readers import reader_for
from tokenmill.readers.base import ExceedsMemory, ReadOptions
from tokenmill.remote.paths import input_path
from tokenmill.store.manifest import ParityInfo
from tokenmill.text_batch import PackedTexts, TextBatch

__all__ = ["GateResult", "Preview", "Sample", "mismatches", "run_gate", "take_sample"]

BATCH, BATCH_CHARACTERS = 256, 250_000
"""Limits of one batch for the reference, which takes up to 300 bytes of memory per byte of text."""
SAMPLE_DOCUMENTS = 1000
SAMPLE_BYTES = 2_000_000
SPANS_AT_ONCE = 32
SEARCHED, MOST_READ = 16_000_000, 500_000_000
"""How many characters to read in search of short documents: if there are enough long ones, and at most."""
LONG_DOCUMENT, LONGEST_WHOLE = 4_000, 1_000_000
HELD_BYTES = 20_000_000
"""The most bytes of long documents in memory; if there are no short ones, all of these are compared whole."""
MOST_WHOLE_BYTES = 5_000_000
"""The most bytes of long documents to compare whole otherwise: one or two seconds of the reference."""
PIECE, LONGEST_PIECE = 50_000, 250_000
NUM_PARTS, PART = 4, 1_000

Split = Callable[[str, int], list[str]]
"""An engine's `split`."""


class GateResult(msgspec.Struct, tag=True, frozen=True):
    """The comparison with the reference, and one document as the run will write it."""

    parity: ParityInfo
    preview: Preview | None
    unseen_keys: list[str] = []
    """The --keep-keys that no document of the sample has."""
    trained: TrainedPreview | None = None


@dataclass(frozen=True)
class Document:
    """The compared texts of one document: consecutive pieces that cover it, or only some parts."""

    texts: list[str]
    is_whole: bool = True


@dataclass
class Sample:
    """The sampled documents in the order in which they were read, short ones first."""

    documents: list[Document] = field(default_factory=list)
    num_characters: int = 0
    unseen_keys: list[str] = field(default_factory=list)
    """The --keep-keys that no document of the sample has."""

    @property
    def is_enough(self) -> bool:
        """Whether the sample has 1,000 documents and 2 MB."""
        return len(self.documents) >= SAMPLE_DOCUMENTS and self.num_characters >= SAMPLE_BYTES

    @property
    def num_in_parts(self) -> int:
        """How many documents are compared only in parts."""
        return sum(not document.is_whole for document in self.documents)

    def add(self, document: Document) -> None:
        """Add a document to the sample."""
        self.documents.append(document)
        self.num_characters += sum(map(len, document.texts))


def run_gate(job: Job, engine: Engine) -> GateResult:
    """Compare the engine of a job with its reference, and preview the first document."""
    tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer")
    reference_name = REFERENCES[tokenizer.kind]
    renderer = job.settings.renderer(tokenizer)
    awkward: list[str] = []
    differing: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        if job.engine != reference_name:
            awkward = make_probe_strings(list(tokenizer.special_tokens))
            reference = create(reference_name, tokenizer, job.settings.policy.special_tokens, threads=True)
            # The reference releases the GIL, so it runs while this thread reads documents.
            differing_awkward = pool.submit(mismatches, engine, reference, awkward)
        render = renderer.render if renderer else None
        # A run that fails at the first bad record says where it is.
        skips = job.on_error != "fail"
        reading = msgspec.structs.replace(job.settings.reading, memory_bytes=job.worker_bytes)
        found = take_sample(job.inputs, reading, engine.split, render, checks_field=skips)
        if renderer is not None:
            check_trained(renderer, job.settings, tokenizer)
        compared = []
        if job.engine != reference_name:
            compared = found.documents
            differing = [*differing_awkward.result(), *_differing_documents(engine, reference, compared)]
    parity = ParityInfo(
        reference=reference_name,
        num_documents=len(compared),
        num_in_parts=found.num_in_parts if compared else 0,
        num_bytes=sum(len(text.encode()) for document in compared for text in document.texts),
        num_awkward=len(awkward),
        num_mismatches=len(differing),
        example=differing[0][:200] if differing else None,
    )
    preview = preview_document(job, engine, tokenizer, found.documents[0].texts if found.documents else [])
    trained = preview_trained(renderer, tokenizer) if renderer is not None else None
    return GateResult(parity, preview, found.unseen_keys, trained)


def mismatches(engine: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """Return the texts whose ids differ between two engines."""
    differing: list[str] = []
    for some in _batches(texts):
        # Pack the texts as workers do, so that the gate tests the same code path.
        ours, theirs = engine.encode(PackedTexts.of(some) if engine.takes_packed else some), reference.encode(some)
        if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
            continue
        for i, text in enumerate(some):
            a, b = ours.offsets[i : i + 2], theirs.offsets[i : i + 2]
            if not np.array_equal(ours.ids[a[0] : a[1]], theirs.ids[b[0] : b[1]]):
                differing.append(text)
    return differing


def _differing_documents(engine: Engine, reference: Engine, documents: list[Document]) -> list[str]:
    """Return, for each document whose ids differ, a text that shows the difference."""
    wrong = set(mismatches(engine, reference, [text for document in documents for text in document.texts]))
    differing = []
    for document in documents:
        text = next((text for text in document.texts if text in wrong), None) if wrong else None
        pieces = document.texts
        if text is None and document.is_whole and len(pieces) > 1:
            # The pieces were compared with the reference; the whole text must have the same ids.
            whole = engine.encode(["".join(pieces)])
            text = None if np.array_equal(whole.ids, engine.encode(pieces).ids) else pieces[0]
        if text is not None:
            differing.append(text)
    return differing


def _batches(texts: list[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == BATCH or size > BATCH_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def take_sample(
    inputs: list[InputFile],
    options: ReadOptions,
    split: Split,
    render: Render | None = None,
    *,
    checks_field: bool = False,
) -> Sample:
    """Sample at least 1,000 documents and 2 MB, round-robin over the inputs; all documents if there are fewer.

    `split` cuts a long document between tokens, so that it can be compared piece by piece. With `checks_field`, a file
    without the text field raises `DataError`.
    """
    sample, long = Sample(), _LongDocuments(split)
    num_read, most_whole_bytes = 0, HELD_BYTES
    seen_keys: set[str] = set()
    for text in _read_round_robin(inputs, options, render, seen_keys, checks_field):
        num_read += len(text)
        if len(text) <= LONG_DOCUMENT:
            sample.add(Document([text]))
        else:
            long.add(text)
        many = len(sample.documents) + len(long.texts) + len(long.parts) >= SAMPLE_DOCUMENTS
        if sample.is_enough or num_read > (SEARCHED if many else MOST_READ):
            most_whole_bytes = MOST_WHOLE_BYTES
            break
    for document in long.shortest_first(most_whole_bytes):
        if sample.is_enough:
            break
        sample.add(document)
    sample.unseen_keys = [key for key in options.keep_keys if key not in seen_keys] if num_read else []
    return sample


@dataclass
class _LongDocuments:
    """Long documents: whole as long as memory allows, only parts of the others."""

    split: Split
    num_held: int = 0
    texts: list[bytes] = field(default_factory=list)
    parts: list[Document] = field(default_factory=list)

    def add(self, text: str) -> None:
        data = text.encode() if len(text) <= LONGEST_WHOLE else b""
        if data and self.num_held + len(data) <= HELD_BYTES:
            self.texts.append(data)
            self.num_held += len(data)
        else:
            self.parts.append(_take_parts(text))

    def shortest_first(self, most_whole_bytes: int) -> Iterator[Document]:
        """Yield whole documents up to so many bytes, then parts of documents."""
        num_whole_bytes = 0
        for data in sorted(self.texts, key=len):
            text = data.decode()
            pieces = self.split(text, PIECE) if len(text) > PIECE else [text]
            if num_whole_bytes + len(data) > most_whole_bytes or max(map(len, pieces)) > LONGEST_PIECE:
                yield _take_parts(text)
            else:
                num_whole_bytes += len(data)
                yield Document(pieces)
        yield from self.parts


def _take_parts(text: str) -> Document:
    """Take parts from the start to the end of a text, spaced evenly."""
    starts = [(len(text) - PART) * number // (NUM_PARTS - 1) for number in range(NUM_PARTS)]
    return Document([text[start : start + PART] for start in starts], is_whole=False)


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
