"""Turns of the template families that are known to break masks: what starts a turn, what ends it, what is in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.supervision.test_chat import CHATML, SPECIALS, talk, texts_of
from tokenmill.errors import UsageError
from tokenmill.supervision._attributed import Attributed, Source, attribute, concat, join, parts_of
from tokenmill.supervision.chat import ChatTemplate
from tokenmill.supervision.options import Supervision, parse_choices
from tokenmill.supervision.record_messages import clean_messages
from tokenmill.text_batch import Refusal

TOKENS = [*SPECIALS, "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<eos>", "<|reply|>", "<think>", "</think>"]
NEXT_HEADER = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% for call in m.tool_calls %}"
    "{{ '\n<call>' + call.name + '</call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The header of the next message is what stops the model."""
ENDS_ONCE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""The whole conversation ends with a token of its own."""
ENDS_AT_NEXT = (
    "{% for m in messages %}{% if not loop.first %}{{ '<|end|>\n' }}{% endif %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% endfor %}{{ '<|end|>\n' }}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""What ends a message is written with the next one."""
PROMPT_IN_LOOP = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
PROMPT_THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}{% else %}{{ '<think></think>' }}"
    "{% endif %}{% endif %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""The generation prompt begins the reasoning, and messages without any are written in another way."""
TOOLS_INSIDE = (
    "{% macro reply(text) %}{{ '<|reply|>' + text + '</reply>' }}{% endmacro %}"
    "{% set ns = namespace(before='') %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if m.role != 'assistant' or ns.before != 'assistant' %}{{ '<|' + m.role + '|>' }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '<call>' + call.name + '</call>' }}{% endfor %}"
    "{% set answered = namespace(yes=false) %}"
    "{% if m.tool_calls %}{% for k in range(loop.index0 + 1, messages | length) %}"
    "{% if messages[k].role == 'tool' and not answered.yes %}{{ reply(messages[k].content) }}"
    "{% set answered.yes = true %}{% endif %}{% endfor %}{% endif %}"
    "{% set said %}{{ m.content | trim }}{% endset %}{{ said }}"
    "{% if m.tool_calls and not answered.yes %}{{ '<|reply|>' }}{% elif not m.tool_calls or said %}"
    "{{ '<|end|>\n' }}{% endif %}{% endif %}{% set ns.before = m.role %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The answers of tools are written inside the assistant's message."""
BY_NUMBER = (
    "{% for i in range(messages | length) %}{% set m = messages[i] %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    "{% if i and messages[i - 1].role == 'tool' %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The loop goes through numbers, and takes each message by its number."""
LAST_APART = (
    "{% set ns = namespace(last='') %}{% if messages[-1].role == 'assistant' %}{% set ns.last = messages[-1].content %}"
    "{% set messages = messages[:-1] %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% elif ns.last %}"
    "{{ '<|assistant|><think>' + ns.last + '<|end|>' }}{% endif %}"
)
"""The last answer is written after the loop."""
NAMES_AGAIN = (
    "{% macro name_of(id) %}{% for m in messages %}{% for call in m.tool_calls %}{% if call.id == id %}"
    "{{ call.name }}{% endif %}{% endfor %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'tool' %}{{ name_of(m.tool_call_id) + ': ' }}"
    "{% endif %}{% for call in m.tool_calls %}{{ '<call>' + call.name + '</call>' }}{% endfor %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The result of a tool has the name of the call, for which a loop goes through all messages again."""
THINKS_LATE = TOOLS_INSIDE.replace(
    "{% for call in m.tool_calls %}{{ '<call>'",
    "{% if m.reasoning_content and messages[-1].role != 'user' and messages[-2].role != 'user' %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{% for call in m.tool_calls %}{{ '<call>'",
)
"""Reasoning is left out after a later message of the user."""
ENDS_WHAT_IS_THERE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    "{% if m.content %}{{ m.content + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Only a content is ended by a token."""
BEGINS_PROMPT = (
    "{% for m in messages %}{{ '<|' + m.role + '|><|reply|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
    "{% if add_generation_prompt %}{{ '<|reply|>' }}{% endif %}"
)
"""The generation prompt is begun even if no one asks for it."""
CLOSES_LATE = (
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}{{ '[' + m.content }}"
    "{% set ns.open = true %}{% else %}{% if ns.open %}{{ ']' }}{% set ns.open = false %}{% endif %}"
    "{{ '<|user|>' if m.role == 'user' else '' }}{{ m.content }}{% for call in m.tool_calls %}"
    "{{ '<call>' + call.name + '</call>' }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if ns.open %}{{ ']' }}{% endif %}"
)
"""What a tool says is closed by the next message, or by the generation prompt."""
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
ANSWERED: dict[str, Any] = {"role": "tool", "content": "3"}


def chat(source: str, **choices: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<eos>"}, TOKENS, Supervision(**choices))


def trained(source: str, messages: list[dict[str, Any]], **choices: Any) -> list[tuple[str, bool]]:
    applied = chat(source, **choices).apply(messages)
    assert not isinstance(applied, Refusal), applied
    text, turns = applied
    return list(zip(texts_of(text, turns), (turn.has_stop for turn in turns), strict=True))


def refused(source: str, messages: list[dict[str, Any]], **choices: Any) -> str:
    applied = chat(source, **choices).apply(messages)
    assert isinstance(applied, Refusal), applied
    return applied.detail


def test_the_header_of_the_next_message_ends_a_turn_that_has_no_end_of_its_own() -> None:
    messages = [*talk("1 + 2?"), CALLING, ANSWERED, {"role": "assistant", "content": "3."}, *talk("Thanks", "Welcome")]
    assert trained(NEXT_HEADER, messages) == [
        ("\n\n<call>add</call><|tool|>", True),
        ("\n3.<|user|>", True),
        ("\nWelcome", False),
    ]
    # The next message of the assistant is no end: no one is asked to speak in between.
    twice = [*talk("a", "b"), {"role": "assistant", "content": "c"}]
    assert trained(NEXT_HEADER, twice) == [("\nb", False), ("\nc", False)]


def test_a_token_after_the_last_message_belongs_to_the_last_turn() -> None:
    assert trained(ENDS_ONCE, talk("a", "b", "c", "d")) == [("b<|end|>", True), ("d<|end|>\n<eos>", True)]
    assert trained(ENDS_ONCE, talk("a", "b", "c")) == [("b<|end|>", True)]
    assert trained(ENDS_AT_NEXT, talk("a", "b", "c", "d")) == [("b<|end|>", True), ("d<|end|>", True)]


def test_a_generation_prompt_inside_the_loop_is_left_out() -> None:
    assert trained(PROMPT_IN_LOOP, talk("a", "b", "c", "d")) == [("b<eos>", True), ("d<eos>", True)]


def test_a_prompt_that_is_begun_unasked_is_left_out() -> None:
    ends = [("b<|end|>", True), ("d<|end|>", True)]
    assert trained(BEGINS_PROMPT, talk("a", "b", "c", "d")) == ends
    assert trained(BEGINS_PROMPT, talk("a", "b")) == ends[:1]


def test_a_prompt_that_depends_on_the_messages_is_not_taken_from_others() -> None:
    messages = [*talk("3?"), CALLING, ANSWERED, *talk("", "Three.")[1:]]
    assert trained(CLOSES_LATE, messages) == [("<call>add</call><|end|>", True), ("Three.<|end|>", True)]


def test_a_turn_starts_where_it_leaves_the_generation_prompt() -> None:
    reasoned = [*talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    assert trained(PROMPT_THINKS, reasoned) == [("r\n</think>\nb<|im_end|>", True)]
    assert trained(PROMPT_THINKS, talk("a", "b")) == [("</think>b<|im_end|>", True)]
    # A content that begins like the rest of the prompt is the assistant's own.
    assert trained(CHATML, talk("a", "<think")) == [("<think<|im_end|>", True)]
    # The same field under the other names that templates use.
    thought = [*talk("a"), {"role": "assistant", "content": "b", "thinking": "r"}]
    assert trained(PROMPT_THINKS, thought) == trained(PROMPT_THINKS, reasoned)


def test_answers_of_tools_inside_a_turn_are_not_trained_on() -> None:
    final = {"role": "assistant", "content": "It is 3."}
    silent = [*talk("1 + 2?"), CALLING, ANSWERED, final]
    assert trained(TOOLS_INSIDE, silent) == [("<call>add</call><|reply|>", True), ("It is 3.<|end|>", True)]
    spoken = [*talk("1 + 2?"), {**CALLING, "content": "Wait."}, ANSWERED, final]
    assert trained(TOOLS_INSIDE, spoken)[0][0] == "<call>add</call>Wait.<|end|>"
    empty = [*talk("1 + 2?"), CALLING, {**ANSWERED, "content": ""}, final]
    assert trained(TOOLS_INSIDE, empty)[0] == ("<call>add</call><|reply|>", True)
    assert trained(TOOLS_INSIDE, silent[:2]) == [("<call>add</call><|reply|>", True)]


def test_loops_over_numbers_and_answers_after_the_loop_have_turns() -> None:
    assert trained(BY_NUMBER, talk("Hi", "Hello", "Bye", "See you")) == [
        ("Hello<|end|>", True),
        ("See you<|end|>", True),
    ]
    assert trained(LAST_APART, talk("Hi", "Hello", "Bye", "See you")) == [
        ("Hello<|end|>", True),
        ("See you<|end|>", True),
    ]
    assert trained(LAST_APART, talk("Hi", "Hello", "Bye")) == [("Hello<|end|>", True)]


def test_a_message_that_an_inner_loop_looks_up_has_one_place() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "id": "1"}]}
    messages = [*talk("3?"), call, {**ANSWERED, "tool_call_id": "1"}, *talk("", "Three.")[1:]]
    assert trained(NAMES_AGAIN, messages) == [("<call>add</call><|end|>", True), ("Three.<|end|>", True)]


def test_calls_are_trained_on_when_their_reasoning_is_dropped_later() -> None:
    calling = {**CALLING, "reasoning_content": "I add."}
    once = [*talk("3?"), calling, ANSWERED, *talk("", "Three.")[1:]]
    assert trained(THINKS_LATE, once)[0] == ("<think>I add.</think><call>add</call><|reply|>", True)
    assert trained(THINKS_LATE, [*once, *talk("Thanks", "Bye")]) == [
        ("<call>add</call><|reply|>", True),
        ("Three.<|end|>", True),
        ("Bye<|end|>", True),
    ]
    empty = [*talk("3?"), CALLING, {**ANSWERED, "content": ""}, *talk("", "Three.")[1:]]
    assert trained(THINKS_LATE, empty)[0] == ("<call>add</call><|reply|>", True)


def test_a_template_that_forgets_its_end_does_not_teach_the_header_of_the_user() -> None:
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "Four."},
    ]
    assert trained(ENDS_WHAT_IS_THERE, [*messages, *talk("Hi", "Hello")]) == [("Four.", False), ("Hello<eos>", True)]


