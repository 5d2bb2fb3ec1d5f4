"""Documents on which engine and reference may disagree are always found, from ids alone."""

from __future__ import annotations

import json
import sys
import unicodedata
from bisect import bisect_right
from functools import lru_cache
from importlib import metadata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_tokenizers import byte_level_config, engine_ids, reference_ids, scheme
from tokenmill.engines import _disputes as disputes
from tokenmill.engines._disputes import DisputeFilter, Ranges, disputed_ranges, made_for, merge_ranges, versions_match
from tokenmill.engines.decoder import byte_alphabet

gigatoken = pytest.importorskip("gigatoken")

FEW: Ranges = ((0x88F, 0x88F), (0xA7CE, 0xA7CF), (0x323B0, 0x33479))
LISTS = {
    "few": FEW,
    "letters": disputed_ranges(False, letters_only=True, exact=True),
    "classes": disputed_ranges(False, exact=True),
    "nfc": disputed_ranges(True, exact=True),
    "cautious": disputed_ranges(True, exact=False),
}


def holds(text: str, ranges: Ranges) -> bool:
    places = [bisect_right(ranges, (ord(character), 0x110000)) - 1 for character in text]
    return any(place >= 0 and ranges[place][1] >= ord(text[i]) for i, place in enumerate(places))


def disputed_characters(ranges: Ranges) -> st.SearchStrategy[str]:
    return st.sampled_from(ranges).flatmap(lambda pair: st.integers(*pair)).map(chr)


def neighbours(ranges: Ranges) -> st.SearchStrategy[str]:
    """Undisputed characters that share all bytes but the last with a disputed one."""
    edges = sorted({edge for first, last in ranges for edge in (first - 1, last + 1)})
    return st.sampled_from([chr(e) for e in edges if e < 0xD800 or 0xDFFF < e < 0x110000])


@lru_cache
def texts_of(ranges: Ranges) -> st.SearchStrategy[list[str]]:
    character = st.one_of(st.characters(codec="utf-8"), neighbours(ranges), disputed_characters(ranges))
    return st.lists(st.text(character, max_size=8), min_size=1, max_size=6)


@st.composite
def documents(draw: st.DrawFn, ranges: Ranges) -> list[list[bytes]]:
    """Documents that are cut into tokens at any byte, the worst that a tokenizer could do."""
    cut = []
    for text in draw(texts_of(ranges)):
        data = text.encode()
        inner = draw(st.sets(st.integers(1, len(data) - 1))) if len(data) > 1 else set()
        cut.append([data[start:stop] for start, stop in pairwise([0, *sorted(inner), len(data)])] if data else [])
    return cut


@pytest.mark.parametrize("name", LISTS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_flagged_and_confirmed_documents_are_exactly_those_with_a_disputed_code_point(
    name: str, data: st.DataObject
) -> None:
    ranges = LISTS[name]
    cut = data.draw(documents(ranges))
    numbers: dict[bytes, int] = {}
    ids = [numbers.setdefault(token, len(numbers)) for tokens in cut for token in tokens]
    vocabulary = {number: token for token, number in numbers.items()}
    offsets = np.cumsum([0, *map(len, cut)])
    found = DisputeFilter(ranges, vocabulary)
    texts = [b"".join(tokens).decode() for tokens in cut]
    flagged = found.flag(np.array(ids, np.uint32), offsets).tolist()
    expected = [i for i, text in enumerate(texts) if holds(text, ranges)]
    assert set(expected) <= set(flagged)
    assert [i for i in flagged if found.confirms(texts[i])] == expected
    assert flagged == sorted(set(flagged))


def test_a_token_that_ends_inside_a_character_is_a_suspect_only_if_the_rest_can_follow() -> None:
    # U+A7CE is EA 9F 8E; Hangul begins with EA too.
    found = DisputeFilter(FEW, {0: b"\xea", 1: b"\x9f\x8e", 2: b"\xb0\x80", 3: b"a", 4: b"\x9f"})
    assert found.suspects.tolist() == [0]
    offsets = np.array([0, 2, 2, 5, 7])
    assert found.flag(np.array([0, 2, 3, 0, 1, 0, 4], np.uint32), offsets).tolist() == [2, 3]


def test_many_and_few_suspects_give_the_same_answer() -> None:
    vocabulary = {number: bytes([number]) for number in range(256)}
    texts = ["plain", "\u0378", "한국어", "\ua7ce", "x" * 50 + "\U000323b0"]
    ids = np.frombuffer("".join(texts).encode(), np.uint8).astype(np.uint32)
    offsets = np.cumsum([0, *(len(text.encode()) for text in texts)])
    few, many = (DisputeFilter(LISTS[name], vocabulary) for name in ("few", "cautious"))
    assert len(few.suspects) <= disputes._MAX_COMPARISONS < len(many.suspects)
    for found in (few, many):
        flagged = found.flag(ids, offsets).tolist()
        assert [texts[i] for i in flagged if found.confirms(texts[i])][-2:] == texts[-2:]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_ids_of_any_width_are_looked_up(dtype: type) -> None:
    found = DisputeFilter(FEW, {7: "\ua7ce".encode(), 8: b"a"})
    assert found.flag(np.array([8, 7, 8], dtype), np.array([0, 1, 3])).tolist() == [1]


def test_no_documents_no_ranges_and_no_suspects_are_fine() -> None:
    empty = np.zeros(0, np.uint32)
    assert DisputeFilter(FEW, {0: b"a"}).flag(empty, np.array([0, 0, 0])).tolist() == []
    nothing = DisputeFilter((), {0: "\ua7ce".encode()})
    assert nothing.flag(np.array([0], np.uint32), np.array([0, 1])).tolist() == []
    assert not nothing.confirms("\ua7ce")


def test_a_tokenizers_vocabulary_gives_suspects_that_find_every_disputed_document() -> None:
    config = byte_level_config(scheme("o200k"))
    tokenizer = gigatoken.Tokenizer.from_json(json.dumps(config))
    ranges = LISTS["classes"]
    found = DisputeFilter(ranges, tokenizer.vocab)
    texts = [f"the {chr(code_point)}mill" for first, last in ranges for code_point in range(first, last + 1, 7)]
    ids = [tokenizer.encode(text) for text in texts]
    offsets = np.cumsum([0, *map(len, ids)])
    assert found.flag(np.concatenate(ids), offsets).tolist() == list(range(len(texts)))


def test_the_lists_are_sorted_and_contain_each_other() -> None:
    for ranges in LISTS.values():
        assert ranges == merge_ranges(ranges)
        assert all(0x80 <= first <= last < 0x110000 for first, last in ranges)
        assert not any(first <= 0xDFFF and last >= 0xD800 for first, last in ranges)

    def code_points(name: str) -> set[int]:
        return {code_point for first, last in LISTS[name] for code_point in range(first, last + 1)}

    assert code_points("letters") < code_points("classes") < code_points("nfc") < code_points("cautious")


def test_the_first_bytes_of_disputed_characters_are_known() -> None:
    for ranges in LISTS.values():
        leads = DisputeFilter(ranges, {}).leads
        seen = {chr(code_point).encode()[0] for first, last in ranges for code_point in range(first, last + 1)}
        assert {0xC0 + bit for bit in range(64) if leads >> bit & 1} == seen


def test_ranges_that_touch_are_merged() -> None:
    assert merge_ranges([(9, 12), (1, 3), (4, 4), (10, 11)]) == ((1, 4), (9, 12))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("letters", "\U0003298a'll"),
        ("letters", " \U00011de9"),
        ("classes", " \u1aeb"),
        ("classes", "\u0295Aa"),
        ("nfc", "\u0361\U00010d6a"),
        ("nfc", "\u0952\u0eba"),
        ("nfc", "\U000105d2\u0307"),
        ("nfc", "\U000105c9"),
    ],
)
def test_known_disagreements_are_listed(name: str, text: str) -> None:
    assert DisputeFilter(LISTS[name], {}).confirms(text)


