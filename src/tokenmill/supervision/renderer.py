"""Render records to texts: prompts with responses, and conversations through a chat template.

A bad record becomes a reject with its line, like a bad line of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np

from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import UsageError
from tokenmill.supervision.chat import MARKS, ChatTemplate
from tokenmill.supervision.options import Supervision
from tokenmill.supervision.record_messages import clean_messages, collect_strings, read_tools
from tokenmill.text_batch import Refusal, Reject, TextBatch, Trained, shorten

__all__ = ["Renderer", "has_specials"]

FIELD = re.compile(r"\{(prompt|response)\}")
Example = tuple[str, Trained]
Spans = list[tuple[int, int, float]]
"""Start and stop in the text, and the loss weight."""


def has_specials(supervision: Supervision, tokenizer: Tokenizer) -> bool:
    """Whether the templates write special tokens, so that their strings must be parsed as tokens."""
    written = f"{supervision.chat_template or ''}{supervision.template}"
    names = ("bos_token", "eos_token") if supervision.chat_template else ()
    return any(special in written for special in tokenizer.special_tokens) or any(name in written for name in names)


class Renderer:
    """Renders the records of a batch. `check_specials` rejects records whose own strings contain special tokens."""

    def __init__(
        self, supervision: Supervision, tokenizer: Tokenizer, *, check_specials: bool, max_bytes: int = 1 << 62
    ) -> None:
        self._options, self._max_bytes = supervision, max_bytes
        # The value of each of the fields; -1 is the None that is put after a record, for a field that is not read.
        self._pick = itemgetter(*(supervision.keys.index(key) if key else -1 for key in supervision.fields))
        known = "|".join(map(re.escape, tokenizer.special_tokens))
        self._specials = re.compile(known if known and check_specials else "(?!)")
        self._pieces = split_template(supervision.template)
        self.num_characters = self.num_trained = self.num_untrained = 0
        self.num_turns = self.num_stops = 0
        """The trained turns, and how many of them end with something that stops the model."""
        self.num_records = self.num_dropped = 0
        """The records, and those of which the chat template refuses or leaves out something."""
        self.dropped: str | None = None
        """What the template does with the first of them."""
        self.example: Example | None = None
        """The first example that was rendered."""
        self._chat: ChatTemplate | None = None
        if supervision.chat_template is not None:
            constants = {**_constants(tokenizer), **supervision.template_values}
            self._chat = ChatTemplate(supervision.chat_template, constants, tokenizer.added_tokens, supervision)

    def render(self, batch: TextBatch) -> TextBatch:
        """Replace the records of a batch by texts and their trained spans."""
        if batch.records is None:
            return batch
        examples = [self._render(record) for record in batch.records]
        good = np.array([not isinstance(example, Refusal) for example in examples], bool)
        self.num_records += len(examples)
        lines = batch.lines if batch.lines is not None else np.full(len(examples), -1)
        for number in np.flatnonzero(~good).tolist():
            refusal = examples[number]
            batch.rejects.append(Reject(int(batch.positions[number]), int(lines[number]), *refusal))
            if refusal[0] == "chat-template":
                self.num_dropped += 1
                self.dropped = self.dropped or str(refusal[1])
        batch.texts = [example[0] for example in examples]
        batch.trained = [example[1] for example in examples]  # type: ignore[misc]
        batch.records = batch.lines = None
        if not good.all():
            batch.keep(good)
        return batch

    def _render(self, record: tuple[Any, ...]) -> Example | Refusal:
        messages, tools, prompt, response, value, _, _ = self._pick((*record, None))
        given = _read_weight(value, self._options.weight_key)
        if isinstance(given, Refusal):
            return given
        if messages is not None:
            example = self._render_messages(messages, tools, *given)
        elif self._options.prompt_key is not None:
            example = self._render_pair(prompt, response, *given)
        else:
            return Refusal("missing-field", f"no field {self._options.messages_key!r}, or it is null")
        if isinstance(example, Refusal):
            return example
        text, trained = example
        self.num_characters += len(text)
        self.num_trained += sum(stop - start for start, stop, _ in trained.spans)
        if not trained.spans:
            self.num_untrained += 1
            return Refusal("untrained", "no token of it would be trained on: it has no response, or no assistant turn")
        if len(text) * 4 > self._max_bytes and len(text.encode()) > self._max_bytes:
            return Refusal("too-long", f"its text has more bytes than --max-document-bytes {self._max_bytes:,}")
        self.example = self.example or example
        return example

    def _render_pair(self, prompt: Any, response: Any, weight: float, spans: Spans | None) -> Example | Refusal:
        values = {"prompt": prompt, "response": response}
        for key, value in ((self._options.prompt_key, prompt), (self._options.response_key, response)):
            if value is None:
                return Refusal("missing-field", f"field {key!r} is missing or null")
            if type(value) is not str:
                return Refusal("not-a-string", f"field {key!r} is not a string")
        if refusal := self._refuse_strings(values.values()):
            return refusal
        text = ""
        trained: Spans = []
        for number, piece in enumerate(self._pieces):
            value = values[piece] if number % 2 else piece
            if number % 2 and piece == "response":
                trained = _response_spans(len(text), len(value), weight, spans)
            text += value
        return text, Trained(trained, True)

    def _render_messages(self, messages: Any, tools: Any, weight: float, spans: Spans | None) -> Example | Refusal:
        assert self._chat is not None
        if spans is not None:
            return Refusal("bad-weight", "spans of characters are for responses; give messages one number, or one each")
        key = self._options.weight_key
        weights = _take_weights(messages, key.rpartition(".")[2]) if key else None
        if isinstance(weights, Refusal):
            return weights
        cleaned, tools = clean_messages(messages, fills_content=self._chat.needs_content), read_tools(tools)
        if isinstance(cleaned, Refusal):
            return cleaned
        if isinstance(tools, Refusal):
            return tools
        read = self._chat.read(cleaned, tools)
        if refusal := self._refuse_strings(read.strings if read else collect_strings([cleaned, tools])):
            return refusal
        if self._options.mask_reasoning and (refusal := _refuse_inline_reasoning(cleaned)):
            return refusal
        rendered = self._chat.apply(cleaned, tools, read)
        if isinstance(rendered, Refusal):
            return rendered
        text, turns = rendered
        trained: Spans = []
        for turn in turns:
            own = weight * (weights[turn.message] if weights else 1.0)
            if own > 0:
                trained += [(start, stop, own) for start, stop in turn.spans]
                self.num_turns += 1
                self.num_stops += turn.has_stop
        return text, Trained(trained, self._options.ends_messages)

    def _refuse_strings(self, strings: Iterable[str]) -> Refusal | None:
        """Refuse strings that contain special tokens or the private characters that the renderer uses as marks."""
        joined = "\0".join(strings)
        if not joined.isascii() and (mark := MARKS.search(joined)):
            return Refusal("private-character", f"it has the private character U+{ord(mark.group()):04X}")
        if found := self._specials.search(joined):
            detail = f"its own text has the special token {found.group()!r}; allow it with --special-tokens parse"
            return Refusal("special-token", shorten(detail))
        return None


def split_template(template: str) -> list[str]:
    """Split a template into constants, with the names of fields between them."""
    pieces = FIELD.split(template)
    if pieces[1::2].count("response") != 1 or "prompt" not in pieces:
        raise UsageError(f"--template {template!r} must have {{prompt}}, and {{response}} exactly once")
    return pieces


def _refuse_inline_reasoning(messages: list[dict[str, Any]]) -> Refusal | None:
    """Refuse a content with reasoning in it, which --mask-reasoning could not tell from the answer."""
    for number, message in enumerate(messages, 1):
        if any("</think>" in string for string in collect_strings([message.get("content")])):
            detail = (
                f"message {number} has </think> in its content; --mask-reasoning needs reasoning in a field of its own"
            )
            return Refusal("inline-reasoning", shorten(detail))
    return None


def _take_weights(messages: Any, key: str) -> list[float] | Refusal:
    """Remove and return the weight of each message, as in OpenAI's fine-tuning format; the default is 1."""
    weights: list[float] = []
    for message in messages if isinstance(messages, list) else []:
        given = _read_weight(message.pop(key, None) if isinstance(message, dict) else None, key)
        if isinstance(given, Refusal):
            return given
        weights.append(given[0])
    return weights


