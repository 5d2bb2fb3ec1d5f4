"""What the first screen shows of a run: one document as it will be written, and what of it is trained on.

A wrong EOS, a wrong template or a wrong role is seen there, or refused, before any work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenmill.engines import Engine, Tokenizer
from tokenmill.engines.decoder import Decoder
from tokenmill.errors import UsageError
from tokenmill.formatting import show_safely
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.task.runner import surround
from tokenmill.supervision.masks import assemble
from tokenmill.text_batch import TextBatch

if TYPE_CHECKING:
    from tokenmill.supervision.renderer import Renderer

__all__ = [
    "Preview",
    "TrainedPreview",
    "check_trained",
    "note_dropped",
    "preview_document",
    "preview_trained",
    "show_preview",
]

PREVIEW_HEAD, PREVIEW_TAIL = 9, 3
PREVIEW_COLUMNS = 55
"""The columns for ids on a line of 80 columns."""
LONGEST_SHOWN, LONGEST_HEAD = 1_000_000, 16_000
"""Of a document with more characters, the beginning is shown: the whole of it may take seconds and gigabytes."""


class Preview(msgspec.Struct, frozen=True):
    """The first and the last ids of one document as the run will write it."""

    head: list[int]
    tail: list[int]
    num_tokens: int
    """Of a document that is too long to be encoded here, the tokens of its head."""
    num_characters: int = 0
    """The length of a document that is too long."""


class TrainedPreview(msgspec.Struct, frozen=True):
    """The trained characters of one supervised document, and what stops the model."""

    text: str
    stop: str


def preview_document(job: Job, engine: Engine, batch: TextBatch) -> Preview:
    """Encode the first document of a batch as a task does, and keep as many ids as fit one line."""
    text, policy = batch.texts[0], job.settings.policy
    long = len(text) if len(text) > LONGEST_SHOWN else 0
    encoded = engine.encode([text[:LONGEST_HEAD] if long else text])
    if batch.trained is None:
        tokens, _ = surround(encoded, policy, dtype=np.int64, vocab_size=job.vocab_size)
    else:
        blank, ids = np.zeros(len(encoded.ids), np.float32), {"bos_id": policy.bos_id, "eos_id": policy.eos_id}
        tokens = assemble(encoded, blank, batch.trained[:1], **ids, dtype=np.int64).tokens
    for count in range(PREVIEW_HEAD, 0, -1):
        tail = [] if long else tokens[count:][-PREVIEW_TAIL:].tolist()
        preview = Preview(tokens[:count].tolist(), tail, len(tokens), long)
        if len(_show_ids(preview)) <= PREVIEW_COLUMNS:
            break
    return preview


def show_preview(preview: Preview, tokenizer: Tokenizer) -> tuple[str, str]:
    """Show a document as its decoded tokens and its ids, each short enough for one line."""
    decoder = Decoder(tokenizer)
    parts = (preview.head, preview.tail)
    texts = [b"".join(map(decoder.token_bytes, part)).decode("utf-8", "replace") for part in parts]
    return _middle_of(preview, "").join(map(show_safely, texts)), _show_ids(preview)


def _show_ids(preview: Preview) -> str:
    head, tail = (" ".join(map(str, part)) for part in (preview.head, preview.tail))
    return f"{head}{_middle_of(preview, ' ')}{tail}"


def _middle_of(preview: Preview, otherwise: str) -> str:
    return " ... " if preview.num_tokens > len(preview.head) + len(preview.tail) else otherwise


def preview_trained(renderer: Renderer, tokenizer: Tokenizer) -> TrainedPreview | None:
    """Show what is trained on of one document, and how often the sample teaches the model to stop."""
    if renderer.example is None:
        return None
    text, trained = renderer.example
    said = [show_safely(text[start:stop]) for start, stop, _ in trained.spans]
    shown = " ".join(f"║{_middle(one, PREVIEW_COLUMNS // len(said[-2:]))}║" for one in said[-2:])
    if renderer.num_turns == 0:
        ends = trained.ends and tokenizer.eos_id is not None
        return TrainedPreview(shown, "the end-of-text token" if ends else "nothing that stops the model is trained on")
    count = f"in {renderer.num_stops:,} of {renderer.num_turns:,} turns of the sample"
    return TrainedPreview(shown, f"what ends a turn is trained on {count}")


def note_dropped(renderer: Renderer) -> str | None:
    """Say how many records of the sample the chat template cannot render as they are, and why the first one."""
    if renderer.dropped is None:
        return None
    return f"{renderer.num_dropped:,} of {renderer.num_records:,} records of the sample are rejects: {renderer.dropped}"


def _middle(text: str, most: int) -> str:
    """Shorten a text in its middle."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]} ... {text[-(most // 2 - 3) :]}"


def check_trained(renderer: Renderer, settings: Settings, tokenizer: Tokenizer) -> None:
    """Raise if no token, every token, or nothing that stops the model would be trained on."""
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
    supervision = settings.supervision
    ends = supervision is None or supervision.allow_no_stop or supervision.ends_messages
    if renderer.num_turns and not renderer.num_stops and not ends:
        raise UsageError(
            f"no turn of {renderer.num_turns:,} in the sample is trained to stop: the template writes nothing that "
            "ends one, or leaves it untrained; add --eos to end every conversation with the end-of-text token, use "
            "another template, or allow it with --allow-no-stop"
        )
