"""The parity gate: proof, before a run publishes anything, that the engine's ids are the reference's.

It compares the user's own documents (`sampling.py` chooses them) and a built-in set of awkward
strings. The result is printed and stored in the manifest, so that nobody has to wonder.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tokenmill.batch import PackedTexts
from tokenmill.engines import REFERENCES, Engine, Tokenizer, create, open_tokenizer
from tokenmill.engines.awkward import awkward_strings
from tokenmill.engines.decoding import Decoder
from tokenmill.errors import UsageError
from tokenmill.pipeline.messages import GateResult, Preview
from tokenmill.pipeline.sampling import Document, Sample, take_sample
from tokenmill.pipeline.task import Job, surround
from tokenmill.progress import show_safely
from tokenmill.store.manifest import ParityInfo
from tokenmill.supervision.rendering import Renderer

__all__ = ["hold_gate", "mismatches"]

BATCH, BATCH_CHARACTERS = 256, 250_000
"""Texts that go through the reference together, which takes up to 300 bytes of memory for a byte of text."""
PREVIEW_HEAD, PREVIEW_TAIL = 9, 3
PREVIEW_COLUMNS = 55
"""What a line of 80 has left for ids."""


def hold_gate(job: Job, engine: Engine) -> GateResult:
    """Compare the engine of a job with its reference, and show how the first document comes out."""
    tokenizer = open_tokenizer(Path(job.store) / "tokenizer", name="tokenizer")
    special_tokens = job.settings.policy.special_tokens
    reference_name = REFERENCES[tokenizer.kind]
    renderer = job.settings.renderer(tokenizer)

    def sample() -> Sample:
        found = take_sample(job.inputs, job.settings.reading, engine.split, renderer.render if renderer else None)
        _check_trained(renderer)
        return found

    if job.engine == reference_name:
        found = sample()
        parity = ParityInfo(reference=reference_name, num_documents=0, num_bytes=0, num_awkward=0, num_mismatches=0)
        return GateResult(parity, _preview(job, engine, tokenizer, found.documents), found.unseen_keys)
    awkward = awkward_strings(list(tokenizer.special_tokens))
    reference = create(reference_name, tokenizer, special_tokens, threads=True)
    with ThreadPoolExecutor(1) as pool:
        # The reference works without the interpreter's lock, while documents are being read.
        differing_awkward = pool.submit(mismatches, engine, reference, awkward)
        found = sample()
        differing = [*differing_awkward.result(), *_differing_documents(engine, reference, found.documents)]
    parity = ParityInfo(
        reference=reference_name,
        num_documents=len(found.documents),
        num_in_parts=found.num_in_parts,
        num_bytes=sum(len(text.encode()) for document in found.documents for text in document.texts),
        num_awkward=len(awkward),
        num_mismatches=len(differing),
        example=differing[0][:200] if differing else None,
    )
    return GateResult(parity, _preview(job, engine, tokenizer, found.documents), found.unseen_keys)


def mismatches(engine: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """The texts whose ids differ between two engines."""
    differing: list[str] = []
    for some in _batches(texts):
        # As workers have them: what is proven is the very way that documents take.
        ours, theirs = engine.encode(PackedTexts.of(some) if engine.takes_packed else some), reference.encode(some)
        if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
            continue
        for i, text in enumerate(some):
            a, b = ours.offsets[i : i + 2], theirs.offsets[i : i + 2]
            if not np.array_equal(ours.ids[a[0] : a[1]], theirs.ids[b[0] : b[1]]):
                differing.append(text)
    return differing


def _differing_documents(engine: Engine, reference: Engine, documents: list[Document]) -> list[str]:
    """Of each document whose ids differ, the text with the difference."""
    wrong = set(mismatches(engine, reference, [text for document in documents for text in document.texts]))
    differing = []
    for document in documents:
        text = next((text for text in document.texts if text in wrong), None) if wrong else None
        if text is None and document.is_whole and len(document.texts) > 1 and not _adds_up(engine, document.texts):
            text = document.texts[0]
        if text is not None:
            differing.append(text)
    return differing


def _adds_up(engine: Engine, pieces: list[str]) -> bool:
    """Whether an engine gives a text the ids that it gives the text's pieces, which are the reference's."""
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


def _preview(job: Job, engine: Engine, tokenizer: Tokenizer, documents: list[Document]) -> Preview | None:
    """A document decoded again with its special tokens, and its ids; short enough for two lines."""
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
    return Preview(_shown(decoder, head) + middle + _shown(decoder, tail), ids, len(tokens))


def _shown(decoder: Decoder, tokens: list[int]) -> str:
    text = b"".join(decoder.token_bytes(token) for token in tokens).decode("utf-8", "replace")
    return show_safely(text)
