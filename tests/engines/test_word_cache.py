"""The cache of words: cut only where the reference splits in any case, whatever stands around."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import make_texts
from tests.support.structures import NANOCHAT, STRUCTURES, Config, byte_level, normalizers, replace, sequence, split
from tests.support.tiny_tokenizers import added, byte_level_config, hard_texts
from tokenmill.engines import Engine, choose, create, load_tokenizer, make_reference
from tokenmill.engines import wordcache as wordcache_module
from tokenmill.engines._characters import ODD, make_groups
from tokenmill.engines._cutting import UncuttableError, find_cuts
from tokenmill.engines._patterns import UnknownPatternError, read_pattern
from tokenmill.errors import UsageError
from tokenmill.pipeline.tokenize_any import tokenize

DIGITS = {"type": "Digits", "individual_digits": False}
OWN_PATTERNS = [
    NANOCHAT,
    "a+| ?[^ a]+| +",
    r"\p{L}+|\p{N}{1,2}|[^\p{L}\p{N}]+",
    r"(?i:'s|'t)|[A-Za-z]+|\d|[^A-Za-z\d]",
    r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+",
    r"[\r\n]+|[^\r\n]",
]


def write(folder: Path, config: Config) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def lists(engine: Engine, texts: list[str]) -> list[list[int]]:
    batch = engine.encode(texts)
    return [ids.tolist() for ids in np.split(batch.ids, batch.offsets[1:-1])]


def differing(config: Config, folder: Path, texts: list[str], **options: Any) -> list[str]:
    """The texts that get other ids from the cache of words than from the reference."""
    tokenizer = load_tokenizer(write(folder, config))
    found = lists(create("wordcache", tokenizer, **options), texts)
    expected = lists(make_reference(tokenizer, **options), texts)
    return [text for text, ours, theirs in zip(texts, found, expected, strict=True) if ours != theirs]


@pytest.mark.parametrize("name", [name for name in STRUCTURES if STRUCTURES[name].model == "BPE"])
@pytest.mark.parametrize("normalizer", [None, "NFC", "NFKD", "Lowercase"])
def test_merges_that_cross_every_boundary_do_not_cross_a_cut(name: str, normalizer: str | None, tmp_path: Path) -> None:
    config = byte_level_config(STRUCTURES[name].pre_tokenizer, {"type": normalizer} if normalizer else None)
    assert differing(config, tmp_path, hard_texts()) == []


@pytest.mark.parametrize("pattern", OWN_PATTERNS)
def test_split_patterns_of_ones_own_are_cut_exactly(pattern: str, tmp_path: Path) -> None:
    config = byte_level_config(sequence(split(pattern), byte_level(splits=False)))
    assert differing(config, tmp_path, hard_texts()) == []


def test_kept_tokens_are_not_cut(tmp_path: Path) -> None:
    config = byte_level_config()
    next_id = len(config["model"]["vocab"])
    contents = ["aq the", "<|y z|>", "'s q", "\n\nq", "e\u0301 1"]
    config["added_tokens"] += [added(content, next_id + i) for i, content in enumerate(contents)]
    texts = [left + content + right for content in contents for left in ("", "x", " ") for right in ("", "y", " z")]
    assert differing(config, tmp_path / "own", [*hard_texts(), *texts]) == []
    config["added_tokens"][-1]["special"] = True
    assert differing(config, tmp_path / "special", [*hard_texts(), *texts], special_tokens="parse") == []


REFUSED: dict[str, tuple[Config, str]] = {
    "prefix": ({"pre_tokenizer": {**byte_level(splits=True), "add_prefix_space": True}}, "add_prefix_space"),
    "no split": ({"pre_tokenizer": byte_level(splits=False)}, "before every word"),
    "nothing": ({"pre_tokenizer": None}, "before every word"),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "x"}}, "normalizer is Prepend"),
    "strip": ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "strip_left"),
    "spaces": ({"normalizer": replace("", String=" ")}, "replaces"),
    "regex": ({"normalizer": replace("x", Regex="a+")}, "replaces"),
    "lookbehind": (
        {"pre_tokenizer": sequence(split(r"(?<=a)b| ?[^ ]+| +"), byte_level(splits=False))},
        "not understood",
    ),
    "merged": (
        {"pre_tokenizer": sequence({**split(" "), "behavior": "MergedWithNext"}, byte_level(splits=False))},
        "MergedWithNext",
    ),
    "scripts": ({"pre_tokenizer": sequence({"type": "UnicodeScripts"}, byte_level(splits=True))}, "UnicodeScripts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_look_across_a_place_is_refused(name: str) -> None:
    change, reason = REFUSED[name]
    with pytest.raises(UncuttableError, match=reason):
        find_cuts({**byte_level_config(), **change}, parse_special=False)


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_added_tokens_that_look_around_are_refused(flag: str, tmp_path: Path) -> None:
    config = byte_level_config()
    config["added_tokens"].append(added("aqb", len(config["model"]["vocab"]), **{flag: True}))
    with pytest.raises(UncuttableError, match=flag):
        find_cuts(config, parse_special=False)
    tokenizer = load_tokenizer(write(tmp_path, config))
    with pytest.raises(UsageError, match=f"wordcache cannot be used for .*{flag}"):
        choose(tokenizer, "wordcache")
    assert choose(tokenizer).engine == "huggingface"


@pytest.mark.parametrize(
    "pattern",
    [
        "a|(",
        "[a",
        "^a",
        r"\bword",
        "(?<!a)b",
        "a{,3}?",
        "[[:alpha:]]",
        r"\p{Nope}",
        "a&&b]",
        "x*",
        "(" * 900 + "a" + ")" * 900,
        "a?" * 5000,
        "(?i:ß)a",
        "a{2}+",
    ],
)
def test_unknown_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnknownPatternError):
        read_pattern(pattern)


def test_a_pattern_tells_which_characters_a_match_can_join() -> None:
    found = read_pattern(r" ?\p{L}+|\p{N}{1,2}|[^\s\p{L}\p{N}]++[\r\n]*|\s+(?!\S)|\s+")
    joined = {a + b for a in "a1!\n " for b in "a1!\n " if found.joins[ord(a), ord(b)]}
    assert joined == {"aa", " a", "11", "!!", "!\n", "\n\n", "\n ", "  ", " \n", " 1", " !", "\na", "\n1", "\n!"}
    assert set(map(ord, "aZ19!~ \n\t")) <= found.covers


def test_a_possessive_part_covers_nothing_after_it() -> None:
    assert ord("a") not in read_pattern("[ab]?+a|b").covers
    assert ord("a") in read_pattern("[b]?+a|b").covers


def test_white_space_ends_no_other_character_after_normalizing() -> None:
    """A place before a space is safe because what is before it does not become white space."""
    groups = make_groups(())
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        for code in (code for code in range(128, 0x110000) if not 0xD800 <= code < 0xE000):
            normal = unicodedata.normalize(form, chr(code))
            assert not normal[-1:].isspace() or groups[code] == ODD, hex(code)


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Unigram model in which most words have several best ways, and `<unk>` is a piece."""
    pieces = [["<unk>", 0.0], ["▁", -1.0], *([piece, -2.0] for piece in "abcdef"), ["▁a", -2.5]]
    pieces += [[left + right, -3.0] for left in "abcdef" for right in "abcdef"]
    pieces += [["abc", -5.0], ["bcd", -5.0], ["def", -4.9999999]]
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    structure = STRUCTURES["unigram-nfkc"]
    parts = {"normalizer": structure.normalizer, "pre_tokenizer": structure.pre_tokenizer}
    config = {"version": "1.0", "added_tokens": [], **parts, "post_processor": None, "decoder": None, "model": model}
    return write(tmp_path_factory.mktemp("uniform"), {**config, "truncation": None, "padding": None})


