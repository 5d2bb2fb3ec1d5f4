"""Render conversations with chat templates, and find what is trained on as spans of the text.

A conversation is rendered once, with strings that know which message they come from (`_attributed.py`), and the turns
follow from that (`_turns.py`). Plain conversations of the same roles are rendered only the first time: what the
template did is recorded, and replayed for the others (`_recorder.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.supervision._attributed import Source, Unrecordable, attribute
from tokenmill.supervision._conversation import (
    FIELDS,
    HEADERS,
    Conversation,
    LeafRules,
    name_reasoning,
    read_conversation,
    rebuild,
)
from tokenmill.supervision._recorder import MARKS, LooksInside, Recorder, Trace, is_recordable
from tokenmill.supervision._selection import select_turns
from tokenmill.supervision._template import CompiledTemplate, TemplateRefused
from tokenmill.supervision._traces import Traces
from tokenmill.supervision._turns import BLANK, Rendering, Turn, TurnFinder
from tokenmill.supervision.options import Supervision
from tokenmill.text_batch import Refusal, shorten

__all__ = ["MARKS", "ChatTemplate"]

Message = dict[str, Any]
WRITTEN = ("content", "tool_calls", *FIELDS.values())
"""Fields that the model has to write."""


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
        self._traces, self._layout = Traces(), LeafRules()

    @cached_property
    def needs_content(self) -> bool:
        """Whether the template can write calls of tools only if they have a content, at least an empty one."""
        call = {"type": "function", "id": "call00000", "function": {"name": BLANK, "arguments": {BLANK: BLANK}}}
        messages: list[Message] = [{"role": "user", "content": BLANK}, {"role": "assistant", "tool_calls": [call]}]
        if not isinstance(self.render_text(messages, prompt=False), Refusal):
            return False
        return not isinstance(self.render_text([messages[0], {**messages[1], "content": ""}], prompt=False), Refusal)

    def read(self, messages: list[Message], tools: Any = None) -> Conversation | None:
        """Return the shape and the leaves of a conversation that may be replayed."""
        return read_conversation(messages, tools, self._layout) if self._is_recordable else None

    def apply(
        self, messages: list[Message], tools: Any = None, read: Conversation | None = None
    ) -> tuple[str, list[Turn]] | Refusal:
        """Return the text of a conversation and the trained turns in it, or why there is none.

        `read` is what the method of that name returned for it, if that is known.
        """
        try:
            read = read or self.read(messages, tools)
            replayed = self._replay(read, messages, tools) if read is not None else None
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
        self._check_trained(whole, wanted, found)
        return whole.text, select_turns(whole, messages, turns, self._options)

    def render_text(self, messages: list[Message], tools: Any = None, *, prompt: bool) -> str | Refusal:
        """Return only the text of messages, by choice with the generation prompt, or why there is none."""
        named = [name_reasoning(message) for message in messages]
        try:
            return Rendering(self._template.render(named, prompt, tools)).text
        except TemplateRefused as refused:
            return Refusal("chat-template", shorten(str(refused)))

    def _wanted(self, messages: list[Message]) -> list[int]:
        return [number for number, message in enumerate(messages) if message["role"] in self._options.train_roles]

    def _replay(self, read: Conversation, messages: list[Message], tools: Any) -> tuple[str, list[Turn]] | None:
        """Return the same from a trace, or None if the operations of the template cannot be recorded."""
        shape, leaves, _ = read
        trace = self._traces.find(shape, leaves)
        if trace is None and self._traces.wants(shape):
            trace = self._try_to_record(messages, tools)
            self._traces.add(shape, trace)
        return trace.replay(leaves) if trace is not None else None

    def _try_to_record(self, messages: list[Message], tools: Any) -> Trace | None:
        recorder = Recorder()
        self._template.record(recorder.to_json)
        try:
            return self._record(recorder, messages, tools)
        except LooksInside as looked:
            # From here on, these objects belong to the shape.
            field = "has_whole_tools" if looked.is_tool else "has_whole_arguments"
            self._layout = self._layout._replace(**{field: False})
            return None
        except (Unrecordable, TemplateRefused):
            return None
        finally:
            self._template.record(None)

    def _record(self, recorder: Recorder, messages: list[Message], tools: Any) -> Trace | None:
        """Record what the template does; return None if it does not write a leaf that is to be trained on."""
        recorded, tools = rebuild(messages, tools, self._layout, recorder.make_leaf)

        def render(some: list[Message], prompt: bool) -> Rendering:
            return Rendering(self._template.render(some, prompt, tools))

        wanted = self._wanted(messages)
        whole, turns = self._finder.find(render, recorded, wanted)
        found = {turn.message: turn for turn in turns}
        for number in wanted:
            _check_written(whole, messages[number], number, found.get(number), only_own=True)
        self._check_trained(whole, wanted, found)
        return Trace(recorder, whole.text, select_turns(whole, messages, turns, self._options))

    def _check_trained(self, whole: Rendering, wanted: list[int], found: dict[int, Turn]) -> None:
        """Refuse a conversation in which the turn of a message has nothing of a field that the template writes."""
        for number in wanted if not self._template.has_tags else ():
            own = [part for part in whole.own(number, *(whole.segment(number) or (0, 0))) if part.what.field in WRITTEN]
            spans = found[number].spans if number in found else ()
            trained = {p.what.field for p in own if any(start < p.stop and p.start < stop for start, stop in spans)}
            for part in own:
                if part.what.field not in trained and not whole.text[part.start : part.stop].isspace():
                    raise TemplateRefused(
                        f"the turn of message {number + 1} would leave out its {part.what.field}, because the chat "
                        "template writes it in another place than other templates do; use another template"
                    )


def _attribute_message(message: Message, number: int) -> Message:
    """Copy a message with its strings attributed to it, and its reasoning under all names that templates use."""
    return {
        key: value if key in HEADERS else attribute(value, Source(number, FIELDS.get(key, key)))
        for key, value in name_reasoning(message).items()
    }


def _check_written(
    whole: Rendering, message: Message, number: int, turn: Turn | None, *, only_own: bool = False
) -> None:
    """Refuse a message whose text or calls the template has dropped: its turn would be trained on without them.

    A text that is there without a source counts as written, unless `only_own`, which judges alike all calls of tools.
    """
    segment = whole.segment(number) or (0, 0)
    fields = {part.what.field for part in whole.own(number, *segment) if isinstance(part.what, Source)}
    text = whole.text[slice(*segment)]
    lost = []
    for key in ("content", "tool_calls"):
        strings = _strings(message.get(key))
        is_there = key in fields or (not only_own and any(string in text for string in strings))
        if not is_there and (strings or (only_own and key == "tool_calls" and message.get(key))):
            lost.append(key)
    if lost and turn is None and whole.own(number, 0, len(whole.text)):
        raise TemplateRefused(
            f"the chat template writes message {number + 1} outside of a loop over the messages, so the bounds of its "
            "turn are not known; use another template"
        )
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
