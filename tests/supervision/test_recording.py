"""Conversations with tools and reasoning: a replayed recording is what a rendering gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tokenmill.engines import load_tokenizer
from tokenmill.supervision._template import TemplateRefused
from tokenmill.supervision.chat import ChatTemplate
from tokenmill.text_batch import Refusal, shorten

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
HEADER = "{{ '<|im_start|>' + message.role + '\n' }}"
END = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WHOLE_OBJECTS = (
    "{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}{% for message in messages %}"
    f"{HEADER}{{{{ message.content | trim }}}}{{% for call in message.tool_calls or [] %}}"
    "{{ call.function.name + ' ' }}{{ call.function.arguments | tojson }}{% endfor %}" + END
)
LOOKS_INSIDE = (
    "{% macro define(tools) %}{% for tool in tools %}{{ tool.function.name + ': ' ~ tool.function.parameters | tojson }}"
    "{% endfor %}{% endmacro %}{% if tools %}{{ define(tools) }}{% endif %}{% for message in messages %}"
    f"{HEADER}{{{{ message.content }}}}{{% for call in message.tool_calls or [] %}}"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value if value is string else value | tojson }}"
    "{% endfor %}{% endfor %}" + END
)
THINKS = (
    "{% for message in messages %}" + HEADER + "{% set content = message.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content.strip('\n') + '</think>' }}{% endif %}"
    "{% if message.role == 'tool' and message.name in 'search and add' %}{{ message.name }}{% endif %}{{ content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}" + END
)
WRITES_REPR = "{% for message in messages %}" + HEADER + "{{ message.content }}{{ message.tool_calls or '' }}" + END
TEMPLATES = {"whole": WHOLE_OBJECTS, "inside": LOOKS_INSIDE, "thinks": THINKS, "repr": WRITES_REPR}
STRINGS = ["hi", " x ", "</think>", "<think>\na</think>\n\nb", "é中😀", '{"a": 1}', "\n\ntail\n", "search", "None"]


class Talks:
    """Makes conversations, and others of the same shapes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self) -> str:
        return self._random.choice([*STRINGS, "", "\n"])

    def make(self) -> tuple[list[dict[str, Any]], Any]:
        choose, pick = self._random.random, self._random.choice
        messages: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 2)):
            messages.append({"role": "user", "content": self.text()})
            if choose() < 0.6:
                arguments = {name: pick([self.text(), 1, True, None, {"x": self.text()}]) for name in ("a", "b")}
                calls = [{"type": "function", "function": {"name": pick(STRINGS), "arguments": arguments}}]
                messages.append({"role": "assistant", "content": self.text(), "tool_calls": calls})
                messages.append({"role": "tool", "name": pick(STRINGS), "content": self.text()})
            messages.append({"role": "assistant", "content": self.text()})
            if choose() < 0.4:
                messages[-1][pick(["reasoning_content", "thinking"])] = self.text()
        tool = {"name": pick(STRINGS), "parameters": {"type": "object", "properties": {pick(STRINGS): {}}}}
        return messages, [{"type": "function", "function": tool}] if choose() < 0.7 else None

    def change(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: inner if name == "role" else self.change(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.change(inner) for inner in value]
        return self._random.choice(STRINGS) if isinstance(value, str) and value.strip() else value


def render(chat: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> Any:
    try:
        return chat.render(messages, tools)
    except TemplateRefused as refused:
        return Refusal("chat-template", shorten(str(refused)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_replaying_conversations_with_tools_gives_what_rendering_gives(name: str) -> None:
    chat = ChatTemplate(TEMPLATES[name], {}, SPECIALS)
    talks = Talks(seed=7)
    for _ in range(40):
        messages, tools = talks.make()
        for _ in range(8):
            assert chat.apply(messages, tools) == render(chat, messages, tools)
            messages, tools = talks.change(messages), talks.change(tools)
    assert len(chat._traces) > 3


def test_real_templates_are_recorded_with_tools(shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen3"))
    assert tokenizer.chat_template is not None
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens, tokenizer.special_tokens)
    talks = Talks(seed=3)
    for _ in range(40):
        messages, tools = talks.make()
        for _ in range(8):
            assert chat.apply(messages, tools) == render(chat, messages, tools)
            messages, tools = talks.change(messages), talks.change(tools)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1."},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rendered = chat.render
    for _ in range(3):
        chat.apply(messages, tools)
    # A third conversation of a shape is not rendered any more.
    chat.render = None  # type: ignore[method-assign, assignment]
    replayed = chat.apply(talks.change(messages), talks.change(tools))
    chat.render = rendered  # type: ignore[method-assign]
    assert not isinstance(replayed, Refusal)


def test_recordings_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.supervision._traces.MOST_LEAVES", 50)
    chat = ChatTemplate(WHOLE_OBJECTS, {}, SPECIALS)
    for length in [*range(1, 20), *range(1, 20)]:
        messages = [{"role": ("user", "assistant")[number % 2], "content": "x"} for number in range(length)]
        for _ in range(3):
            assert chat.apply(messages) == chat.render(messages)
        assert chat._traces._num_leaves <= 50
    assert 0 < len(chat._traces) < 10
