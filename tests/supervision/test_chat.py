"""Chat templates: which characters of a conversation are the assistant's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engines import load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.supervision._template import TemplateRefused
from tokenmill.supervision._turns import Turn
from tokenmill.supervision.chat import ChatTemplate
from tokenmill.text_batch import Refusal

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALWAYS_PROMPTS = (
    "{% for message in messages %}{% set content = '<|im_start|>' + message['role'] + '\n' + message['content'] | trim"
    " + '<|im_end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
THINKS = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' and not "
    "message.content.startswith('<tool>') %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ALTERNATES = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (prefix if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PLAIN = "{% for message in messages %}{{ message.role | string }}: {{ message.content }}\n{% endfor %}"
TAGS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
CONCATENATES = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ (message.content | upper) ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "always-prompts": ALWAYS_PROMPTS,
    "thinks": THINKS,
    "alternates": ALTERNATES,
    "plain": PLAIN,
    "tags": TAGS,
    "concatenates": CONCATENATES,
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}, SPECIALS)


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def texts_of(text: str, turns: list[Turn]) -> list[str]:
    return ["".join(text[start:stop] for start, stop in turn.spans) for turn in turns]


def trained_texts(name: str, messages: list[dict[str, Any]]) -> list[str]:
    applied = template(name).apply(messages)
    assert not isinstance(applied, Refusal), applied
    text, turns = applied
    return texts_of(text, turns)


def test_turns_hold_the_answer_and_its_end_and_nothing_else() -> None:
    messages = talk("hi", "hello", "more", " yes ", system="be kind")
    assert trained_texts("chatml", messages) == ["hello<|im_end|>", " yes <|im_end|>"]
    assert trained_texts("tags", messages) == ["hello<|im_end|>", " yes <|im_end|>"]
    assert trained_texts("always-prompts", messages) == ["hello<|im_end|>", "yes<|im_end|>"]
    assert trained_texts("alternates", messages) == ["hello<|im_end|>", "yes<|im_end|>"]
    assert trained_texts("concatenates", messages) == ["HELLO<|im_end|>", " YES <|im_end|>"]
    # What the model has to write itself is trained on; what the template writes for earlier turns is not there.
    assert trained_texts("thinks", messages) == ["hello<|im_end|>", "<think>\n\n</think>\n\n yes <|im_end|>"]
    # Without a generation prompt, a turn begins with its content.
    assert trained_texts("plain", messages) == ["hello\n", " yes \n"]


def test_a_generation_prompt_that_comes_unasked_is_in_the_text_but_in_no_turn() -> None:
    text, turns = template("always-prompts").apply(talk("hi", "hello"))
    assert text == "<s><|im_start|>user\nhi<|im_end|><|im_start|>assistant\nhello<|im_end|><|im_start|>assistant\n"
    assert texts_of(text, turns) == ["hello<|im_end|>"]


def test_a_trailing_question_and_empty_turns() -> None:
    assert trained_texts("chatml", talk("hi", "hello", "and?")) == ["hello<|im_end|>"]
    assert trained_texts("chatml", talk("hi", "")) == ["<|im_end|>"]
    assert trained_texts("chatml", talk("hi")) == []
    assert trained_texts("alternates", talk("", "", "", "x")) == ["<|im_end|>", "x<|im_end|>"]


def test_a_template_that_refuses_is_a_refusal_with_its_words() -> None:
    refused = template("alternates").apply([*talk("a"), *talk("b")])
    assert isinstance(refused, Refusal)
    assert "roles must alternate" in refused.detail
    broken = ChatTemplate("{{ messages[0].content.nothing.more }}", {}, []).apply(talk("a", "b"))
    assert isinstance(broken, Refusal)


def test_a_template_runs_in_a_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    refused = ChatTemplate(escape, {}, []).apply(talk("a", "b"))
    assert isinstance(refused, Refusal)
    assert "SecurityError" in refused.detail
    with pytest.raises(UsageError, match="the chat template is not valid"):
        ChatTemplate("{% for %}", {}, [])


contents = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "\n x \n", "</think>", "a</think>\n\nb", "<tool>", "<|im_end|>", "{{ x }}", "é中😀", "  "]
    ),
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_replaying_a_trace_gives_what_rendering_gives(name: str, data: st.DataObject) -> None:
    chat = template(name)
    for _ in range(4):
        system = data.draw(st.none() | contents)
        messages = talk(*data.draw(st.lists(contents, min_size=1, max_size=5)), system=system)
        if any(0xE000 <= ord(c) <= 0xE004 for m in messages for c in m["content"]):
            continue
        repeated = chat.apply(messages)
        try:
            rendered = chat.render(messages)
        except TemplateRefused:
            assert isinstance(repeated, Refusal)
        else:
            assert repeated == rendered


def test_what_can_be_recorded_is_recorded() -> None:
    for name in ("chatml", "always-prompts", "thinks", "alternates", "tags"):
        chat = template(name)
        for number in range(20):
            chat.apply(talk(f"question {number}", f"answer {number}"))
        assert len(chat._traces) == 1, name
    assert not template("concatenates")._is_recordable


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_real_conversations_with_real_templates(shared_data: Path, name: str) -> None:
    """Each turn is the message's own content with the template's end-of-turn token, for every conversation."""
    import zstandard

    with (shared_data / "chat.jsonl.zst").open("rb") as file:
        records = [json.loads(line) for line in zstandard.ZstdDecompressor().stream_reader(file).read().splitlines()]
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / name))
    assert tokenizer.chat_template is not None
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens, tokenizer.special_tokens)
    end = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}[name]
    count = 0
    for record in records:
        if "messages" in record:
            applied = chat.apply(record["messages"])
            assert not isinstance(applied, Refusal)
            text, turns = applied
            answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
            for answer, trained in zip(answers, texts_of(text, turns), strict=True):
                said = trained.removeprefix("<think>\n\n</think>\n\n")
                assert said.strip() == answer.strip() + end
            count += 1
    assert count > 3000


def test_calls_of_tools_are_trained_on_and_their_answers_are_not() -> None:
    source = (
        "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content }}{% if message.tool_calls %}"
        "{{ message.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = ChatTemplate(source, {}, SPECIALS)
    calling = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"é": [1, 2]}}]}
    messages = [
        *talk("1 + 2?"),
        calling,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    applied = chat.apply(messages, tools=[{"name": "add"}])
    assert not isinstance(applied, Refusal)
    text, turns = applied
    assert text.startswith('<|im_start|>system\n[{"name": "add"}]<|im_end|>')
    assert texts_of(text, turns) == [
        '[{"name": "add", "arguments": {"é": [1, 2]}}]<|im_end|>',
        "It is 3.<|im_end|>",
    ]
