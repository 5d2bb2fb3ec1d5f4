"""Render conversations with chat templates, and find the assistant's turns as spans of the text.

Turns are never found by searching the text for contents. If the template has `{% generation %}` tags, they mark the
turns. Otherwise a turn is the difference between two renderings: the messages before it with the generation prompt, and
the messages up to it. Both must be prefixes of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.supervision._recorder import OPEN, Recorded, Recorder, Trace, Turn, Unrecordable
from tokenmill.text_batch import Refusal, shorten

__all__ = ["MARKS", "ChatTemplate", "read_plain"]

BEGIN, END, BLANK = "\ue002", "\ue003", "\ue004"
"""The begin and the end of `{% generation %}` in rendered text, and a placeholder for a content."""
MARKS = re.compile(f"[{OPEN}-{BLANK}]")
MOST_TRACES = 8
"""The traces of one sequence of roles. A template with more branches is rendered each time."""
FILTERS = {"trim", "length", "count", "default", "d", "string", "tojson"}
TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number"}
METHODS = {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "items", "get", "keys", "values"}
GLOBALS = {"namespace", "raise_exception", "range"}

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
"""Renders messages, with or without the generation prompt."""


class _TemplateRefused(Exception):
    """The template rejects this conversation, or its rendering does not show the turns."""


class ChatTemplate:
    """A Jinja template in a sandbox. `constants` are the values of names such as `bos_token`.

    `specials` are the strings of special tokens. They are compared as single units.
    """

    def __init__(self, source: str, constants: dict[str, str], specials: Iterable[str]) -> None:
        self._constants = constants
        self._template, self._is_recordable, self._has_tags = _compile(source)
        known = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        self._specials = re.compile(f"({known or '(?!)'})")
        self._ends = tuple(specials)
        self._traces: dict[tuple[str, ...], list[Trace] | None] = {}

    def apply(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Turn]] | Refusal:
        """Return the text of a conversation and the assistant's turns in it, or why there is none."""
        try:
            plain = read_plain(messages) if self._is_recordable and tools is None else None
            replayed = self._replay(*plain) if plain is not None else None
            text, turns = replayed or self._render_anew(messages, tools)
        except _TemplateRefused as refused:
            return Refusal("chat-template", shorten(str(refused)))
        return text, turns if self._has_tags else [self._trim(text, turn) for turn in turns]

    def _trim(self, text: str, turn: Turn) -> Turn:
        """Return the turn without the white space that the template writes after its end-of-turn token."""
        if not text[turn.stop - 1 : turn.stop].isspace():
            return turn
        said = text[turn.start : turn.stop].rstrip()
        return turn._replace(stop=turn.start + len(said)) if self._ends and said.endswith(self._ends) else turn

    def _replay(self, roles: tuple[str, ...], contents: list[str]) -> tuple[str, list[Turn]] | None:
        """Return the same from a trace, or None if the operations of the template cannot be recorded."""
        traces = self._traces.setdefault(roles, [])
        if traces is None:
            return None
        for trace in traces:
            if trace.fits(contents):
                return trace.replay(contents)
        if len(traces) == MOST_TRACES:
            return None
        try:
            traces.append(self._record(roles, contents))
        except Unrecordable:
            self._traces[roles] = None
            return None
        return traces[-1].replay(contents)

    def _record(self, roles: tuple[str, ...], contents: list[str]) -> Trace:
        recorder = Recorder()
        marked = [
            {"role": role, "content": recorder.record(content, number)}
            for number, (role, content) in enumerate(zip(roles, contents, strict=True))
        ]
        text, turns = self._find_turns(self._render, marked)
        return Trace(recorder, text, turns)

    def _render_anew(self, messages: list[Message], tools: Any) -> tuple[str, list[Turn]]:
        return self._find_turns(lambda some, prompt: self._render(some, prompt, tools), messages)

    def _render(self, messages: list[Message], prompt: bool, tools: Any = None) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._constants
            )
            return text
        except (_TemplateRefused, Unrecordable, UsageError):
            raise
        except Exception as error:
            # Any error of a template rejects the record that it renders.
            raise _TemplateRefused(f"the chat template cannot render it: {type(error).__name__}: {error}") from None

    def _find_turns(self, render: Render, messages: list[Message]) -> tuple[str, list[Turn]]:
        wanted = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        whole = render(messages, False)
        if self._has_tags:
            return _read_tags(whole, wanted)
        starts = [self._find_start(render, whole, messages, number) for number in wanted]
        stops = [self._find_stop(render, whole, messages, number) for number in wanted]
        return whole, list(map(Turn, wanted, starts, stops))

    def _find_start(self, render: Render, whole: str, messages: list[Message], number: int) -> int:
        """Return the end of the generation prompt, or the start of the content if the template has no prompt."""
        if self._prompts[0]:
            before = _attempt(render, messages[:number], True)
            if before is not None and whole.startswith(before):
                return len(before)
        blank = [*messages[:number], {**messages[number], "content": BLANK}, *messages[number + 1 :]]
        before, is_written, _ = render(blank, False).partition(BLANK)
        if is_written and whole.startswith(before):
            return len(before)
        raise _disagrees(number)

    def _find_stop(self, render: Render, whole: str, messages: list[Message], number: int) -> int:
        """Return the end of the turn, where the next one would begin."""
        up_to = messages[: number + 1]
        turn = self._without_prompt(whole if len(up_to) == len(messages) else _attempt(render, up_to, False))
        if turn is not None and whole.startswith(turn):
            return len(turn)
        return self._find_stop_in_history(render, whole, up_to)

    def _find_stop_in_history(self, render: Render, whole: str, up_to: list[Message]) -> int:
        """Find the end for templates that write the last turn in a different way: render it with another turn after it.

        Rendering that other turn twice shows what it adds to the text.
        """
        asking = {"role": "user", "content": BLANK}
        once = self._without_prompt(_attempt(render, [*up_to, asking], False))
        twice = self._without_prompt(_attempt(render, [*up_to, asking, asking], False))
        if once is not None and twice is not None and twice.startswith(once):
            turn = _without_end(once, twice[len(once) :])
            if turn is not None and whole.startswith(turn):
                return len(turn)
        raise _disagrees(len(up_to) - 1)

    def _without_prompt(self, text: str | None) -> str | None:
        """Remove the generation prompt of a template that always writes it."""
        prompt, is_always_there = self._prompts
        return _without_end(text, prompt) if text is not None and is_always_there else text

    @cached_property
    def _prompts(self) -> tuple[str, bool]:
        """The generation prompt, and whether the template always writes it."""
        asking, answering = {"role": "user", "content": BLANK}, {"role": "assistant", "content": BLANK}
        unasked, asked = (_attempt(self._render, [asking], prompt) for prompt in (False, True))
        if unasked is None or asked is None:
            return "", False
        if asked != unasked:
            return (asked[len(unasked) :], False) if asked.startswith(unasked) else ("", False)
        answered, alone = (_attempt(self._render, some, False) for some in ([asking, answering], [answering]))
        if answered is None or not answered.startswith(unasked + BLANK) or alone is None:
            return "", False
        # The prompt is the common end of what precedes an answer and of what ends the text.
        head, tail = alone.partition(BLANK)[0], answered[len(unasked) + 1 :]
        return self._common_end(head, tail), True

    def _common_end(self, one: str, other: str) -> str:
        """Return the longest common end that does not cut a special token."""
        pairs = zip(reversed(self._units(one)), reversed(self._units(other)), strict=False)
        common = [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return "".join(reversed(common))

    def _units(self, text: str) -> list[str]:
        """Split a text into special tokens and single characters."""
        parts = enumerate(self._specials.split(text))
        return [unit for number, part in parts for unit in ([part] if number % 2 else part)]


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


def _without_end(text: str, end: str) -> str | None:
    return text[: len(text) - len(end)] if text.endswith(end) else None


def _attempt(render: Render, messages: list[Message], prompt: bool) -> str | None:
    """Render a part of a conversation; return None if the template rejects it."""
    try:
        return render(messages, prompt)
    except _TemplateRefused:
        return None


def _disagrees(number: int) -> _TemplateRefused:
    return _TemplateRefused(
        f"the chat template writes message {number + 1} in another way once others follow, so its tokens cannot be "
        "found; put {% generation %} tags into a copy of the template and pass it with --chat-template"
    )


def _read_tags(text: str, wanted: list[int]) -> tuple[str, list[Turn]]:
    """Remove the marks of `{% generation %}` tags; return the text and the spans between them."""
    parts = re.split(f"([{BEGIN}{END}])", text)
    constants, tags = parts[::2], parts[1::2]
    if tags != [BEGIN, END] * (len(tags) // 2):
        raise _TemplateRefused("the chat template has {% generation %} tags inside each other")
    edges = list(accumulate(map(len, constants)))
    # Either each tag belongs to one turn of the assistant, or all of them belong to the last turn.
    numbers = wanted if 2 * len(wanted) == len(tags) else [wanted[-1] if wanted else 0] * (len(tags) // 2)
    return "".join(constants), list(map(Turn, numbers, edges[:-1:2], edges[1:-1:2]))


def _compile(source: str) -> tuple[Any, bool, bool]:
    """Return the template, whether it can be recorded, and whether it has `{% generation %}` tags."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols

    from tokenmill.supervision._limits import LimitedEnvironment

    found: list[bool] = []

    class Generation(Extension):
        """`{% generation %}` marks text of the assistant."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            found.append(True)
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                [jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)] for mark in (BEGIN, END)
            )
            return [*begin, *body, *end]

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], keep_trailing_newline=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    if MARKS.search(source):
        raise UsageError("the chat template has characters from U+E000 to U+E004, which tokenmill needs; remove them")
    try:
        tree = environment.parse(source)
        return environment.from_string(source), _is_recordable(tree), bool(found)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template is not valid: {error}; pass another with --chat-template FILE") from None


def _is_recordable(tree: Any) -> bool:
    """Whether a recorder can follow contents through all operations of a template."""
    from jinja2 import nodes

    def calls_known(call: Any) -> bool:
        called = call.node
        return called.attr in METHODS if isinstance(called, nodes.Getattr) else getattr(called, "name", "") in GLOBALS

    opaque = (nodes.Concat, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)
    return (
        tree.find(opaque) is None
        and all(node.name in FILTERS for node in tree.find_all(nodes.Filter))
        and all(node.name in TESTS for node in tree.find_all(nodes.Test))
        and all(isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod))
        and all(map(calls_known, tree.find_all(nodes.Call)))
    )


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Encode a value as Transformers does: not escaped for HTML, and not sorted."""

    def refuse(item: Any) -> Any:
        if isinstance(item, Recorded):
            raise Unrecordable("tojson")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        for one in inner:
            refuse(one)

    refuse(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise _TemplateRefused(f"the chat template refuses it: {message}")
