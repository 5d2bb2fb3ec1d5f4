"""The fast engine is used only where its ids are the reference's, and refused by name everywhere else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.tiny_tokenizers import (
    Config,
    added,
    byte_fallback_config,
    byte_level,
    byte_level_config,
    engine_ids,
    hard_texts,
    reference_ids,
    scheme,
    split,
)
from tokenmill.engines._disputes import DisputeFilter
from tokenmill.engines._eligibility import (
    SCHEMES,
    disputed_ranges_of,
    engine_config,
    refuses,
    strip_special_tokens,
)

pytest.importorskip("gigatoken")

GPT4 = SCHEMES["llama3"][0].replace(r"\s*[\r\n]+", r"\s*[\r\n]")
NFC = {"type": "NFC"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
SIZE = 1200


def metaspace(prepend: str, *, splits: bool = True) -> Config:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": splits}


def with_added(config: Config, *tokens: Config) -> Config:
    return {**config, "added_tokens": [*config["added_tokens"], *tokens]}


def changed(config: Config, **parts: Any) -> Config:
    return {**config, **parts}


ELIGIBLE: dict[str, Callable[[], Config]] = {
    "gpt2": byte_level_config,
    "gpt2 with a space in front": lambda: byte_level_config(byte_level(prefix=True)),
    "gpt2 with nfc": lambda: byte_level_config(normalizer=NFC),
    "an empty normalizer sequence": lambda: byte_level_config(normalizer={"type": "Sequence", "normalizers": []}),
    "cl100k as phi-4 spells it": lambda: byte_level_config(split(GPT4)),
    "a removed and inverted split": lambda: byte_level_config(
        split(*SCHEMES["qwen2"], behavior="Removed", invert=True)
    ),
    "ignored merges": lambda: byte_level_config(scheme("llama3"), ignore_merges=True),
    "added tokens": lambda: with_added(byte_level_config(), added("<b>", SIZE), added("b><", SIZE + 1)),
    "added tokens with nfc": lambda: with_added(byte_level_config(normalizer=NFC), added("<b>", SIZE)),
    "normalized added tokens": lambda: with_added(byte_level_config(), added("<b>", SIZE, normalized=True)),
    "special tokens that take spaces": lambda: with_added(
        byte_level_config(), added("<b>", SIZE, special=True, lstrip=True, single_word=True)
    ),
    "a token that starts with a special one": lambda: with_added(
        byte_level_config(), added("<a", SIZE, special=True), added("<a!", SIZE + 1)
    ),
    "llama2": byte_fallback_config,
    "gemma": lambda: changed(byte_fallback_config(), normalizer=MARK_SPACES, pre_tokenizer=GEMMA_SPLIT),
    "llama2 with added tokens": lambda: with_added(byte_fallback_config(), added("<b>", SIZE), added("  ", SIZE + 1)),
    **{
        f"metaspace {prepend}{' split' if splits else ''}": lambda prepend=prepend, splits=splits: changed(
            byte_fallback_config(), normalizer=None, pre_tokenizer=metaspace(prepend, splits=splits)
        )
        for prepend in ("always", "first", "never")
        for splits in (True, False)
    },
    **{f"scheme {name}": lambda name=name: byte_level_config(scheme(name)) for name in SCHEMES},
}


def mismatches(config: Config, *, parse_special: bool = False) -> list[str]:
    """Texts without disputed code points whose ids differ; the engine is loaded as tokenmill loads it."""
    confirms = DisputeFilter(disputed_ranges_of(config), {}).confirms
    texts = [text for text in hard_texts() if not confirms(text)]
    texts += [f"a{text} <b>  {text}<a!b><" for text in texts[::7]]
    ours = engine_ids(engine_config(config, parse_special=parse_special), texts)
    theirs = reference_ids(config, texts, parse_special=parse_special)
    return [text for text, x, y in zip(texts, ours, theirs, strict=True) if x != y]


@pytest.mark.parametrize("name", ELIGIBLE)
def test_eligible_structures_give_the_ids_of_the_reference(name: str) -> None:
    config = ELIGIBLE[name]()
    assert refuses(config) is None
    assert mismatches(config) == []


@pytest.mark.parametrize("name", ["gpt2", "added tokens with nfc", "scheme qwen2", "llama2 with added tokens"])
def test_special_tokens_are_parsed_like_the_reference_does(name: str) -> None:
    config = ELIGIBLE[name]()
    assert refuses(config, parse_special=True) is None
    assert mismatches(config, parse_special=True) == []


def model_change(**changes: Any) -> Config:
    return byte_level_config(**changes)


def without(config: Config, token: str) -> Config:
    del config["model"]["vocab"][token]
    merges = config["model"]["merges"]
    config["model"]["merges"] = [m for m in merges if token not in (m[0], m[1], m[0] + m[1])]
    return config


def with_word(config: Config, word: str) -> Config:
    config["model"]["vocab"].setdefault(word, len(config["model"]["vocab"]))
    return config


def with_first_merges_repeated(config: Config) -> Config:
    config["model"]["merges"] += copy.deepcopy(config["model"]["merges"][:200])
    return config


def with_byte_token_merge(config: Config) -> Config:
    vocab = config["model"]["vocab"]
    for part in ("<0", "<0x", "<0x0", "<0x0A"):
        vocab[part] = len(vocab)
    steps = [["<", "0"], ["<0", "x"], ["<0x", "0"], ["<0x0", "A"], ["<0x0A", ">"]]
    config["model"]["merges"] = [*steps, *config["model"]["merges"]]
    for character in "<0xA>":
        vocab.setdefault(character, len(vocab))
    return config


def before_split(step: Config) -> Config:
    pre_tokenizer = scheme("qwen2")
    pre_tokenizer["pretokenizers"].insert(0, step)
    return byte_level_config(pre_tokenizer)


def string_split() -> Config:
    return {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}


def with_prefix_after_split() -> Config:
    pre_tokenizer = scheme("qwen2")
    pre_tokenizer["pretokenizers"][-1] = byte_level(splits=False, prefix=True)
    return byte_level_config(pre_tokenizer)


def with_second_split() -> Config:
    pre_tokenizer = scheme("qwen2")
    pre_tokenizer["pretokenizers"][-1] = byte_level(splits=True)
    return byte_level_config(pre_tokenizer)


# name: configuration, part of the reason, a text on which gigatoken really differs (None: it
# refuses too, crashes, or differs only by chance).
TRAPS: dict[str, tuple[Callable[[], Config], str, str | None]] = {
    "no pre_tokenizer": (lambda: changed(byte_level_config(), pre_tokenizer=None), "no pre_tokenizer", "a 1"),
    "byte-level that does not split": (lambda: byte_level_config(byte_level(splits=False)), "not split", "a\n1'S"),
    "digits before a split": (
        lambda: before_split({"type": "Digits", "individual_digits": True}),
        "has Digits",
        "   \u1a80",
    ),
    "punctuation before a split": (
        lambda: before_split({"type": "Punctuation", "behavior": "Isolated"}),
        "has Punctuation",
        "...",
    ),
    "an extra string split": (lambda: before_split(string_split()), "splits at", "The mill ababab"),
    "a split that removes": (
        lambda: byte_level_config(split(*SCHEMES["qwen2"], behavior="Removed")),
        "does not keep",
        "a",
    ),
    "contiguous pieces": (
        lambda: byte_level_config(split(*SCHEMES["qwen2"], behavior="Contiguous")),
        "does not keep",
        "a\n1",
    ),
    "an inverted split in a sequence": (
        lambda: byte_level_config(split(*SCHEMES["deepseek"], behavior="Removed", invert=True)),
        "does not keep",
        "a1",
    ),
    "possessive cl100k": (
        lambda: byte_level_config(
            split(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
                r"|\s*[\r\n]|\s+(?!\S)|\s+"
            )
        ),
        "split pattern",
        "1234",
    ),
    "an unknown pattern": (lambda: byte_level_config(split(r"\w+|\W+")), "split pattern", None),
    "a nested sequence": (
        lambda: byte_level_config({"type": "Sequence", "pretokenizers": [scheme("qwen2"), byte_level(splits=False)]}),
        "has Sequence",
        None,
    ),
    "a space after each split": (with_prefix_after_split, "does not end in", "a1!a"),
    "two splits": (with_second_split, "does not end in", "'S"),
    "a suffix": (lambda: with_word(model_change(end_of_word_suffix="</w>"), "!</w>"), "end_of_word_suffix", "a!"),
    "a prefix": (lambda: model_change(continuing_subword_prefix="##"), "continuing_subword_prefix", None),
    "dropout": (lambda: model_change(dropout=0.5), "dropout", "the mill grinds every token of a text " * 20),
    "a pair merged twice": (lambda: with_first_merges_repeated(byte_level_config()), "a pair twice", None),
    "a missing byte": (lambda: without(byte_level_config(), "\u0100"), "some byte", None),
    "a token in two spellings": (
        lambda: with_word(with_word(byte_level_config(), "\u00e4\u00b8\u0143"), "\u4e2d"),
        "two spellings",
        None,
    ),
    "a raw token found by ignoring merges": (
        lambda: with_word(byte_level_config(ignore_merges=True), "\u6c34\u8eca"),
        "ignores merges",
        "\u6c34\u8eca",
    ),
    "an unknown model key": (lambda: model_change(subword_regularization=True), "unknown key", None),
    "another model": (lambda: changed(byte_level_config(), model={"type": "Unigram", "vocab": []}), "Unigram", None),
    "nfkc": (lambda: byte_level_config(normalizer={"type": "NFKC"}), "NFKC", None),
    "single_word": (
        lambda: with_added(byte_level_config(), added("<b>", SIZE, single_word=True)),
        "single_word",
        "a<b>c",
    ),
    "rstrip": (lambda: with_added(byte_level_config(), added("  ", SIZE, rstrip=True)), "rstrip", "    a"),
    "lstrip": (lambda: with_added(byte_level_config(), added("<b>", SIZE, lstrip=True)), "lstrip", None),
    "normalized with nfc": (
        lambda: with_added(byte_level_config(normalizer=NFC), added("\u00e9\u00e9", SIZE, normalized=True)),
        "matched after NFC",
        "e\u0301e\u0301x",
    ),
    "a token that nfc can make": (
        lambda: with_added(byte_level_config(scheme("qwen2"), NFC), added("Kk", SIZE)),
        "outcome of NFC",
        "\u212ak",
    ),
    "tokens matched in two passes": (
        lambda: with_added(byte_level_config(), added("qj", SIZE, normalized=True), added("jx", SIZE + 1)),
        "two passes",
        "qjx",
    ),
    "a special token that hides another": (
        lambda: with_added(byte_level_config(), added("<|y", SIZE, special=True), added("y>", SIZE + 1)),
        "hides parts",
        "<|y>",
    ),
    "a special token around another": (
        lambda: with_added(byte_level_config(), added("<|<b>|>", SIZE, special=True), added("<b>", SIZE + 1)),
        "hides parts",
        "<|<b>|>",
    ),
    "an id that is not next": (lambda: with_added(byte_level_config(), added("<b>", SIZE + 7)), "ignores", "<b>"),
    "an id beside the vocabulary's": (lambda: with_added(byte_level_config(), added("ab", SIZE)), "ignores", "ab"),
    "an empty added token": (lambda: with_added(byte_level_config(), added("", SIZE)), "empty", None),
    "a token that is special and not": (
        lambda: with_added(byte_level_config(), added("<b>", SIZE), added("<b>", SIZE, special=True)),
        "twice",
        "<b>",
    ),
    "ignored merges with byte fallback": (lambda: byte_fallback_config(ignore_merges=True), "ignores merges", None),
    "a missing byte with fallback": (
        lambda: without(byte_fallback_config(), "<0xE4>"),
        "no token for the byte",
        "\u4e1f",
    ),
    "a merge that spells a byte": (lambda: with_byte_token_merge(byte_fallback_config()), "byte token", "<0x0A>"),
    "more than marking spaces": (
        lambda: changed(byte_fallback_config(), normalizer={"type": "Sequence", "normalizers": [NFC, MARK_SPACES]}),
        "more than to mark",
        None,
    ),
    "single_word with byte fallback": (
        lambda: with_added(byte_fallback_config(), added("<b>", SIZE, single_word=True)),
        "single_word",
        "a<b>c",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_configurations_that_disagree_are_refused(name: str) -> None:
    make, reason, _ = TRAPS[name]
    refused = refuses(make())
    assert refused is not None
    assert reason in refused


@pytest.mark.parametrize("name", [name for name, (_, _, text) in TRAPS.items() if text is not None])
def test_gigatoken_loads_what_is_refused_and_really_disagrees(name: str) -> None:
    make, _, text = TRAPS[name]
    assert text is not None
    config = make()
    assert engine_ids(strip_special_tokens(config), [text]) != reference_ids(config, [text])


def test_flags_of_special_tokens_matter_only_when_they_are_parsed() -> None:
    config = with_added(byte_level_config(), added("<b>", SIZE, special=True, rstrip=True))
    assert refuses(config) is None
    assert "rstrip" in str(refuses(config, parse_special=True))


def test_cl100k_as_written_by_phi_4_is_given_to_the_engine_in_another_spelling() -> None:
    config = byte_level_config(split(GPT4))
    assert engine_ids(strip_special_tokens(config), ["a\n "]) != reference_ids(config, ["a\n "])
    assert engine_ids(engine_config(config), ["a\n "]) == reference_ids(config, ["a\n "])


def test_a_broken_configuration_is_refused_without_an_exception() -> None:
    for config in ({}, {"model": None}, {"model": {"vocab": [], "merges": 3}}, {"model": {"type": "BPE"}}):
        assert refuses(config) is not None


def test_only_special_tokens_are_stripped() -> None:
    config = with_added(byte_level_config(), added("<b>", SIZE), added("<c>", SIZE + 1, special=True))
    assert [token["content"] for token in strip_special_tokens(config)["added_tokens"]] == ["<b>"]
    assert len(config["added_tokens"]) == 3


def test_patterns_with_finer_classes_have_more_disputes() -> None:
    letters = disputed_ranges_of(byte_level_config(), exact=True)
    assert len(letters) < len(disputed_ranges_of(byte_level_config(scheme("o200k")), exact=True))
    assert len(letters) < len(disputed_ranges_of(byte_level_config(normalizer=NFC), exact=True))
    assert disputed_ranges_of(byte_fallback_config(), exact=True) == ()


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3", "qwen3", "gemma3", "bytebpe8k"])
def test_well_known_tokenizers_are_eligible(name: str, shared_data: Path) -> None:
    folder = shared_data / "tokenizers" / name
    if name == "gemma3":
        zstandard = pytest.importorskip("zstandard")
        with (folder / "tokenizer.json.zst").open("rb") as packed:
            data = zstandard.ZstdDecompressor().stream_reader(packed).read()
    else:
        data = (folder / "tokenizer.json").read_bytes()
    assert refuses(msgspec.json.decode(data)) is None


def test_wordpiece_is_not_eligible(shared_data: Path) -> None:
    config = json.loads((shared_data / "tokenizers/wordpiece16k/tokenizer.json").read_bytes())
    assert "WordPiece" in str(refuses(config))