def test_a_template_that_gathers_its_text_has_no_known_turns() -> None:
    gathers = (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out ~ m.role ~ ':' ~ m.content %}"
        "{% endfor %}{{ ns.out }}"
    )
    assert "outside of a loop over the messages" in refused(gathers, talk("Hi", "Hello", "Bye", "See you"))


def test_a_null_is_a_missing_field_as_in_transformers() -> None:
    calling = {**CALLING, "content": None, "name": None}
    cleaned = clean_messages([*talk("3?"), calling])
    assert not isinstance(cleaned, Refusal)
    assert cleaned[1] == {key: value for key, value in CALLING.items() if key != "content"}
    asks = "{% for m in messages %}{{ m.role + (m.content if m.content is defined else '-') + '<|end|>' }}{% endfor %}"
    applied = chat(asks).render_text(cleaned, prompt=False)
    assert applied == "user3?<|end|>assistant-<|end|>"
    assert "has no attribute 'content'" in refused(CHATML, cleaned)
    assert not chat(asks).needs_content
    assert not chat(
        CHATML.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')")
    ).needs_content
    assert chat(NEXT_HEADER.replace("call.name", "call.function.name")).needs_content
    filled = clean_messages([*talk("3?"), calling, {"role": "assistant", "content": None}], fills_content=True)
    assert not isinstance(filled, Refusal)
    assert [message.get("content") for message in filled] == ["3?", "", None]


