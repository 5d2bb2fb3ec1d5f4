"""Choose what to train on among the turns of a conversation: some turns, without reasoning, without tool calls."""

from __future__ import annotations

from typing import Any

from tokenmill.supervision._turns import Rendering, Span, Turn
from tokenmill.supervision.options import Supervision

__all__ = ["select_turns"]

Message = dict[str, Any]


def select_turns(whole: Rendering, messages: list[Message], turns: list[Turn], options: Supervision) -> list[Turn]:
    """Return the turns to train on, each without what is masked."""
    numbers = options.turn_numbers
    if numbers is not None:
        groups = _group(messages, turns)
        chosen = {number - 1 if number > 0 else len(set(groups)) + number for number in numbers}
        order = {group: place for place, group in enumerate(sorted(set(groups)))}
        turns = [turn for turn, group in zip(turns, groups, strict=True) if order[group] in chosen]
    if options.mask_reasoning:
        turns = [_mask(whole, turn, "reasoning") for turn in turns]
    if options.mask_tool_calls:
        turns = [_mask(whole, turn, "tool_calls") for turn in turns]
    return [turn for turn in turns if turn.spans]


def _group(messages: list[Message], turns: list[Turn]) -> list[int]:
    """Number each turn by the user's messages before it: calls of tools belong to the turn that they serve."""
    return [sum(message["role"] == "user" for message in messages[: turn.message]) for turn in turns]


def _mask(whole: Rendering, turn: Turn, field: str) -> Turn:
    """Leave one field out of a turn.

    With reasoning goes what the template writes before it, and with tool calls what it writes around them, because
    both announce what is left out. What it writes after the reasoning stays: the model has to end it.
    """
    spans: list[Span] = []
    for start, stop in turn.spans:
        own = whole.own(turn.message, start, stop)
        inside = [part for part in own if part.what.field == field]
        if not inside:
            spans.append((start, stop))
            continue
        first, last = inside[0].start, inside[-1].stop
        before = [part.stop for part in own if part.stop <= first]
        after = [part.start for part in own if part.start >= last]
        cut = max(before, default=start)
        resumed = last if field == "reasoning" else min(after, default=stop)
        spans += [span for span in ((start, cut), (resumed, stop)) if span[0] < span[1]]
    has_stop = turn.has_stop and bool(spans) and spans[-1][1] == turn.spans[-1][1]
    return turn._replace(spans=tuple(spans), has_stop=has_stop)
