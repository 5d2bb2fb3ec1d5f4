"""Render conversations with chat templates, and find what is trained on as spans of the text.

A conversation is rendered once, with strings that know which message they come from (`_attributed.py`), and the turns
follow from that (`_turns.py`). Plain conversations of the same roles are rendered only the first time: what the
template did is recorded, and replayed for the others (`_recorder.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.supervision._attributed import Source, attribute
from tokenmill.supervision._recorder import MARKS, Recorder, Trace, Unrecordable, is_recordable, refuse_recorded
from tokenmill.supervision._selection import select_turns
from tokenmill.supervision._template import CompiledTemplate, TemplateRefused
from tokenmill.supervision._turns import REASONING_FIELDS, Rendering, Turn, TurnFinder
from tokenmill.supervision.options import Supervision
from tokenmill.text_batch import Refusal, shorten

__all__ = ["MARKS", "ChatTemplate", "read_plain"]

MOST_TRACES = 8
"""The traces of one sequence of roles. A template with more branches is rendered each time."""
HEADERS = ("role", "name", "tool_call_id")
"""Fields that say who speaks; they are never what a model has to write."""

FIELDS = dict.fromkeys(REASONING_FIELDS, "reasoning")

Message = dict[str, Any]


class ChatTemplate:
    """A chat template, and what is trained on of the conversations that it renders.

    `constants` are the values of names such as `bos_token`; `tokens` are the strings that are one token each.
    """

    def __init__(
        self, source: str, constants: dict[str, Any], tokens: Iterable[str], options: Supervision | None = None
    ) -> None:
        if MARKS.search(source):
            raise UsageError(
                "the chat template has characters from U+E000 to U+E004, which tokenmill needs; remove them"
            )
        self._options = options or Supervision()
        self._template = CompiledTemplate(source, constants, self._options.template_date)
        self._is_recordable = is_recordable(self._template.source_tree)
        self._finder = TurnFinder(
            lambda messages, prompt: Rendering(self._template.render(messages, prompt)),
            tokens,
            has_constant_tail=self._template.has_constant_tail,
            asks_after_loop_only=self._template.asks_after_loop_only,
            has_tags=self._template.has_tags,
        )
        self._traces: dict[tuple[str, ...], list[Trace] | None] = {}

    def apply(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Turn]] | Refusal:
        """Return the text of a conversation and the trained turns in it, or why there is none."""
        try:
            plain = read_plain(messages) if self._is_recordable and tools is None else None
            replayed = self._replay(*plain) if plain is not None else None
            return replayed or self.render(messages, tools)
        except TemplateRefused as refused:
            return Refusal("chat-template", shorten(str(refused)))

    def render(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Turn]]:
        """Return the same without a recording."""
        attributed = [_attribute_message(message, number) for number, message in enumerate(messages)]

        def render(some: list[Message], prompt: bool) -> Rendering:
            return Rendering(self._template.render(some, prompt, tools))

        wanted = self._wanted(messages)
        whole, turns = self._finder.find(render, attributed, wanted)
        found = {turn.message: turn for turn in turns}
        for number in wanted:
            _check_written(whole, messages[number], number, found.get(number))
        return whole.text, select_turns(whole, messages, turns, self._options)

    def render_text(self, messages: list[Message], tools: Any = None, *, prompt: bool) -> str | Refusal:
        """Return only the text of messages, by choice with the generation prompt, or why there is none."""
        named = [_name_reasoning(message) for message in messages]
        try:
            return Rendering(self._template.render(named, prompt, tools)).text
        except TemplateRefused as refused:
            return Refusal("chat-template", shorten(str(refused)))

    def _wanted(self, messages: list[Message]) -> list[int]:
        return [number for number, message in enumerate(messages) if message["role"] in self._options.train_roles]

    def _replay(self, roles: tuple[str, ...], contents: list[str]) -> tuple[str, list[Turn]] | None:
        """Return the same from a trace, or None if the operations of the template cannot be recorded."""
        traces = self._traces.setdefault(roles, [])
        if traces is None:
            return None
        for known in traces:
            if known.fits(contents):
                return known.replay(contents)
        if len(traces) == MOST_TRACES:
            return None
        try:
            self._template.refuses_json = refuse_recorded
            trace = self._record(roles, contents)
        except Unrecordable:
            self._traces[roles] = None
            return None
        finally:
            self._template.refuses_json = None
        if trace is not None:
            traces.append(trace)
        return trace.replay(contents) if trace is not None else None

    def _record(self, roles: tuple[str, ...], contents: list[str]) -> Trace | None:
        """Record what the template does; return None if it does not write a content that is to be trained on."""
        recorder = Recorder()
        messages: list[Message] = [
            {"role": role, "content": recorder.record(content, number)}
            for number, (role, content) in enumerate(zip(roles, contents, strict=True))
        ]

        def render(some: list[Message], prompt: bool) -> Rendering:
            text = self._template.render(some, prompt)
            return Rendering(text, recorder.find_marks(text))

        wanted = self._wanted(messages)
        whole, turns = self._finder.find(render, messages, wanted)
        written = {part.what.message for part in whole.sources if isinstance(part.what, Source)}
        if not written.issuperset(wanted):
            return None
        return Trace(recorder, whole.text, select_turns(whole, messages, turns, self._options))


def _attribute_message(message: Message, number: int) -> Message:
    """Copy a message with its strings attributed to it, and its reasoning under all names that templates use."""
    return {
        key: value if key in HEADERS else attribute(value, Source(number, FIELDS.get(key, key)))
        for key, value in _name_reasoning(message).items()
    }


def _name_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under all names that templates use; Transformers fills them in, too."""
    reasoning = next((message[field] for field in REASONING_FIELDS if message.get(field) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_written(whole: Rendering, message: Message, number: int, turn: Turn | None) -> None:
    """Refuse a message whose text or calls the template has dropped: its turn would be trained on without them."""
    segment = whole.segment(number) or (0, 0)
    fields = {part.what.field for part in whole.own(number, *segment) if isinstance(part.what, Source)}
    text = whole.text[slice(*segment)]
    lost = [
        key
        for key, strings in ((key, _strings(message.get(key))) for key in ("content", "tool_calls"))
        if strings and key not in fields and not any(string in text for string in strings)
    ]
    if "tool_calls" in lost or (lost and not fields) or (lost and turn is None):
        raise TemplateRefused(
            f"the chat template writes nothing of the {' and '.join(lost)} of message {number + 1}, so the model would "
            "learn to say nothing there; use a template that knows them"
        )


def _strings(value: Any) -> list[str]:
    """Collect the strings in a value that are not blank."""
    if isinstance(value, str):
        return [value.strip()] if value.strip() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [string for one in inner for string in _strings(one)]


def read_plain(messages: list[Message]) -> tuple[tuple[str, ...], list[str]] | None:
    """Return the roles and contents of messages, or None if a message has other fields or types."""
    roles: list[str] = []
    contents: list[str] = []
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        roles.append(role)
        contents.append(content)
    return tuple(roles), contents
