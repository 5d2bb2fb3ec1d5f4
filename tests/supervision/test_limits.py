"""Chat templates that loop, grow or nest without end: each ends with a sentence within a fixed number of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.running import sentence, tokenmill
from tests.support.tiny_tokenizers import byte_level_config
from tokenmill.errors import UsageError
from tokenmill.supervision.chat import ChatTemplate

TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]
LOOP = "{% for i in range(100000) %}"
MEGABYTE = '{% set big = "a" * 1000000 %}'


def doubling(start: str, step: str, end: str) -> str:
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set n.s = {step} %}}{{% endfor %}}{end}"


KEPT = "{% set ns = namespace(a='x') %}{% for i in range(60) %}"
GROWING = {
    "a value of itself twice": KEPT + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "by way of another name": KEPT + "{% set b = ns.a %}{% set ns.a = b ~ ns.a %}{% endfor %}",
    "by way of a namespace": "{% set q = namespace(a='x') %}{% set r = q %}{% set q.a = r.a + q['a'] %}",
    "by way of a loop": KEPT + "{% for x in [ns.a] %}{% set ns.a = x + x %}{% endfor %}{% endfor %}",
    "by way of a macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + KEPT + "{% set ns.a = d(ns.a) %}{% endfor %}",
    "by way of a block": KEPT + "{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}{% endfor %}",
    "a macro that calls itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro with a longer parameter": (
        "{% macro f(x, n) %}{% if n %}{{ f(x + x, n - 1) }}{% endif %}{% endmacro %}{{ f('x', 60) }}"
    ),
    "in a chain": "".join(f"{{% set a{n + 1} = a{n} + a{n} %}}" for n in range(20)),
    "one name again and again": "{% set a = 'x' %}" + "{% set a = a + a %}" * 20,
    "by what it is replaced with": KEPT + "{% set ns.a = ns.a | replace('x', 'xx') %}{% endfor %}",
    "a factor": "{{ messages[0].content * 9 }}",
    "a format": "{{ messages[0].content % 9 }}",
    "a long range": "{% for i in range(100000) %}{% endfor %}",
}
MILD = {
    "what a pass forgets": "{% set a = 'x' %}{% for i in range(60) %}{% set a = a ~ a %}{% endfor %}{{ a }}",
    "chatml": "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}",
    "a sum of messages": "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}",
    "branches": "{% for m in messages %}{% if a %}{% set c = m.x %}{% else %}{% set c = c %}{% endif %}{{ c }}{% endfor %}",
    "tools": "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% for i in range(messages | length) %}{% endfor %}",
}


@pytest.mark.parametrize(
    ("source", "is_mild"), [(s, False) for s in GROWING.values()] + [(s, True) for s in MILD.values()]
)
def test_only_templates_that_cannot_multiply_are_rendered_without_counting(source: str, is_mild: bool) -> None:
    template = ChatTemplate(source, {}, [])._template
    assert template.environment.counts_all is not is_mild


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(s='') %}{% for a in messages[0].content %}{% for b in messages[0].content %}"
        "{% set ns.s = ns.s + messages[0].content %}{% endfor %}{% endfor %}",
        "{% for a in messages[0].content %}{% for b in messages[0].content %}{{ messages[0].content }}{% endfor %}{% endfor %}",
        "{% for a in messages[0].content %}{% for b in messages[0].content %}{% for c in messages[0].content %}"
        "{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_passes_and_sizes_are_limited_without_counting(source: str) -> None:
    template = ChatTemplate(source, {}, [])
    assert not template._template.environment.counts_all
    with pytest.raises(UsageError, match="for one conversation; look in it for loops"):
        template.apply([{"role": "user", "content": "abcdefgh" * 100}, TALK[1]])


def test_a_template_that_cannot_be_used_ends_a_command_before_its_run_begins(tmp_path: Path) -> None:
    corpus = tmp_path / "chat.jsonl"
    corpus.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps(byte_level_config()))
    for template in ("\ud800{{ messages }}", "{{ " + "(" * 50_000, "{% if 1 %}"):
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|x|>"}))
        done = tokenmill(
            "tokenize", corpus, "-o", tmp_path / "store", "--tokenizer", tokenizer, "--messages-key", "messages"
        )
        assert sentence(done).startswith("the chat template")
        assert not (tmp_path / "store").exists()
