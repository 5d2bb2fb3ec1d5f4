"""Find the turns of a trained role in a rendered conversation: what the model has to write, and no more.

A turn starts where its text leaves the generation prompt, and it ends with what the model must write so that
generation stops. Both follow from renderings of the template, never from a search for markers:

- The template says which characters it writes for a message (a *segment*), and which of these are the message's own.
- The *generation prompt* is what it writes after the messages before, when it is asked for one.
- The *ending* is what it writes after a content that is all of a message. If it writes nothing, the next message's
  first token is what stops the model.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from tokenmill.supervision._attributed import Attributed, Event, Part, Source, parts_of
from tokenmill.supervision._template import TemplateRefused

__all__ = ["BLANK", "Rendering", "Turn", "TurnFinder"]

Message = dict[str, Any]
Span = tuple[int, int]
BLANK = "\ue004"
"""Stands for a content."""
MOST_HEADERS = 1000
CLOSING = ">])}:"
"""Characters that end a tag or a name, as in `<assistant>` or `ASSISTANT:`."""


class Turn(NamedTuple):
    """The trained characters of one message, in order, and whether they include what stops generation."""

    message: int
    spans: tuple[Span, ...]
    has_stop: bool


class Usual(NamedTuple):
    """What a template writes before a content, and after it: in the middle of a conversation, and at its end."""

    header: str = ""
    middle: str | None = None
    last: str | None = None

    @property
    def are_known(self) -> bool:
        """Whether the template can render a content."""
        return self.middle is not None or self.last is not None


class Rendering:
    """A rendered conversation: its text, and where each message is in it."""

    def __init__(self, text: Attributed) -> None:
        self.text = str.__str__(text)
        parts = parts_of(text)
        events = [part for part in parts if type(part.what) is Event]
        self.sources = [part for part in parts if type(part.what) is Source]
        self._places = [part.start for part in self.sources]
        self.tags = _pair_tags(events)
        self.segments = _find_segments(events)
        if last := self._find_last(self.end):
            self.segments[last] = [(self.end, len(self.text))]

    @property
    def end(self) -> int:
        """The end of the last segment."""
        return max((stop for spans in self.segments.values() for _, stop in spans), default=0)

    @property
    def tail(self) -> str:
        """What the template writes after the last message."""
        return self.text[self.end :]

    def _find_last(self, end: int) -> int | None:
        """Return the message that the template writes after its loops, if that is one that no loop writes."""
        others = {part.what.message for part in self.sources if part.start >= end}
        is_last = len(others) == 1 and self.segments and min(others) > max(self.segments)
        return others.pop() if is_last else None

    def segment(self, number: int) -> Span | None:
        """Return where the template writes a message, or None if it writes nothing for it."""
        spans = self.segments.get(number, [])
        if len(spans) > 1:
            raise TemplateRefused(f"the chat template writes message {number + 1} in {len(spans)} places")
        return spans[0] if spans else None

    def is_after(self, other: int, number: int) -> bool:
        """Whether another message is written, and not inside this one."""
        spans, own = self.segments.get(other, []), self.segments.get(number, [])
        return bool(spans) and bool(own) and spans[0][0] >= own[0][1]

    def sources_in(self, start: int, stop: int) -> list[Part]:
        """Return the characters between two places that are not the template's."""
        first, last = max(0, bisect_right(self._places, start) - 1), bisect_left(self._places, stop)
        return [part for part in self.sources[first:last] if part.stop > start]

    def own(self, number: int, start: int, stop: int) -> list[Part]:
        """Return the characters between two places that are a message's own."""
        return [part for part in self.sources_in(start, stop) if part.what.message == number]