def test_words_with_two_best_ways_are_left_to_the_library(uniform: str) -> None:
    tokenizer = load_tokenizer(uniform)
    random = np.random.default_rng(1)
    words = ["".join(random.choice(list("abcdef"), size)) for size in range(1, 40) for _ in range(60)]
    texts = [*words, " ".join(words), "<unk><unk> a<unk>b", "xyz abc", "▁a ▁▁b", "  abc  ", "", " "]
    assert lists(create("wordcache", tokenizer), texts) == lists(make_reference(tokenizer), texts)


@pytest.mark.parametrize("changed", [{"model": "empty"}, {"model": "twice"}, {"pre_tokenizer": "never"}])
def test_a_unigram_model_that_is_not_read_in_c_is_exact(changed: dict[str, str], uniform: str, tmp_path: Path) -> None:
    config = json.loads((Path(uniform) / "tokenizer.json").read_text("utf-8"))
    if "never" in changed.values():
        config["pre_tokenizer"]["prepend_scheme"] = "never"
    else:
        config["model"]["vocab"].append(["" if changed["model"] == "empty" else "ab", -9.0])
    if "twice" in changed.values():
        config["model"]["vocab"][-1][0] = "zz"
    assert differing(config, tmp_path, ["abc  def abcabc", "fedcba " * 9]) == []


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e12, 1e15])
def test_scores_whose_sums_round_are_added_by_the_library(scale: float, uniform: str, tmp_path: Path) -> None:
    config = json.loads((Path(uniform) / "tokenizer.json").read_text("utf-8"))
    for seed in range(4):
        random = np.random.default_rng(seed)
        score = {letter: -random.random() * scale for letter in "abcdef"}
        pieces = {"<unk>": 0.0, "▁": -random.random() * scale, **score}
        for size in random.integers(2, 5, 60):
            piece = "".join(random.choice(list(score), size))
            pieces[piece] = sum(score[letter] for letter in piece)
        config["model"]["vocab"] = list(pieces.items())
        texts = ["".join(random.choice(list(score), size)) for size in random.integers(1, 60, 150)]
        assert differing(config, tmp_path / str(seed), texts) == []