def test_a_template_that_drops_what_the_assistant_says_is_refused() -> None:
    said = "writes nothing of the tool_calls of message 2"
    assert said in refused(CHATML, [*talk("a"), {**CALLING, "content": "b"}])
    silent = CHATML.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')")
    assert "writes nothing of the content of message 2" in refused(silent, talk("a", "b"))
    # An empty answer is what the record says.
    assert trained(silent, talk("a", "")) == [("<|im_end|>", True)]


def test_turns_and_roles_are_a_choice() -> None:
    messages = talk("a", "b", "c", "d", "e", "f")
    assert [text for text, _ in trained(CHATML, messages, train_on="last")] == ["f<|im_end|>"]
    assert [text for text, _ in trained(CHATML, messages, train_on="1,-1")] == ["b<|im_end|>", "f<|im_end|>"]
    assert [text for text, _ in trained(CHATML, messages, train_on="2")] == ["d<|im_end|>"]
    assert trained(CHATML, messages, train_on="7") == []
    # The calls of tools belong to the turn that they serve.
    calls = [*talk("a", "b", "1 + 2?"), CALLING, ANSWERED, {"role": "assistant", "content": "3"}]
    assert [text for text, _ in trained(NEXT_HEADER, calls, train_on="last")] == ["\n\n<call>add</call><|tool|>", "\n3"]
    both = trained(CHATML, talk("a", "b", system="s"), train_roles=("system", "assistant"))
    assert both == [("s<|im_end|>", True), ("b<|im_end|>", True)]


