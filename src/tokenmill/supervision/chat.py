"""Chat templates: a conversation becomes a text, and the assistant's turns become spans of it.

Which characters are the assistant's is never searched for in the text. Where the template has
`{% generation %}` tags, they say it. Else a turn is what the template adds between two renderings: that of
the messages before it with the generation prompt, and that of the messages up to it; both must be the
start of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from tokenmill.errors import UsageError
from tokenmill.readers.diagnosis import Refusal, shorten
from tokenmill.supervision.recording import OPEN, Question, Recorder, Slot, Unrecordable, value_of
from tokenmill.supervision.ropes import Place, Rope

__all__ = ["ChatTemplate", "Turn", "read_plain"]

BEGIN, END, BLANK = "\ue002", "\ue003", "\ue004"
"""Begin and end of `{% generation %}` in rendered text, and a content that stands for any."""
MARKS = re.compile(f"[{OPEN}-{BLANK}]")
MOST_RECORDINGS = 8
"""Of one sequence of roles; a template that branches more often than that is rendered each time."""
FILTERS = {"trim", "length", "count", "default", "d", "string", "tojson"}
TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number"}
METHODS = {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "items", "get", "keys", "values"}
GLOBALS = {"namespace", "raise_exception", "range"}

Message = dict[str, Any]


class Turn(NamedTuple):
    """A turn of the assistant: the number of its message, and its characters in the text."""

    message: int
    start: int
    stop: int


class _Refused(Exception):
    """The template, or how it renders, does not allow this conversation."""


class _Recording(NamedTuple):
    questions: list[Question]
    text: Rope
    turns: list[tuple[int, Place, Place]]

    def fits(self, contents: list[str]) -> bool:
        """Whether a template would do the same with other contents, as far as it has looked at them."""
        for slot, ask, arguments, answer in self.questions:
            value = value_of(slot, contents) if slot.changes else contents[slot.number]
            if ask(value, *arguments) != answer:
                return False
        return True

    def repeat(self, contents: list[str]) -> tuple[str, list[Turn]]:
        text, starts = self.text.fill(contents)
        turns = [
            Turn(message, starts[begin.piece] + begin.offset, starts[end.piece] + end.offset)
            for message, begin, end in self.turns
        ]
        return text, turns


class ChatTemplate:
    """A Jinja template in a sandbox. `constants` are what templates call `bos_token` and the like.

    `specials` are the strings of special tokens, which are one thing each when texts are compared.
    """

    def __init__(self, source: str, constants: dict[str, str], specials: Iterable[str]) -> None:
        self._constants = constants
        self._template, self._is_recordable, self._has_tags = _compile(source)
        known = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        self._specials = re.compile(known or "(?!)")
        self._ends = tuple(specials)
        self._recordings: dict[tuple[str, ...], list[_Recording] | None] = {}

    def apply(self, messages: list[Message], tools: Any = None) -> tuple[str, list[Turn]] | Refusal:
        """The text of a conversation and the assistant's turns in it, or why there is none."""
        try:
            plain = read_plain(messages) if self._is_recordable and tools is None else None
            recorded = self._repeat(*plain) if plain is not None else None
            text, turns = recorded or self._render_anew(messages, tools)
        except _Refused as refused:
            return Refusal("chat-template", shorten(str(refused)))
        return text, turns if self._has_tags else [self._trim(text, turn) for turn in turns]

    def _trim(self, text: str, turn: Turn) -> Turn:
        """A turn without the white space that a template writes behind its end-of-turn token."""
        if not text[turn.stop - 1 : turn.stop].isspace():
            return turn
        said = text[turn.start : turn.stop].rstrip()
        return turn._replace(stop=turn.start + len(said)) if self._ends and said.endswith(self._ends) else turn

    def _repeat(self, roles: tuple[str, ...], contents: list[str]) -> tuple[str, list[Turn]] | None:
        """The same from a recording, None where what the template does cannot be followed."""
        recordings = self._recordings.setdefault(roles, [])
        if recordings is None:
            return None
        for recording in recordings:
            if recording.fits(contents):
                return recording.repeat(contents)
        if len(recordings) == MOST_RECORDINGS:
            return None
        try:
            recordings.append(self._record(roles, contents))
        except Unrecordable:
            self._recordings[roles] = None
            return None
        return recordings[-1].repeat(contents)

    def _record(self, roles: tuple[str, ...], contents: list[str]) -> _Recording:
        recorder = Recorder()
        marked = [
            {"role": role, "content": recorder.record(Slot(number), content)}
            for number, (role, content) in enumerate(zip(roles, contents, strict=True))
        ]
        render = _Renders(lambda some, prompt: Rope(recorder.pieces(self._render(some, prompt))))
        text, turns = self._find_turns(render, marked)
        return _Recording(list(dict.fromkeys(recorder.questions)), text, turns)

    def _render_anew(self, messages: list[Message], tools: Any) -> tuple[str, list[Turn]]:
        render = _Renders(lambda some, prompt: Rope([self._render(some, prompt, tools)]))
        text, turns = self._find_turns(render, messages)
        return _Recording([], text, turns).repeat([])

    def _render(self, messages: list[Message], prompt: bool, tools: Any = None) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._constants
            )
            return text
        except (_Refused, Unrecordable):
            raise
        except Exception as error:
            # Whatever a template does wrong with a record is the record's, and is said with it.
            raise _Refused(f"the chat template cannot render it: {type(error).__name__}: {error}") from None

    def _find_turns(self, render: _Renders, messages: list[Message]) -> tuple[Rope, list[tuple[int, Place, Place]]]:
        wanted = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        whole = render(messages, False)
        if self._has_tags:
            return _read_tags(whole, wanted)
        return whole, [
            (
                number,
                self._find_start(render, whole, messages, number),
                self._find_stop(render, whole, messages, number),
            )
            for number in wanted
        ]

    def _find_start(self, render: _Renders, whole: Rope, messages: list[Message], number: int) -> Place:
        """Behind the generation prompt; where the template has none, where the content begins."""
        if self._prompt:
            before = render.maybe(messages[:number], True)
            place = whole.find_end_of(before) if before is not None else None
            if place is not None:
                return place
        blank = [*messages[:number], {**messages[number], "content": BLANK}, *messages[number + 1 :]]
        other = render(blank, False)
        for index, piece in enumerate(other.pieces):
            if isinstance(piece, str) and BLANK in piece:
                place = whole.find_end_of(Rope([*other.pieces[:index], piece.partition(BLANK)[0]]))
                if place is not None:
                    return place
        raise _disagrees(number)

    def _find_stop(self, render: _Renders, whole: Rope, messages: list[Message], number: int) -> Place:
        """The end of the turn: where the next one would begin."""
        up_to = messages[: number + 1]
        turn = self._without_prompt(whole if len(up_to) == len(messages) else render.maybe(up_to, False))
        place = whole.find_end_of(turn) if turn is not None else None
        return place if place is not None else self._find_stop_in_history(render, whole, up_to)

    def _find_stop_in_history(self, render: _Renders, whole: Rope, up_to: list[Message]) -> Place:
        """For templates that write the last turn in another way: rendered with another turn behind it.

        What that turn adds is seen when it comes twice.
        """
        asking = {"role": "user", "content": BLANK}
        once = self._without_prompt(render.maybe([*up_to, asking], False))
        twice = self._without_prompt(render.maybe([*up_to, asking, asking], False))
        if once is not None and twice is not None and len(once.pieces) == len(twice.pieces):
            first, second = once.pieces[-1], twice.pieces[-1]
            if isinstance(first, str) and isinstance(second, str) and second.startswith(first):
                turn = once.without_end(second[len(first) :])
                place = whole.find_end_of(turn) if turn is not None else None
                if place is not None:
                    return place
        raise _disagrees(len(up_to) - 1)

    def _without_prompt(self, text: Rope | None) -> Rope | None:
        """Some templates end with the generation prompt whether it is asked for or not."""
        return text.without_end(self._prompt) if text is not None and self._always_prompts else text

    @cached_property
    def _prompts(self) -> tuple[str, bool]:
        """The generation prompt, and whether it comes unasked."""
        asking, answering = {"role": "user", "content": BLANK}, {"role": "assistant", "content": BLANK}
        render = _Renders(lambda some, prompt: Rope([self._render(some, prompt)]))
        unasked, asked = (_flat(render.maybe([asking], prompt)) for prompt in (False, True))
        if unasked is None or asked is None:
            return "", False
        if asked != unasked:
            return (asked[len(unasked) :], False) if asked.startswith(unasked) else ("", False)
        answered, alone = _flat(render.maybe([asking, answering], False)), _flat(render.maybe([answering], False))
        if answered is None or not answered.startswith(unasked + BLANK) or alone is None:
            return "", False
        # What comes before an answer also ends the text: as much of it as both have in common.
        head, tail = alone.partition(BLANK)[0], answered[len(unasked) + 1 :]
        return self._common_end(head, tail), True

    def _common_end(self, one: str, other: str) -> str:
        """The longest common end, in which special tokens are whole."""
        count = 0
        pairs = zip(reversed(self._units(one)), reversed(self._units(other)), strict=False)
        for ours, theirs in pairs:
            if ours != theirs:
                break
            count += len(ours)
        return one[len(one) - count :]

    def _units(self, text: str) -> list[str]:
        units: list[str] = []
        at = 0
        for match in self._specials.finditer(text):
            units += [*text[at : match.start()], match.group()]
            at = match.end()
        return [*units, *text[at:]]

    @property
    def _prompt(self) -> str:
        return self._prompts[0]

    @property
    def _always_prompts(self) -> bool:
        return self._prompts[1]


