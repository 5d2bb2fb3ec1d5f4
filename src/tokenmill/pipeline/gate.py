"""The parity gate: proof, before a run publishes anything, that the engine's ids are the reference's.

It compares the user's own documents, spread over the inputs, and a built-in set of awkward
strings. The result is printed and stored in the manifest, so that nobody has to wonder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tokenmill.engines import REFERENCES, Engine, Tokenizer, create, open_tokenizer
from tokenmill.engines.awkward import awkward_strings
from tokenmill.engines.decoding import Decoder
from tokenmill.errors import DataError, UsageError
from tokenmill.pipeline.messages import GateResult, Preview
from tokenmill.pipeline.plan import InputFile, Span
from tokenmill.pipeline.reading import Render, read_span
from tokenmill.pipeline.task import Job, surround
from tokenmill.progress import show_safely
from tokenmill.readers.base import ReadOptions
from tokenmill.store.manifest import ParityInfo
from tokenmill.supervision.rendering import Renderer

__all__ = ["hold_gate", "mismatches", "sample_documents"]

SAMPLE_DOCUMENTS = 1000
SAMPLE_BYTES = 2_000_000
SAMPLE_MOST_BYTES = 32_000_000
PLACES = 32
LONG_DOCUMENT = 4_000
LONGEST_PART = 10_000
"""Of a longer document its start is compared: the reference takes up to 300 bytes of memory for a byte of text."""
BATCH, BATCH_BYTES = 256, 1_000_000
PREVIEW_HEAD, PREVIEW_TAIL = 9, 3


def hold_gate(job: Job, engine: Engine) -> GateResult:
    """Compare the engine of a job with its reference, and show how the first document comes out."""
    tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer")
    special_tokens = job.settings.policy.special_tokens
    reference_name = REFERENCES[tokenizer.kind]
    renderer = job.settings.renderer(tokenizer)
    if job.engine == reference_name:
        documents = sample_documents(job.inputs, job.settings.reading, renderer)
        _check_trained(renderer)
        parity = ParityInfo(reference=reference_name, num_documents=0, num_bytes=0, num_awkward=0, num_mismatches=0)
        return GateResult(parity, _preview(job, engine, tokenizer, documents))
    awkward = awkward_strings(list(tokenizer.special_tokens))
    reference = create(reference_name, tokenizer, special_tokens, threads=True)
    with ThreadPoolExecutor(1) as pool:
        # The reference works without the interpreter's lock, while documents are being read.
        differing_awkward = pool.submit(mismatches, engine, reference, awkward)
        documents = sample_documents(job.inputs, job.settings.reading, renderer)
        _check_trained(renderer)
        differing = [*differing_awkward.result(), *mismatches(engine, reference, documents)]
    parity = ParityInfo(
        reference=reference_name,
        num_documents=len(documents),
        num_bytes=sum(len(text.encode()) for text in documents),
        num_awkward=len(awkward),
        num_mismatches=len(differing),
        example=differing[0][:200] if differing else None,
    )
    return GateResult(parity, _preview(job, engine, tokenizer, documents))


def mismatches(engine: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """The texts whose ids differ between two engines."""
    differing: list[str] = []
    for some in _batches(texts):
        ours, theirs = engine.encode(some), reference.encode(some)
        if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
            continue
        for i, text in enumerate(some):
            a, b = ours.offsets[i : i + 2], theirs.offsets[i : i + 2]
            if not np.array_equal(ours.ids[a[0] : a[1]], theirs.ids[b[0] : b[1]]):
                differing.append(text)
    return differing


def _batches(texts: list[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == BATCH or size > BATCH_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _check_trained(renderer: Renderer | None) -> None:
    """Refuse data of which nothing, or everything, would be trained on: the fields or the template are wrong."""
    if renderer is None:
        return
    if renderer.num_untrained and not renderer.num_trained:
        raise UsageError(
            f"no token would be trained on in any of {renderer.num_untrained:,} examples from all inputs; "
            "look at the fields and roles of the records: only responses and assistant turns are trained on"
        )
    if renderer.num_trained and renderer.num_trained == renderer.num_characters:
        raise UsageError(
            "every token would be trained on in all examples that were looked at: prompts are empty, or the template "
            "writes none; tokenize such data as text with --text-key"
        )


def sample_documents(inputs: list[InputFile], options: ReadOptions, renderer: Renderer | None = None) -> list[str]:
    """At least 1,000 documents and 2 MB, one from each place in turn; all of them when there are fewer.

    Long documents wait until the others have run out, because the reference takes a second for
    every few megabytes; they never bring a sample above 32 MB.
    """
    render = renderer.render if renderer is not None else None
    readers = deque(_documents(inputs[place.input], place, options, render) for place in _places(inputs))
    texts: list[str] = []
    long: list[str] = []
    size = long_size = 0
    while readers and (len(texts) < SAMPLE_DOCUMENTS or size < SAMPLE_BYTES) and long_size < SAMPLE_MOST_BYTES:
        reader = readers.popleft()
        text = next(reader, None)
        if text is None:
            continue
        readers.append(reader)
        if len(text) <= LONG_DOCUMENT:
            texts.append(text)
            size += len(text)
        else:
            long.append(text[:LONGEST_PART])
            long_size += len(long[-1])
    for text in sorted(long, key=len):
        if size + len(text) > SAMPLE_MOST_BYTES or (len(texts) >= SAMPLE_DOCUMENTS and size >= SAMPLE_BYTES):
            break
        texts.append(text)
        size += len(text)
    return texts


def _places(inputs: list[InputFile]) -> Iterator[Span]:
    """Up to 32 places to read from, evenly spread over the inputs and, where possible, inside them."""
    step = max(1, len(inputs) / PLACES)
    chosen = sorted({int(i * step) for i in range(min(PLACES, len(inputs)))})
    per_input = max(1, PLACES // max(1, len(chosen)))
    for number in chosen:
        file = inputs[number]
        if file.compression != "none" or file.format not in {"jsonl", "text"} or file.bytes < 1 << 20:
            yield Span(number)
            continue
        for part in range(per_input):
            yield Span(number, file.bytes * part // per_input, file.bytes * (part + 1) // per_input)


def _documents(file: InputFile, span: Span, options: ReadOptions, render: Render | None) -> Iterator[str]:
    try:
        for batch in read_span(file, span, options, render):
            yield from batch.texts
    except DataError:
        # The run itself meets the same damage and decides what it means.
        return


def _preview(job: Job, engine: Engine, tokenizer: Tokenizer, documents: list[str]) -> Preview | None:
    """A document decoded again with its special tokens, and its ids; short enough for two lines."""
    if not documents:
        return None
    tokens, _ = surround(engine.encode(documents[:1]), job.settings.policy, dtype=np.int64, vocab_size=job.vocab_size)
    decoder = Decoder(tokenizer)
    head, tail = tokens[:PREVIEW_HEAD].tolist(), tokens[PREVIEW_HEAD:][-PREVIEW_TAIL:].tolist()
    middle = " ... " if len(tokens) > PREVIEW_HEAD + PREVIEW_TAIL else ""
    text = _shown(decoder, head) + middle + _shown(decoder, tail)
    return Preview(text, " ".join(map(str, head)) + (middle or " ") + " ".join(map(str, tail)), len(tokens))


def _shown(decoder: Decoder, tokens: list[int]) -> str:
    text = b"".join(decoder.token_bytes(token) for token in tokens).decode("utf-8", "replace")
    return show_safely(text)