def test_reasoning_and_calls_can_be_left_out() -> None:
    reasoned = [*talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    assert trained(PROMPT_THINKS, reasoned, mask_reasoning=True) == [("\n</think>\nb<|im_end|>", True)]
    source = NEXT_HEADER.replace("{% for call", "{{ '<think>' + m.thinking + '</think>' if m.thinking }}{% for call")
    messages = [*talk("a"), {**CALLING, "content": "Wait.", "thinking": "r"}, ANSWERED]
    assert trained(source, messages, mask_tool_calls=True) == [("\nWait.<think>r", False)]
    assert trained(source, messages, mask_reasoning=True) == [("\nWait.</think>\n<call>add</call><|tool|>", True)]


def test_a_clock_needs_a_date() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    with pytest.raises(UsageError, match="calls strftime_now, .* --template-date 2026-01-31"):
        chat(dated).apply(talk("a", "b"))
    rendered = chat(dated, template_date="2026-01-31").apply(talk("a", "b"))
    assert not isinstance(rendered, Refusal) and rendered[0].startswith("31 Jan 2026<|im_start|>")
    # A template that only asks whether there is a clock renders without one.
    asking = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}{{ 'no day' }}{% endif %}" + CHATML
    rendered = chat(asking).apply(talk("a", "b"))
    assert not isinstance(rendered, Refusal) and rendered[0].startswith("no day")


def test_a_template_cannot_throw_dice() -> None:
    assert "'lipsum' is undefined" in refused("{{ lipsum() }}", talk("a", "b"))
    with pytest.raises(UsageError, match="No filter named 'random'"):
        chat("{{ messages | random }}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"train_on": "first"}, "--train-on first: expected all, last, or numbers of turns such as 1,-1"),
        ({"train_on": "0"}, "--train-on 0: expected"),
        ({"train_roles": " , "}, "--train-roles is empty"),
        ({"date": "31.1.2026"}, "--template-date 31.1.2026: expected a date such as 2026-01-31"),
        ({"values": "[1]"}, "--template-values [1]: expected a JSON object"),
        ({"values": "{'a': 1}"}, "expected a JSON object of names and values"),
        ({"values": {"a b": 1}}, "expected a JSON object of names and values"),
    ],
)
def test_choices_are_checked(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_choices(**{"train_on": None, "train_roles": None, "date": None, "values": None, **flags})
    assert said in str(caught.value)


# Attributed strings


texts = st.text(alphabet="ab <|>\n/é", max_size=12)


def label(*pieces: str) -> Attributed:
    return concat([attribute(piece, Source(number, "content")) for number, piece in enumerate(pieces)])


def characters(value: str) -> list[tuple[str, int | None]]:
    """Each character with the number of the piece that it came from."""
    sources: list[int | None] = [None] * len(value)
    for start, stop, what in parts_of(value):
        sources[start:stop] = [what.message] * (stop - start)
    return list(zip(value, sources, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=4), texts, texts, st.integers(-14, 14), st.integers(-14, 14))
def test_attributed_strings_are_strings_that_keep_their_sources(
    pieces: list[str], sep: str, new: str, start: int, stop: int
) -> None:
    plain, value = "".join(pieces), label(*pieces)
    known = characters(value)
    assert (
        value == plain
        and hash(value) == hash(plain)
        and known == [(character, number) for number, piece in enumerate(pieces) for character in piece]
    )
    assert characters(value[start:stop]) == known[start:stop]
    for name in ("strip", "lstrip", "rstrip", "upper", "lower", "splitlines", "split"):
        assert getattr(value, name)() == getattr(plain, name)()
    assert value.strip("ab") == plain.strip("ab")
    assert value.replace(sep, new) == plain.replace(sep, new)
    assert value.removeprefix(sep) == plain.removeprefix(sep) and value.removesuffix(sep) == plain.removesuffix(sep)
    assert join(pieces, sep) == sep.join(pieces) and attribute(sep, Source(9, "")).join(pieces) == sep.join(pieces)
    if sep:
        assert value.split(sep) == plain.split(sep) and value.rsplit(sep, 1) == plain.rsplit(sep, 1)
        assert value.partition(sep) == plain.partition(sep) and value.rpartition(sep) == plain.rpartition(sep)
        whole = [pair for part in value.partition(sep) for pair in characters(part)]
        assert whole == known
        last = [pair for part in value.rpartition(sep) for pair in characters(part)]
        assert last == known
        at = 0
        for piece in value.split(sep):
            assert characters(piece) == known[at : at + len(piece)]
            at += len(piece) + len(sep)
    assert characters(value + sep)[: len(plain)] == known
    assert characters(sep + value)[len(sep) :] == known
