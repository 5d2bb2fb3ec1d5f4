"""Prompts alone, for reinforcement learning: what a model is to continue, so nothing in them is trained on.

A text is a prompt as it is. Messages are rendered with the generation prompt, so that the answer of the assistant comes
next.
"""

from __future__ import annotations

from typing import Any

from tokenmill.supervision.preferences import NO_TEMPLATE
from tokenmill.supervision.record_messages import clean_messages, collect_strings, read_tools
from tokenmill.supervision.renderer import Example, Renderer
from tokenmill.text_batch import Refusal, Trained

__all__ = ["PromptRenderer"]


class PromptRenderer(Renderer):
    """Renders records with a prompt, a text or messages."""

    def _render(self, record: tuple[Any, ...]) -> Example | Refusal:
        messages, tools, prompt, *_ = self._pick((*record, None))
        key = self._options.messages_key or self._options.prompt_key
        value = prompt if self._options.messages_key is None else messages
        if value is None:
            return Refusal("missing-field", f"field {key!r} is missing or null")
        if not isinstance(value, (str, list)) or (isinstance(value, str) and self._options.messages_key is not None):
            expected = "a list of messages" if self._options.messages_key is not None else "a string or messages"
            return Refusal("not-a-string", f"field {key!r} is {type(value).__name__}; expected {expected}")
        text = self._render_conversation(value, tools) if isinstance(value, list) else self._refuse_strings([value])
        if isinstance(text, Refusal):
            return text
        text = text if text is not None else str(value)
        if not text:
            return Refusal("empty-prompt", f"field {key!r} is empty")
        if len(text) * 4 > self._max_bytes and len(text.encode()) > self._max_bytes:
            return Refusal("too-long", f"its text has more bytes than --max-document-bytes {self._max_bytes:,}")
        return text, Trained([], False)

    def _render_conversation(self, messages: Any, tools: Any) -> str | Refusal:
        if self._chat is None:
            return NO_TEMPLATE
        cleaned, known = clean_messages(messages, fills_content=self._chat.needs_content), read_tools(tools)
        if isinstance(cleaned, Refusal):
            return cleaned
        if isinstance(known, Refusal):
            return known
        if refusal := self._refuse_strings(collect_strings([cleaned, known])):
            return refusal
        if cleaned[-1]["role"] == "assistant":
            detail = (
                "the last message is the assistant's answer; store prompts only, or train on it with --messages-key"
            )
            return Refusal("has-answer", detail)
        return self._chat.render_text(cleaned, known, prompt=True)
