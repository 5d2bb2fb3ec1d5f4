"""The parity gate: check that the engine's ids equal the reference's before a run publishes anything.

It compares a sample of the user's own documents (see `sample.py`) and a built-in set of awkward
strings. The run prints the result and stores it in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.engines import REFERENCES, Engine, Tokenizer, create, open_tokenizer
from tokenmill.engines.decoder import Decoder
from tokenmill.engines.probe_strings import make_probe_strings
from tokenmill.errors import UsageError
from tokenmill.formatting import show_safely
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.task.runner import surround
from tokenmill.pipeline.task.sample import Document, take_sample
from tokenmill.store.manifest import ParityInfo
from tokenmill.supervision.renderer import Renderer
from tokenmill.text_batch import PackedTexts

__all__ = ["GateResult", "Preview", "mismatches", "run_gate"]

BATCH, BATCH_CHARACTERS = 256, 250_000
"""Limits of one batch for the reference, which takes up to 300 bytes of memory per byte of text."""
PREVIEW_HEAD, PREVIEW_TAIL = 9, 3
PREVIEW_COLUMNS = 55
"""The room for ids on a line of 80 columns."""


class Preview(msgspec.Struct, frozen=True):
    """The start and end of one document as the run will write it."""

    text: str
    ids: str
    num_tokens: int


class GateResult(msgspec.Struct, tag=True, frozen=True):
    """The comparison with the reference, and one document as the run will write it."""

    parity: ParityInfo
    preview: Preview | None
    unseen_keys: list[str] = []
    """The --keep-keys that no document of the sample has."""


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
        found = take_sample(job.inputs, job.settings.reading, engine.split, renderer.render if renderer else None)
        if renderer is not None:
            _check_trained(renderer)
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
    return GateResult(parity, _preview(job, engine, tokenizer, found.documents), found.unseen_keys)


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
        if (
            text is None
            and document.is_whole
            and len(document.texts) > 1
            and not _equals_pieces(engine, document.texts)
        ):
            text = document.texts[0]
        if text is not None:
            differing.append(text)
    return differing


def _equals_pieces(engine: Engine, pieces: list[str]) -> bool:
    """Whether the ids of a text equal those of its pieces, which were compared with the reference."""
    return np.array_equal(engine.encode(["".join(pieces)]).ids, engine.encode(pieces).ids)


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


def _check_trained(renderer: Renderer) -> None:
    """Raise if no token or every token would be trained on: the fields or the template are wrong then."""
    if renderer.num_untrained and not renderer.num_trained:
        raise UsageError(
            f"no token would be trained on in any of {renderer.num_untrained:,} examples from all inputs; "
            "check the fields and roles of the records: only responses and assistant turns are trained on"
        )
    if renderer.num_trained and renderer.num_trained == renderer.num_characters:
        raise UsageError(
            "every token would be trained on in all examples of the sample: prompts are empty, or the template "
            "writes none; tokenize such data as text with --text-key"
        )


def _preview(job: Job, engine: Engine, tokenizer: Tokenizer, documents: list[Document]) -> Preview | None:
    """Show a document as its decoded tokens and its ids, each short enough for one line."""
    if not documents:
        return None
    tokens, _ = surround(
        engine.encode(["".join(documents[0].texts)]), job.settings.policy, dtype=np.int64, vocab_size=job.vocab_size
    )
    decoder = Decoder(tokenizer)
    for count in range(PREVIEW_HEAD, 0, -1):
        head, tail = tokens[:count].tolist(), tokens[count:][-PREVIEW_TAIL:].tolist()
        middle = " ... " if len(tokens) > count + PREVIEW_TAIL else ""
        ids = " ".join(map(str, head)) + (middle or " ") + " ".join(map(str, tail))
        if len(ids) <= PREVIEW_COLUMNS:
            break
    texts = [b"".join(map(decoder.token_bytes, part)).decode("utf-8", "replace") for part in (head, tail)]
    return Preview(middle.join(map(show_safely, texts)), ids, len(tokens))