def test_normalizers_in_a_row_are_cut_exactly(tmp_path: Path) -> None:
    steps = normalizers({"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, replace("Q", String="'"))
    assert differing(byte_level_config(None, steps), tmp_path, hard_texts()) == []


def test_forgetting_words_bounds_memory_and_changes_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordcache_module, "MOST_BYTES", 200_000)
    tokenizer = load_tokenizer(write(tmp_path, byte_level_config()))
    engine, reference = create("wordcache", tokenizer), make_reference(tokenizer)
    sizes = []
    for seed in range(40):
        texts = [f"{text} {seed * 1000 + i}x{i}" for i, text in enumerate(make_texts(50, seed=seed) * 10)]
        assert lists(engine, texts) == lists(reference, texts)
        sizes.append(engine._words.num_bytes)  # type: ignore[attr-defined]
    assert max(sizes) < 600_000
    assert any(later < earlier for earlier, later in pairwise(sizes))


def test_after_an_error_of_the_library_the_cache_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(write(tmp_path, byte_level_config()))
    engine = create("wordcache", tokenizer)
    texts = make_texts(20, seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_encode_words", lambda words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.encode(texts)
    assert lists(engine, texts) == lists(make_reference(tokenizer), texts)


@pytest.mark.parametrize(
    "data",
    [b"\xff", b'"\xff', b'a"\xff', b'a\xff"b', b'"\xff"\xff"', b'\xe2"\xff', b'"\xff"' * 3 + b"\xff\xff", b"a\xe2\x82"],
)
def test_bytes_that_are_no_packed_texts_are_refused(data: bytes) -> None:
    table = wordcache_module.Words(make_groups(()), bytes(1 << 16))
    with pytest.raises(ValueError, match="packed|utf-8"):
        table.encode(data, lambda _: (np.zeros(0, np.uint32), np.zeros(1, np.int64)), 2)
    assert table.num_bytes == 0


def test_ids_that_do_not_belong_to_the_words_are_refused() -> None:
    table = wordcache_module.Words(make_groups(()), bytes([1]) * (1 << 16))
    for edges in ([0], [0, 1], [0, 1, 0, 3], [1, 1, 2, 3], [0, 1, 2, 4], [0, -1, 2, 3], [0, 1 << 62, 2, 3]):

        def give(words: list[str], edges: list[int] = edges) -> tuple[object, object]:
            words.clear()
            return np.zeros(3, np.uint32), np.array(edges, np.int64)

        with pytest.raises(ValueError, match="do not belong to the texts"):
            table.encode(b"a b", give, 2)


def test_without_the_module_in_c_the_reference_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wordcache_module, "Words", None)
    config = byte_level_config(STRUCTURES["digits"].pre_tokenizer)
    choice = choose(load_tokenizer(write(tmp_path / "digits", config)))
    assert choice.engine == "huggingface"
    assert choice.note is not None
    assert "not compiled" in choice.note


def test_stores_of_both_engines_have_the_same_tokens(tmp_path: Path, tiny_corpus: Path) -> None:
    tokenizer = write(tmp_path / "digits", byte_level_config(STRUCTURES["digits"].pre_tokenizer))
    options: Any = {"tokenizer": tokenizer, "on_error": "skip", "workers": 1, "eos_token": "<|x|>"}
    shards = []
    for engine in ("auto", "wordcache", "huggingface"):
        store = tokenize(str(tiny_corpus), tmp_path / engine, engine=engine, **options)
        assert store.manifest.engine.name == ("huggingface" if engine == "huggingface" else "wordcache")
        shards.append([path.read_bytes() for path in sorted((tmp_path / engine).glob("*/*.bin"))])
    assert shards[0] == shards[1] == shards[2]
