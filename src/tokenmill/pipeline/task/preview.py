"""What the first screen shows of a run: one document as it will be written, and what of it is trained on.

A wrong EOS, a wrong template or a wrong role is seen there, or refused, before any work is done.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tokenmill.engines import Engine, Tokenizer
from tokenmill.engines.decoder import Decoder
from tokenmill.errors import UsageError
from tokenmill.formatting import show_safely
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.task.runner import surround
from tokenmill.supervision.renderer import Renderer

__all__ = ["Preview", "TrainedPreview", "check_trained", "preview_document", "preview_trained"]

PREVIEW_HEAD, PREVIEW_TAIL = 9, 3
PREVIEW_COLUMNS = 55
"""The columns for ids on a line of 80 columns."""


class Preview(msgspec.Struct, frozen=True):
    """The start and end of one document as the run will write it."""

    text: str
    ids: str
    num_tokens: int


class TrainedPreview(msgspec.Struct, frozen=True):
    """The trained characters of one supervised document, and what stops the model."""

    text: str
    stop: str


def preview_document(job: Job, engine: Engine, tokenizer: Tokenizer, texts: list[str]) -> Preview | None:
    """Show a document as its decoded tokens and its ids, each short enough for one line."""
    if not texts:
        return None
    tokens, _ = surround(
        engine.encode(["".join(texts)]), job.settings.policy, dtype=np.int64, vocab_size=job.vocab_size
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