def _read_weight(value: Any, key: str | None) -> tuple[float, Spans | None] | Refusal:
    """Read one weight for the record, or a weight for each of several spans of the response; the default is 1."""
    if value is None:
        return 1.0, None
    if _is_weight(value):
        return float(value), None
    try:
        spans = [(int(start), int(stop), float(weight)) for start, stop, weight in value]
        if all(0 <= start <= stop and _is_weight(weight) for start, stop, weight in spans):
            return 1.0, sorted(spans)
    except (TypeError, ValueError):
        pass
    expected = "expected a number from 0 to 65,504, or [start, stop, number]s"
    return Refusal("bad-weight", shorten(f"field {key!r} is {value!r}; {expected}"))


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 65_504


def _response_spans(start: int, length: int, weight: float, spans: Spans | None) -> Spans:
    """Return the trained spans of a response. Spans are clipped to it, and characters between them have weight 1."""
    if spans is None:
        return [(start, start + length, weight)] if weight > 0 and length else []
    found: Spans = []
    done = 0
    for first, stop, own in [*spans, (length, length, 0.0)]:
        first, stop = max(done, min(first, length)), min(stop, length)
        if first > done:
            found.append((start + done, start + first, 1.0))
        if stop > first and own > 0:
            found.append((start + first, start + stop, own))
        done = max(done, stop)
    return found


def _constants(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the strings of special tokens that templates refer to by name."""
    strings = {token: string for string, token in tokenizer.special_tokens.items()}
    known = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: strings[token] for name, token in known.items() if token in strings} | tokenizer.named_tokens