@pytest.mark.skipif(not versions_match(), reason="other library versions than disputes.json was measured with")
@pytest.mark.parametrize(
    ("pattern", "normalizer", "text"),
    [
        ("gpt2", None, "\u088fa"),
        ("o200k", None, "\u0295Aa"),
        ("qwen2", {"type": "NFC"}, "x\u0eba\u0334"),
        ("qwen2", {"type": "NFC"}, "\U000105d2\u0307"),
    ],
)
def test_listed_code_points_really_are_disputed(pattern: str, normalizer: dict[str, str] | None, text: str) -> None:
    config = byte_level_config(scheme(pattern), normalizer)
    # Joining the character's last byte with what follows shows whether there is a boundary between them.
    stand_in = {byte: character for character, byte in byte_alphabet().items()}
    left, right = (stand_in[byte] for byte in (text[0].encode()[-1], text[1].encode()[0]))
    if left + right not in config["model"]["vocab"]:
        config["model"]["vocab"][left + right] = len(config["model"]["vocab"])
        config["model"]["merges"].insert(0, [left, right])
    assert engine_ids(config, [text]) != reference_ids(config, [text])


@pytest.mark.parametrize("pattern", ["o200k", "deepseek"])
def test_code_points_outside_the_lists_are_split_alike(pattern: str) -> None:
    confirms = DisputeFilter(disputed_ranges(False), {}).confirms
    blocks = (*range(0x80, 0x3400), *range(0xA000, 0xAC00), *range(0xFA00, 0x12000), *range(0x1D000, 0x1FC00))
    characters = [character for character in map(chr, blocks) if not confirms(character)]
    texts = [
        "".join([f"a{c}A1{c}1!!{c}! {c}a {c}Aa" for c in characters[i : i + 64]]) for i in range(0, len(characters), 64)
    ]
    config = byte_level_config(scheme(pattern))
    assert engine_ids(config, texts) == reference_ids(config, texts)


def test_nfc_of_code_points_outside_the_lists_is_alike() -> None:
    confirms = DisputeFilter(disputed_ranges(True), {}).confirms
    characters = [chr(c) for c in (*range(0xC0, 0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x12000))]
    characters = [character for character in characters if not confirms(character)]
    texts = ["".join([f"x{c}\u0334x\u0345{c}a{c}\u0301" for c in characters[i : i + 64]]) for i in range(0, 20000, 64)]
    texts += [unicodedata.normalize("NFD", text) for text in texts]
    config = byte_level_config(scheme("qwen2"), {"type": "NFC"})
    assert engine_ids(config, texts) == reference_ids(config, texts)


def test_other_library_versions_get_the_cautious_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        return "9.9.9" if name == "tokenizers" else made_for()[name]

    versions_match.cache_clear()
    monkeypatch.setattr(metadata, "version", version)
    try:
        assert not versions_match()
        assert versions_match("tiktoken")
        assert disputed_ranges(False) == disputed_ranges(True) == LISTS["cautious"]
        assert disputed_ranges(False, reference="tiktoken") == LISTS["classes"]
        assert not versions_match("a library that was not measured")
    finally:
        versions_match.cache_clear()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Unicode 13, the list is made with 14")
def test_the_cautious_list_has_everything_that_is_not_assigned() -> None:
    unassigned = [c for c in range(0x30000) if unicodedata.category(chr(c)) == "Cn"]
    confirms = DisputeFilter(LISTS["cautious"], {}).confirms
    assert all(confirms(chr(code_point)) for code_point in unassigned[::11])