def read_plain(messages: list[Message]) -> tuple[tuple[str, ...], list[str]] | None:
    """Roles and contents of messages that have nothing else, None where some do."""
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


class _Renders:
    """Renders starts of a conversation, each once."""

    def __init__(self, render: Callable[[list[Message], bool], Rope]) -> None:
        self._render = render

    def __call__(self, messages: list[Message], prompt: bool) -> Rope:
        return self._render(messages, prompt)

    def maybe(self, messages: list[Message], prompt: bool) -> Rope | None:
        """None where the template refuses this part of the conversation."""
        try:
            return self._render(messages, prompt)
        except _Refused:
            return None


def _flat(text: Rope | None) -> str | None:
    return None if text is None else "".join(str(piece) for piece in text.pieces)


def _disagrees(number: int) -> _Refused:
    return _Refused(
        f"the chat template writes message {number + 1} in another way once others follow, so its tokens cannot be "
        "told; put {% generation %} tags into a copy of the template and pass it with --chat-template"
    )


def _read_tags(text: Rope, wanted: list[int]) -> tuple[Rope, list[tuple[int, Place, Place]]]:
    """The text without the marks of `{% generation %}` tags, and what was between them."""
    pieces: list[Any] = []
    edges: list[tuple[str, Place]] = []
    for piece in text.pieces:
        if isinstance(piece, Slot):
            pieces.append(piece)
            continue
        constant = ""
        for part in re.split(f"([{BEGIN}{END}])", piece):
            if part in (BEGIN, END):
                edges.append((part, Place(len(pieces), len(constant))))
            else:
                constant += part
        if constant:
            pieces.append(constant)
    kinds = "".join(kind for kind, _ in edges)
    if kinds != (BEGIN + END) * (len(edges) // 2):
        raise _Refused("the chat template has {% generation %} tags inside each other")
    begins, ends = [place for _, place in edges[::2]], [place for _, place in edges[1::2]]
    # Tags and turns of the assistant go together one by one, or all tags belong to the last turn.
    numbers = wanted if len(wanted) == len(begins) else [wanted[-1] if wanted else 0] * len(begins)
    return Rope(pieces), list(zip(numbers, begins, ends, strict=True))


def _compile(source: str) -> tuple[Any, bool, bool]:
    """The template, whether it can be recorded, and whether it has `{% generation %}` tags."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found: list[bool] = []

    class Generation(Extension):
        """`{% generation %}`: what is inside is the assistant's."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            found.append(True)
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                [jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)] for mark in (BEGIN, END)
            )
            return [*begin, *body, *end]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], keep_trailing_newline=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    if MARKS.search(source):
        raise UsageError("the chat template has characters from U+E000 to U+E004, which tokenmill needs for itself")
    try:
        tree = environment.parse(source)
        return environment.from_string(source), _is_recordable(tree), bool(found)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template is not valid: {error}; pass another with --chat-template FILE") from None


def _is_recordable(tree: Any) -> bool:
    """Whether no operation of a template could lose sight of a content."""
    from jinja2 import nodes

    if any(
        True for _ in tree.find_all((nodes.Concat, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock))
    ):
        return False
    if any(node.name not in FILTERS for node in tree.find_all(nodes.Filter)):
        return False
    if any(node.name not in TESTS for node in tree.find_all(nodes.Test)):
        return False
    if any(not isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod)):
        return False
    return all(
        node.node.attr in METHODS if isinstance(node.node, nodes.Getattr) else getattr(node.node, "name", "") in GLOBALS
        for node in tree.find_all(nodes.Call)
    )


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As Transformers renders it: not escaped for HTML, and not sorted."""
    from tokenmill.supervision.recording import Recorded

    def refuse(item: Any) -> Any:
        if isinstance(item, Recorded):
            raise Unrecordable("tojson")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        for one in inner:
            refuse(one)

    refuse(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise _Refused(f"the chat template refuses it: {message}")
