"""The probe strings of the parity check cover what is rare in any corpus."""

from __future__ import annotations

import json
import time
import unicodedata

import pytest

from tests.support.tiny_tokenizers import byte_fallback_config, byte_level_config, engine_ids, reference_ids, scheme
from tokenmill.engines._disputes import DisputeFilter, disputed_ranges
from tokenmill.engines._eligibility import disputed_ranges_of, engine_config
from tokenmill.engines.probe_strings import make_probe_strings

SPECIALS = ["<|endoftext|>", "<s>", "[MASK]"]
CJK_AND_HANGUL = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x20000, 0x3FFFF))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return make_probe_strings(SPECIALS)


def is_alphabetic(code_point: int) -> bool:
    """Assigned, not private, and not of the two scripts that are sampled."""
    if any(first <= code_point <= last for first, last in CJK_AND_HANGUL):
        return False
    return unicodedata.category(chr(code_point)) not in ("Cn", "Co", "Cs")


def test_every_assigned_character_occurs_beside_a_letter_and_beside_a_space(texts: list[str]) -> None:
    beside_letter, beside_space = set(), set()
    for text in texts:
        for before, character, after in zip(" " + text, text, text[1:] + " ", strict=False):
            if "a" in (before, after):
                beside_letter.add(character)
            if " " in (before, after):
                beside_space.add(character)
    disputed = DisputeFilter(disputed_ranges(True), {})
    expected = {chr(c) for c in range(0x110000) if is_alphabetic(c) and not disputed.confirms(chr(c))}
    assert len(expected) > 30_000
    assert expected <= beside_letter
    assert expected <= beside_space


def test_undisputed_characters_do_not_share_a_text_with_disputed_ones(texts: list[str]) -> None:
    """The reference encodes a text with a disputed code point, so it shows nothing about the engine."""
    confirms = DisputeFilter(disputed_ranges(True, exact=True), {}).confirms
    disputed = [text for text in texts if confirms(text)]
    assert 50 < len(disputed) < 300
    assert max(map(len, disputed)) < 100


def test_each_range_of_newly_assigned_characters_is_there(texts: list[str]) -> None:
    everything = set("".join(texts))
    assert all(chr(first) in everything for first, _ in disputed_ranges(True, exact=True))


def test_special_tokens_occur_alone_embedded_repeated_and_broken(texts: list[str]) -> None:
    have = set(texts)
    for token in SPECIALS:
        assert {token, f"a{token}b", f" {token} ", token[:-1], token[1:]} <= have
        assert any(token * 2 in text for text in texts)


@pytest.mark.parametrize(
    "part",
    [
        "\x00",
        "\ufeff",
        "\u200d",
        "\u2581",
        "\r\n",
        "\n\r",
        " \t",
        "'LL",
        "\u0301" * 9,
        "\u202b",
        "1234",
        "\U0001f1e6",
        "a" * 500,
    ],
)
def test_known_troublemakers_are_there(part: str, texts: list[str]) -> None:
    assert any(part in text for text in texts)


def test_texts_end_in_all_kinds_of_white_space(texts: list[str]) -> None:
    have = set(texts)
    assert {"a\n", "a\n ", "a \n", "a\r\n", "a\t\n ", "a\n\n", "a  ", "a\u3000", " ", "\n", ""} <= have


def test_the_set_is_the_same_each_time_and_quick(texts: list[str]) -> None:
    start = time.perf_counter()
    assert make_probe_strings(SPECIALS) == texts
    assert time.perf_counter() - start < 2
    assert 300_000 < sum(len(text.encode()) for text in texts) < 600_000


def test_thousands_of_special_tokens_do_not_make_the_set_large(texts: list[str]) -> None:
    many = make_probe_strings([f"<|reserved_{number}|>" for number in range(6000)])
    assert sum(map(len, many)) < sum(map(len, texts)) + 300_000
    assert any("<|reserved_5999|>" in text for text in many)


@pytest.mark.parametrize(
    "config",
    [byte_level_config(), byte_level_config(scheme("qwen2"), {"type": "NFC"}), byte_fallback_config()],
    ids=["gpt2", "qwen2", "llama2"],
)
def test_engine_and_reference_agree_on_all_but_the_disputed_ones(config: dict[str, object], texts: list[str]) -> None:
    pytest.importorskip("gigatoken")
    confirms = DisputeFilter(disputed_ranges_of(config), {}).confirms
    agreed = [text for text in texts if not confirms(text)]
    assert len(agreed) > 0.9 * len(texts)
    loaded = json.loads(json.dumps(engine_config(config)))
    assert engine_ids(loaded, agreed) == reference_ids(config, agreed)
