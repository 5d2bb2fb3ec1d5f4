"""Chat templates that loop, grow or nest without end: each ends with a sentence within a fixed number of steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import sentence, tokenmill
from tests.support.tiny_tokenizers import byte_level_config
from tokenmill.errors import UsageError
from tokenmill.supervision.chat import ChatTemplate
from tokenmill.text_batch import Refusal

TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]
LOOP = "{% for i in range(100000) %}"
MEGABYTE = '{% set big = "a" * 1000000 %}'


def doubling(start: str, step: str, end: str) -> str:
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set n.s = {step} %}}{{% endfor %}}{end}"


GROWING = {
    "a width": '{{ "%1000000000d" % 1 }}',
    "a width of bytes": '{{ "%1000000000d".encode() % 1 }}',
    "a width as an argument": '{{ "%*d" % (1000000000, 1) }}',
    "a width of format": '{{ "{:1000000000}".format(1) }}',
    "a width inside format": '{{ "{:{}}".format(1, 10**9) }}',
    "the format filter": '{{ "%1000000000s" | format("x") }}',
    "fields": '{{ "{0}{0}{0}{0}".format("a" * 900000) }}',
    "a repeated string": '{{ "a" * 10**9 }}',
    "a repeated list": "{{ ([1] * 10**9) | length }}",
    "center": '{{ "a" | center(10**9) }}',
    "a method": '{{ "a".ljust(10**9) }}',
    "a method that is got as an attribute": '{{ ("" | attr("center"))(10**9) }}',
    "tabs": r'{{ "\t".expandtabs(10**9) }}',
    "bytes": '{{ (1).to_bytes(10**9, "big") | length }}',
    "join": '{{ (range(100000) | list) | join("x" * 1000) }}',
    "join of a generator": '{{ range(100000) | map("string") | join("x" * 1000) }}',
    "join as a method": '{{ ("x" * 100000).join("y" * 100000) }}',
    "replace": '{{ ("a" * 100000) | replace("a", "b" * 100000) }}',
    "replace of nothing": '{{ ("a" * 100000).replace("", "b" * 100000) }}',
    "translate": '{{ ("a" * 100000).translate({97: "b" * 100000}) }}',
    "indent": r'{{ ("\n" * 100000) | indent(100000) }}',
    "indented JSON": "{{ [1, [2]] | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": '{{ 1.5 | round(10**9, "ceil") }}',
    "a filter block": "{% filter center(1000000000) %}x{% endfilter %}",
    "doubled by +": doubling('"ab"', "n.s + n.s", "{{ n.s | length }}"),
    "doubled by ~": doubling('"ab"', "n.s ~ n.s", "{{ n.s | length }}"),
    "a list twice in itself": doubling("[1]", "[n.s, n.s]", "{{ n.s }}"),
    "an object twice in itself": doubling("{}", "{'a': n.s, 'b': n.s}", "{{ n.s | tojson }}"),
    "a namespace twice in itself": doubling("0", "namespace(a=n.s, b=n.s)", "{{ n.s }}"),
    "a number": doubling("3", "n.s * n.s", "{{ n.s }}"),
    "a power": "{{ 9 ** 99999999 }}",
    "a number of many digits": '{{ ("1" * 1000000) | int(base=2) }}',
    "blocks of text": "{% set x %}aaaaaaaaaaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{% endset %}" * 40,
    "what is written": f'{LOOP}{{{{ "a" * 100000 }}}}{{% endfor %}}',
    "constants": f"{LOOP}{'x' * 1000}{{% endfor %}}",
}
LOOPING = {
    "loops": f"{LOOP}{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "loops with a condition": f"{LOOP}{{% for i in range(100000) if false %}}{{% endfor %}}{{% endfor %}}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "comparisons": MEGABYTE + '{% set other = "a" * 1000000 %}' + LOOP + "{% if big == other %}{% endif %}{% endfor %}",
    "searches": f'{MEGABYTE}{LOOP}{{% if "bbb" in big %}}{{% endif %}}{{% endfor %}}',
    "slices": f"{MEGABYTE}{LOOP}{{% set b = big[1:] %}}{{% endfor %}}",
    "methods": f"{MEGABYTE}{LOOP}{{% set b = big.upper() %}}{{% endfor %}}",
    "filters": f"{MEGABYTE}{LOOP}{{% set b = big | title %}}{{% endfor %}}",
    "tests": f"{MEGABYTE}{LOOP}{{% if big is lower %}}{{% endif %}}{{% endfor %}}",
    "sorting": f"{LOOP}{{% set b = range(9999) | sort %}}{{% endfor %}}",
    "lists in lists": '{{ range(100000) | select("in", range(9999) | reverse | list) | list }}',
    "comments of HTML": '{{ ("<!---->" * 100000) | striptags }}',
}


def render(source: str, messages: list[dict[str, Any]] = TALK) -> Any:
    return ChatTemplate(source, {}, []).apply(messages)


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_a_template_that_grows_is_refused_before_it_has_grown(source: str) -> None:
    with pytest.raises(UsageError, match=r"the chat template (makes|writes|takes) .*pass another with --chat-template"):
        render(source)


@pytest.mark.parametrize("source", LOOPING.values(), ids=LOOPING)
def test_a_template_that_loops_is_refused_after_some_millions_of_steps(source: str) -> None:
    started = time.process_time()
    with pytest.raises(UsageError, match=r"the chat template takes more than [\d,]+ steps for one conversation"):
        render(source)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% for a in [1] %}" * 300 + "{% endfor %}" * 300,
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "9" * 10_000 + " }}",
        "{{ " + "1+" * 20_000 + "1 }}",
        "x" * 1_000_000,
        "{{ [1, 2] | random }}",
        "\ud800{{ messages }}",
    ],
    ids=["brackets", "loops", "conditions", "digits", "sums", "length", "chance", "surrogate"],
)
def test_a_template_that_cannot_be_compiled_is_refused_in_a_sentence(source: str) -> None:
    with pytest.raises(UsageError, match="the chat template (is not valid|has)"):
        render(source)


def test_limits_grow_with_the_conversation() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | upper | replace('A', 'bb') }}\n{% endfor %}"
    applied = render(source, [{"role": "user", "content": "a" * 3_000_000}, *TALK])
    assert not isinstance(applied, Refusal)
    assert len(applied[0]) > 6_000_000


def test_a_template_may_take_more_steps_for_a_long_conversation() -> None:
    source = (
        "{% for c in messages[0].content %}{% set a = 1 * 1 %}{% set b = 1 * 1 %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    applied = render(source, [{"role": "user", "content": "a" * 200_000}, TALK[1]])
    assert not isinstance(applied, Refusal)
    assert applied[0].endswith("hello to you")


def test_a_usual_template_leaves_almost_all_of_its_budget() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ m.content | trim }}{% endfor %}", {}, [])
    template.apply(TALK)
    budget = template._template.environment.budget
    assert budget.num_steps - budget.steps_left < 1000


def test_a_run_ends_with_the_sentence(tmp_path: Path) -> None:
    corpus, source = tmp_path / "chat.jsonl", tmp_path / "loop.jinja"
    corpus.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9)
    source.write_text(LOOPING["loops"])
    arguments = ["--tokenizer", "bytes", "--messages-key", "messages", "--chat-template", source, "--on-error", "skip"]
    done = tokenmill("tokenize", corpus, "-o", tmp_path / "store", *arguments)
    assert sentence(done).startswith("the chat template takes more than")
    assert not (tmp_path / "store" / "manifest.json").exists()


GROWING = {
    "a value of itself twice": "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "by way of another name": "{% set a = 'x' %}{% for i in range(9) %}{% set b = a %}{% set a = b ~ a %}{% endfor %}",
    "by way of a namespace": "{% set q = namespace(a='x') %}{% set r = q %}{% set q.a = r.a + q['a'] %}",
    "by way of a loop": "{% set ns = namespace(a='x') %}{% for x in [ns.a] %}{% set ns.a = x + x %}{% endfor %}",
    "by way of a macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set a = 'x' %}{% set a = d(a) %}",
    "a macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "in a chain": "".join(f"{{% set a{n + 1} = a{n} + a{n} %}}" for n in range(20)),
    "by what it is replaced with": "{% set a = 'x' %}{% for i in range(60) %}{% set a = a | replace('x', 'xx') %}{% endfor %}",
    "a factor": "{{ messages[0].content * 9 }}",
    "a format": "{{ messages[0].content % 9 }}",
    "a long range": "{% for i in range(100000) %}{% endfor %}",
}
MILD = {
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