def _pair_tags(events: list[Part]) -> list[Span]:
    places = [(part.what.kind, part.start) for part in events if part.what.kind in ("open", "close")]
    if [kind for kind, _ in places] != ["open", "close"] * (len(places) // 2):
        raise TemplateRefused("the chat template has {% generation %} tags inside each other")
    return [(start, stop) for (_, start), (_, stop) in zip(places[::2], places[1::2], strict=True)]


def _find_segments(events: list[Part]) -> dict[int, list[Span]]:
    """Return the spans that loops wrote between two messages, where they wrote anything.

    A loop inside a loop may go through the messages again, to look for the name of a tool. What it writes belongs to
    the message of the outer loop, unless only the inner loop writes a message.
    """
    segments: dict[int, list[Span]] = {}
    inner: dict[int, list[Span]] = {}
    opened: dict[int, tuple[int, int]] = {}
    for place, _, event in events:
        kind, loop, message = event
        if kind not in ("begin", "end"):
            continue
        if loop in opened:
            number, start = opened.pop(loop)
            if place > start:
                (inner if opened else segments).setdefault(number, []).append((start, place))
        if kind == "begin":
            opened[loop] = (message, place)
    return inner | segments


Render = Callable[[list[Message], bool], Rendering]
"""Renders messages, with or without the generation prompt."""


class TurnFinder:
    """Knows what a template writes around the contents of turns. `tokens` are strings that are one token each."""

    def __init__(
        self,
        render: Render,
        tokens: Iterable[str],
        *,
        has_constant_tail: bool,
        asks_after_loop_only: bool,
        has_tags: bool,
    ) -> None:
        self._render = render
        self._has_constant_tail, self._asks_after_loop_only = has_constant_tail, asks_after_loop_only
        self._has_tags = has_tags
        known = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        self._tokens = re.compile(f"({known or '(?!)'})")
        self._following = re.compile(rf"\s*(?:{known or '(?!)'})")
        self._common_start = lru_cache(MOST_HEADERS)(self._compare)
        """The header of a turn is mostly one of a few strings."""

    def find(self, render: Render, messages: list[Message], wanted: Sequence[int]) -> tuple[Rendering, list[Turn]]:
        """Return the rendered conversation, and the turns of the messages with the numbers `wanted`."""
        whole = render(messages, False)
        if self._has_tags:
            return whole, self._read_tags(whole)
        turns = [self._find_turn(render, whole, messages, number) for number in wanted]
        return whole, [turn for turn in turns if turn is not None]

    def _find_turn(self, render: Render, whole: Rendering, messages: list[Message], number: int) -> Turn | None:
        segment = whole.segment(number)
        if segment is None:
            return None
        first, end = segment
        if number == len(messages) - 1 and not self._always_prompts(render, whole, messages):
            end = len(whole.text)
        own = whole.own(number, first, end)
        start = own[0].start if own else end
        if messages[number]["role"] == "assistant":
            header = self._header(render, messages, number, whole.text[first:start])
            start = first + header
        spans = self._without_others(render, whole, messages, number, (start, end))
        stop, has_stop = self._find_stop(whole, messages, number, spans[-1])
        spans[-1] = (spans[-1][0], stop)
        kept = tuple(span for span in spans if span[0] < span[1])
        return Turn(number, kept, has_stop) if kept else None

    def _read_tags(self, whole: Rendering) -> list[Turn]:
        """Return the tagged text of each message; what is tagged after the last message belongs to that one."""
        spans: dict[int, list[Span]] = {}
        for start, stop in whole.tags:
            inside = (
                n for n, found in whole.segments.items() for first, end in found if first <= start and stop <= end
            )
            if start < stop:
                spans.setdefault(next(inside, max(whole.segments, default=0)), []).append((start, stop))
        turns = []
        for number, found in sorted(spans.items()):
            start, stop = found[-1]
            last_own = max([start, *(min(part.stop, stop) for part in whole.own(number, start, stop))])
            turns.append(Turn(number, tuple(found), self._is_ending(whole.text[last_own:stop].rstrip())))
        return turns

    # Where a turn starts

    def _header(self, render: Render, messages: list[Message], number: int, written: str) -> int:
        """Return how much of what the template writes before a message's own characters the model need not write."""
        prompts = self._usual_prompts
        if not self._asks_after_loop_only and not any(prompt and written.startswith(prompt) for prompt in prompts):
            prompts = []
        prompts = prompts or _ask(render, messages[:number])
        shared = max((self._common_start(written, prompt) for prompt in prompts), default=0)
        return shared or self._common_start(written, self._usual.header)

    @cached_property
    def _usual_prompts(self) -> list[str]:
        """What the template writes after its last loop as a prompt, if that is the same for all conversations."""
        if not self._has_constant_tail:
            return []
        prompts = _ask(self._render, [{"role": "user", "content": BLANK}])
        return prompts if self._asks_after_loop_only else prompts[:1]

    def _compare(self, one: str, other: str) -> int:
        """Return the length of the common start of two texts.

        A word or a tag of the turn that only begins like one of the prompt is in the turn as a whole.
        """
        units = self._units(one)
        pairs = zip(units, self._units(other), strict=False)
        common = [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if "".join(common) != other and len(common) < len(units):
            while common and len(common[-1]) == 1 and not (common[-1].isspace() or common[-1] in CLOSING):
                common.pop()
        return len("".join(common))

    def _units(self, text: str) -> list[str]:
        """Split a text into tokens with a string of their own and single characters."""
        parts = enumerate(self._tokens.split(text))
        return [unit for number, part in parts for unit in ([part] if number % 2 else part)]

    # Where a turn ends

    def _always_prompts(
        self, render: Render, whole: Rendering, messages: list[Message], usual: Usual | None = None
    ) -> bool:
        """Whether what the template writes after the last message is a generation prompt, or begins one, unasked."""
        if not whole.tail:
            return False
        asked = _attempt(render, messages, True)
        if asked is None or not asked.tail.startswith(whole.tail):
            return False
        usual = usual or self._usual
        return asked.tail == whole.tail or bool(usual.middle and usual.header.startswith(whole.tail))

    def _find_stop(self, whole: Rendering, messages: list[Message], number: int, turn: Span) -> tuple[int, bool]:
        """Return the end of a turn, and whether it has what stops the model.

        White space that the template writes after that is not in the turn.
        """
        start, end = turn
        last_own = max([start, *(min(part.stop, end) for part in whole.own(number, start, end))])
        ending = whole.text[last_own:end].rstrip()
        if self._ends_turns and self._is_ending(ending):
            return last_own + len(ending), True
        after = next((n for n in range(number + 1, len(messages)) if whole.is_after(n, number)), number)
        role = messages[after]["role"]
        others_follow = role != messages[number]["role"] and not (role == "user" and self._usual.middle)
        following = self._following.match(whole.text, end) if others_follow else None
        return (following.end(), True) if following else (end, False)

    def _is_ending(self, text: str) -> bool:
        """Whether a text ends with a token of its own, or with what the template usually writes after a content."""
        return bool(text) and (self._tokens.split(text)[-1] == "" or text.endswith(self._endings))

    @cached_property
    def _usual(self) -> Usual:
        found = self._usual_of(BLANK)
        # Some templates know no strings, but lists of parts.
        return found if found.are_known else self._usual_of([{"type": "text", "text": BLANK}])

    def _usual_of(self, content: Any) -> Usual:
        asking, answering = ({"role": role, "content": content} for role in ("user", "assistant"))
        usual = Usual()
        for talk in ([asking, answering, asking], [asking, answering]):
            rendered = _attempt(self._render, talk, False)
            segment = rendered.segment(1) if rendered is not None else None
            if rendered is None or segment is None:
                continue
            is_last = len(talk) == 2 and not self._always_prompts(self._render, rendered, talk, usual)
            end = len(rendered.text) if is_last else segment[1]
            head, is_written, tail = rendered.text[segment[0] : end].partition(BLANK)
            if is_written:
                header = usual.header or head
                ending = {"last" if len(talk) == 2 else "middle": tail.strip()}
                usual = usual._replace(header=header, **ending)
        return usual

    @property
    def _ends_turns(self) -> bool:
        """Whether the template writes something after a content; taken for granted if that cannot be rendered."""
        return bool(self._endings) or not self._usual.are_known

    @property
    def _endings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._usual.last, self._usual.middle)))

    # What others say inside a turn

    def _without_others(
        self, render: Render, whole: Rendering, messages: list[Message], number: int, turn: Span
    ) -> list[Span]:
        """Return the parts of a turn around what later messages say in it, such as the answers of tools."""
        start, end = turn
        later = [part for part in whole.sources_in(start, end) if part.what.message > number]
        is_moved = number + 1 < len(messages) and not whole.is_after(number + 1, number)
        if not later and not is_moved:
            return [turn]
        alone = _attempt(render, messages[: number + 1], False)
        segment = alone.segment(number) if alone is not None else None
        if alone is None or segment is None:
            raise TemplateRefused(f"the chat template writes other messages inside message {number + 1}")
        first = whole.segment(number)
        assert first is not None
        theirs = later[0].start if later else end
        ours, same = _last_common(whole.own(number, first[0], theirs), alone.own(number, *segment))
        ours, same = ours or first[0], same or segment[0]
        cut = ours + self._shared_start(whole.text[ours:end], alone.text[same : segment[1]])
        if cut >= end or not later:
            return [(start, min(end, cut))] if is_moved else [turn]
        after = whole.own(number, later[-1].stop, end)
        again = [(after[0].start, end)] if after else []
        return [(start, max(start, cut)), *again]

    def _shared_start(self, one: str, other: str) -> int:
        pairs = zip(self._units(one), self._units(other), strict=False)
        return sum(len(ours) for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _last_common(ours: list[Part], alone: list[Part]) -> tuple[int, int]:
    """Return where the last of a message's own characters that two renderings share end in each; 0 if they share none.

    A template may write the reasoning of a message in only one of them.
    """
    stops: dict[Any, list[int]] = {}
    for part in ours:
        stops.setdefault(part.what, []).append(part.stop)
    shared = [(stops[part.what].pop(0), part.stop) for part in alone if stops.get(part.what)]
    return max(shared, default=(0, 0))


def _ask(render: Render, messages: list[Message]) -> list[str]:
    """Return what the template writes when it is asked for a generation prompt: after the last message, and in all."""
    asked, unasked = _attempt(render, messages, True), _attempt(render, messages, False)
    if asked is None:
        return []
    if unasked is None or asked.text == unasked.text:
        return [asked.tail]
    pairs = zip(asked.text, unasked.text, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [asked.tail, asked.text[common:]]


def _attempt(render: Render, messages: list[Message], prompt: bool) -> Rendering | None:
    """Render a part of a conversation; return None if the template rejects it."""
    try:
        return render(messages, prompt)
    except TemplateRefused:
        return None
