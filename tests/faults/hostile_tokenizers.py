"""Damaged and hostile tokenizer files: each must give a store or one sentence, in bounded time, and print nothing.

`python -m tests.faults.hostile_tokenizers --count 500` makes that many files of each kind, tries each with
`tokenmill.tokenize`, and prints a line of counts per kind. It exits with 1 if a file gave anything else: a traceback,
lines of a panic, a sentence that does not name the tokenizer, a hang, or a directory with an unfinished run.
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults._tally import Tally
from tests.support.tiny_tokenizers import added, byte_level, byte_level_config, split

TEXTS = [
    "The cat sat.",
    "100% of it, isn't it?",
    "",
    "  two  spaces\n\n",
    "é中😀 <|x|>",
    "a" * 60 + "!",
    " " * 60 + "x",
]
SLOW_SECONDS = 30.0
"""A file that takes longer counts as a hang; the longest time limit is ten seconds."""
EOS = json.dumps({"eos_token": "<|x|>"}).encode()

Change = Callable[[dict[str, Any]], object]


class Hostile(NamedTuple):
    """A tokenizer: its files, and which of them is named to `tokenmill.tokenize`."""

    name: str
    main_file: str
    files: dict[str, bytes]


class Outcome(NamedTuple):
    """The outcome: `store`, `sentence`, or what is wrong."""

    kind: str
    said: str


# tokenizer.json


def _set(*path: Any, to: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        at: Any = config
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


def _drop(*path: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        at: Any = config
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


def _id_of_a(to: Any) -> Change:
    return _set("model", "vocab", "a", to=to)


def _replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def _template(token: str, number: int) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}


def _model(**model: Any) -> Change:
    """Replace the model, and give `<|x|>` its id there."""

    def change(config: dict[str, Any]) -> None:
        config["model"], vocab = model, model["vocab"]
        names = vocab if isinstance(vocab, dict) else [piece[0] for piece in vocab]
        config["added_tokens"][0]["id"] = list(names).index("<|x|>") if "<|x|>" in names else 0

    return change


def _many_added(config: dict[str, Any]) -> None:
    start = len(config["model"]["vocab"])
    config["added_tokens"] += [added(f"<extra {i}>", start + i) for i in range(1_000_000)]


WORDS = {"[UNK]": 0, "the": 1, "cat": 2, "<|x|>": 3}
PIECES = [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["<|x|>", -3.0]]

CHANGES: dict[str, Change] = {
    # Ids.
    "EOS with another id": _set("added_tokens", 0, "id", to=5),
    "EOS with an id far outside": _set("added_tokens", 0, "id", to=999_999),
    "an added token beyond the next id": lambda c: c["added_tokens"].append(added("<|y|>", 70_000)),
    "id 2^31": _id_of_a(1 << 31),
    "id 2^32 - 1": _id_of_a((1 << 32) - 1),
    "id 2^32": _id_of_a(1 << 32),
    "id 2^70": _id_of_a(1 << 70),
    "id -1": _id_of_a(-1),
    "id 1.5": _id_of_a(1.5),
    "id as a string": _id_of_a("7"),
    "id null": _id_of_a(None),
    "id true": _id_of_a(True),
    "an id twice": _id_of_a(6),
    "added id 2^70": _set("added_tokens", 0, "id", to=1 << 70),
    "added id -1": _set("added_tokens", 0, "id", to=-1),
    "added id 2^31": lambda c: c["added_tokens"].append(added("<|y|>", 1 << 31)),
    "added id as a string": _set("added_tokens", 0, "id", to="0"),
    "added id missing": _drop("added_tokens", 0, "id"),
    # Shapes.
    "added content is a number": _set("added_tokens", 0, "content", to=7),
    "added content is empty": _set("added_tokens", 0, "content", to=""),
    "an added token twice": lambda c: c["added_tokens"].append(dict(c["added_tokens"][0])),
    "added tokens are a string": _set("added_tokens", to="<|x|>"),
    "added tokens are an object": _set("added_tokens", to={"<|x|>": 0}),
    "added tokens hold null": _set("added_tokens", to=[None]),
    "a million added tokens": _many_added,
    "vocab is a list of strings": _set("model", "vocab", to=["a", "b"]),
    "vocab is a string": _set("model", "vocab", to="abc"),
    "vocab is null": _set("model", "vocab", to=None),
    "vocab is empty": _set("model", "vocab", to={}),
    "no merges": _drop("model", "merges"),
    "merges are null": _set("model", "merges", to=None),
    "a merge of three": lambda c: c["model"]["merges"].append(["a", "b", "c"]),
    "a merge of numbers": lambda c: c["model"]["merges"].append([1, 2]),
    "a merge outside the vocabulary": lambda c: c["model"]["merges"].insert(0, ["qqq", "zzz"]),
    "a merge as an empty string": lambda c: c["model"]["merges"].append(""),
    "no model": _drop("model"),
    "model is a list": _set("model", to=[]),
    "model of an unknown type": _set("model", "type", to="Oracle"),
    "model type is a number": _set("model", "type", to=7),
    "unknown unk_token": _set("model", "unk_token", to="<nothing>"),
    "bytes without tokens": lambda c: [c["model"]["vocab"].pop(k) for k in ["t", "h", "e"]],
    "version 9": _set("version", to="9.0"),
    # Not a function.
    "dropout 0.5": _set("model", "dropout", to=0.5),
    "dropout 1": _set("model", "dropout", to=1.0),
    "dropout 7": _set("model", "dropout", to=7),
    "dropout as a string": _set("model", "dropout", to="half"),
    # Normalizers.
    "an empty Replace": _set("normalizer", to=_replace("b", String="")),
    "an empty Regex": _set("normalizer", to=_replace("b", Regex="")),
    "a Replace that matches nothing": _set("normalizer", to=_replace("bbb", Regex="x*")),
    "a Replace by a megabyte": _set("normalizer", to=_replace("b" * 1_000_000, String="a")),
    "a Replace by a megabyte, by Regex": _set("normalizer", to=_replace("b" * 1_000_000, Regex="[a-z]")),
    "ten Replaces by ten": _set("normalizer", to=_sequence(*[_replace("a" * 10, String="a")] * 10)),
    "a Prepend of a megabyte": _set("normalizer", to={"type": "Prepend", "prepend": "b" * 1_000_000}),
    "a broken Regex": _set("normalizer", to=_replace("b", Regex="(((")),
    "a catastrophic Replace": _set("normalizer", to=_replace("b", Regex=r"(a+a+)+$|(\s+\s+)+$")),
    "a Replace without pattern": _set("normalizer", to={"type": "Replace", "content": "b"}),
    "an unknown normalizer": _set("normalizer", to={"type": "Nothing"}),
    "normalizer is a string": _set("normalizer", to="NFC"),
    "normalizer without type": _set("normalizer", to={}),
    "normalizers are null": _set("normalizer", to={"type": "Sequence", "normalizers": None}),
    "normalizers hold null": _set("normalizer", to={"type": "Sequence", "normalizers": [None]}),
    "charsmap is not base64": _set("normalizer", to={"type": "Precompiled", "precompiled_charsmap": "?"}),
    "charsmap is empty": _set("normalizer", to={"type": "Precompiled", "precompiled_charsmap": ""}),
    "charsmap is null": _set("normalizer", to={"type": "Precompiled", "precompiled_charsmap": None}),
    "charsmap is short": _set("normalizer", to={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "charsmap lies about its size": _set(
        "normalizer", to={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 64).decode()}
    ),
    "charsmap points outside": _set(
        "normalizer",
        to={
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(
                (1024).to_bytes(4, "little") + b"\xff\x00\xff\x7f" * 256 + b"x\0"
            ).decode(),
        },
    ),
    # Pre-tokenizers.
    "a broken Split": _set("pre_tokenizer", to=split("[[[")),
    "an empty Split": _set("pre_tokenizer", to=split("")),
    "a catastrophic Split": _set("pre_tokenizer", to=split(r"(a+)+$|( +)+$")),
    "a catastrophic Split of words": _set("pre_tokenizer", to=split(r"(\w+\s?)+\d$")),
    "a Split with nested counts": _set("pre_tokenizer", to=split("((a{1,500}){1,500}){1,500}b")),
    "a Split with a huge count": _set("pre_tokenizer", to=split("(a{99999}){99999}")),
    "a Split with deep groups": _set("pre_tokenizer", to=split("(" * 20_000 + ")" * 20_000)),
    "a Split with recursion": _set("pre_tokenizer", to=split(r"(?<n>a|b\g<n>c)+\g<n>")),
    "an unknown behavior": _set("pre_tokenizer", to=split("a", behavior="Eaten")),
    "an unknown pre_tokenizer": _set("pre_tokenizer", to={"type": "Nothing"}),
    "pretokenizers are null": _set("pre_tokenizer", to={"type": "Sequence", "pretokenizers": None}),
    "pre_tokenizer is a list": _set("pre_tokenizer", to=[byte_level()]),
    "a Metaspace with a word": _set(
        "pre_tokenizer", to={"type": "Metaspace", "replacement": "word", "prepend_scheme": "always", "split": True}
    ),
    "Digits without flags": _set("pre_tokenizer", to={"type": "Digits"}),
    "FixedLength of 0": _set("pre_tokenizer", to={"type": "FixedLength", "length": 0}),
    # Post-processors.
    "a first token in no vocabulary": _set("post_processor", to=_template("<nowhere>", 0)),
    "a first token with another id": _set("post_processor", to=_template("<|x|>", 9)),
    "a template without its tokens": lambda c: c.update(post_processor={**_template("<|x|>", 0), "special_tokens": {}}),
    "a Bert without tokens": _set("post_processor", to={"type": "BertProcessing"}),
    "a Bert with other ids": _set(
        "post_processor", to={"type": "BertProcessing", "sep": ["a", 0], "cls": ["<|x|>", 7]}
    ),
    "a Bert of numbers": _set("post_processor", to={"type": "BertProcessing", "sep": [1, 2], "cls": [3, 4]}),
    "post_processor is a number": _set("post_processor", to=7),
    "single is a string": _set("post_processor", to={"type": "TemplateProcessing", "single": "$A", "pair": "$A"}),
    "processors are null": _set("post_processor", to={"type": "Sequence", "processors": None}),
    # The rest.
    "an unknown decoder": _set("decoder", to={"type": "Nothing"}),
    "truncation is a string": _set("truncation", to="yes"),
    "truncation to 0": _set(
        "truncation", to={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}
    ),
    "padding to 2^60": _set(
        "padding",
        to={
            "strategy": {"Fixed": 1 << 60},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    ),
    "an affix of a megabyte": _set("model", "continuing_subword_prefix", to="#" * 1_000_000),
    # Other models.
    "WordLevel without its unknown token": _model(type="WordLevel", vocab={"the": 0, "<|x|>": 1}, unk_token="[UNK]"),
    "WordLevel with ids of 2^31": _model(type="WordLevel", vocab={**WORDS, "dog": 1 << 31}, unk_token="[UNK]"),
    "WordPiece without its unknown token": _model(
        type="WordPiece",
        vocab={"the": 0, "<|x|>": 1},
        unk_token="[UNK]",
        continuing_subword_prefix="##",
        max_input_chars_per_word=100,
    ),
    "WordPiece of endless words": _model(
        type="WordPiece", vocab=WORDS, unk_token="[UNK]", continuing_subword_prefix="", max_input_chars_per_word=1 << 60
    ),
    "Unigram": _model(type="Unigram", vocab=PIECES, unk_id=0),
    "Unigram without an unknown piece": _model(type="Unigram", vocab=PIECES, unk_id=None),
    "Unigram with unk_id 99": _model(type="Unigram", vocab=PIECES, unk_id=99),
    "Unigram with infinite scores": _model(
        type="Unigram", vocab=[["a", 1e308], ["aa", 1e308], ["<|x|>", 0.0]], unk_id=0
    ),
    "Unigram with an empty piece": _model(type="Unigram", vocab=[*PIECES, ["", -1.0]], unk_id=0),
    "Unigram with a piece twice": _model(type="Unigram", vocab=[*PIECES, ["a", -1.0]], unk_id=0),
    "Unigram with a piece of three": _model(type="Unigram", vocab=[*PIECES, ["a", -1.0, 3]], unk_id=0),
    "Unigram without pieces": _model(type="Unigram", vocab=[], unk_id=0),
    "Unigram that samples": _model(type="Unigram", vocab=PIECES, unk_id=0, nbest_size=-1, alpha=0.1),
}


def written_configs() -> Iterator[Hostile]:
    """Yield the files that CHANGES describes, and some that are not JSON."""
    base = byte_level_config()
    for name, change in CHANGES.items():
        config = copy.deepcopy(base)
        change(config)
        yield _config(name, json.dumps(config).encode())
    text = json.dumps(base)
    for name, data in {
        "an empty file": b"",
        "half a file": text[: len(text) // 2].encode(),
        "null": b"null",
        "a list": b"[]",
        "not UTF-8": text.encode().replace(b'"version"', b'"ver\xffsion"'),
        "a lone surrogate": text.replace('"version"', '"\\ud800"').encode(),
        "a lone surrogate in the vocabulary": text.replace('"a":', '"\\ud800":', 1).encode(),
        "NaN as an id": text.replace('"a": ', '"a": NaN, "a2": ', 1).encode(),
        "deep lists": b"[" * 200_000,
        "a deep normalizer": _deep(text, 900),
        "a very deep normalizer": _deep(text, 100_000),
        "UTF-16": text.encode("utf-16"),
    }.items():
        yield _config(name, data)


def _deep(text: str, depth: int) -> bytes:
    nested = '{"type": "Sequence", "normalizers": [' * depth + "]}" * depth
    return text.replace('"normalizer": null', f'"normalizer": {nested}', 1).encode()


def _config(name: str, data: bytes) -> Hostile:
    return Hostile(name, "tokenizer.json", {"tokenizer.json": data, "tokenizer_config.json": EOS})


VALUES = [None, 0, -1, 1 << 31, 1 << 70, 0.5, "", "x", [], {}, [None], True, "a" * 100_000]


def fuzzed_configs(count: int, seed: int = 0) -> Iterator[Hostile]:
    """Yield files in which one value is another, or whose bytes are damaged."""
    generator, base = random.Random(seed), byte_level_config(split("a+| ?[^ a]+"), {"type": "NFC"})
    for number in range(count):
        config = copy.deepcopy(base)
        at, path = config, []
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = generator.choice(keys)
            path.append(key)
            if not isinstance(at[key], (dict, list)) or not at[key] or generator.random() < 0.2:
                break
            at = at[key]
        at[key] = generator.choice(VALUES)
        data = json.dumps(config).encode()
        if number % 4 == 0:
            data = _damage(json.dumps(base).encode(), generator)
        yield _config(f"fuzzed {number} {path}", data)


def _damage(data: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 5, 20])):
        at = generator.randrange(len(damaged))
        what = generator.randrange(4)
        if what == 0:
            damaged[at] ^= 1 << generator.randrange(8)
        elif what == 1:
            damaged[at] = generator.randrange(256)
        elif what == 2:
            del damaged[at : at + generator.choice([1, 2, 50, 1000])]
        else:
            damaged[at:at] = damaged[at : at + generator.choice([1, 4, 300])]
        if not damaged:
            return b""
    return bytes(damaged)


# .tiktoken


def ranks() -> bytes:
    """All bytes and some merges."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" t", b" the", b"at", b"cat", b"  ", b"aa"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def description(**changed: Any) -> dict[str, Any]:
    """The `tiktoken.json` beside a rank file."""
    return {"name": "own", "pattern": r" ?\w+| ?[^\s\w]+|\s+", "special_tokens": {"<|endoftext|>": 264}, **changed}


def _tiktoken(name: str, data: bytes, described: bytes) -> Hostile:
    return Hostile(name, "own.tiktoken", {"own.tiktoken": data, "tiktoken.json": described})


def fuzzed_ranks(count: int, seed: int = 0) -> Iterator[Hostile]:
    """Yield rank files with damaged bytes and lines."""
    generator, described = random.Random(seed), json.dumps(description()).encode()
    written = {
        "no ranks": b"",
        "a rank twice": ranks() + b"cXFx 5\n",
        "a token twice": ranks() + b"YQ== 400\n",
        "an empty token": ranks() + b" 264\n",
        "rank -1": ranks() + b"cXFx -1\n",
        "rank 2^31": ranks() + b"cXFx 2147483648\n",
        "rank 2^32": ranks() + b"cXFx 4294967296\n",
        "rank 2^70": ranks() + b"cXFx %d\n" % (1 << 70),
        "rank of an underscore": ranks() + b"cXFx 2_64\n",
        "a byte is missing": b"".join(ranks().splitlines(keepends=True)[1:]),
        "letters are missing": b"".join(line for line in ranks().splitlines(keepends=True) if line[:4] != b"YQ=="),
        "a rank of 5,000 digits": ranks() + b"cXFx " + b"9" * 5000 + b"\n",
        "not base64": ranks() + b"!!!! 264\n",
        "gaps": ranks() + b"cXFx 70000\n",
        "the id of the special token": ranks() + b"cXFx 264\n",
    }
    yield from (_tiktoken(name, data, described) for name, data in written.items())
    for number in range(max(0, count - len(written))):
        yield _tiktoken(f"fuzzed ranks {number}", _damage(ranks(), generator), described)


def fuzzed_descriptions(count: int, seed: int = 0) -> Iterator[Hostile]:
    """Yield descriptions with wrong values and damaged bytes."""
    generator, good = random.Random(seed), json.dumps(description()).encode()
    end = "<|endoftext|>"
    written: list[Any] = [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"name": "own"}',
        good.decode().encode("utf-16"),
    ]
    written += [description(pattern=p) for p in ["", "(((", r"(a+)+$|( +)+$", "(?=a)", "[[[", None, 7, "x" * 100_000]]
    written += [description(pattern=p) for p in [r"(\w+\s?)+\d$", "(" * 5000 + ")" * 5000, "(a{999}){999}{999}"]]
    written += [description(name=n) for n in ["", None, 7, "gpt2", "cl100k_base", "o200k_base", "\ud800"]]
    ids = [5, -1, 1 << 31, 1 << 32, 1 << 70, 1.5, "264", None, 300, 70_000]
    written += [description(special_tokens={end: number}) for number in ids]
    written += [
        description(special_tokens=s) for s in [None, [], {}, {"": 264}, {end: 264, "b": 264}, {end: 264, "a": 97}]
    ]
    for item in written:
        data = item if isinstance(item, bytes) else json.dumps(item).encode()
        yield _tiktoken(f"description {data[:60]!r}", ranks(), data)
    for number in range(max(0, count - len(written))):
        yield _tiktoken(f"fuzzed description {number}", ranks(), _damage(good, generator))


# SentencePiece


def sentencepiece_model(kind: str = "bpe") -> bytes:
    """A small model that is trained here."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "isn't it 100%?", "a cat and a dog"] * 40),
        model_writer=written,
        model_type=kind,
        vocab_size=290,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc" if kind == "unigram" else "identity",
        minloglevel=5,
    )
    return written.getvalue()


def fuzzed_models(count: int, seed: int = 0) -> Iterator[Hostile]:
    """Yield models with damaged bytes, and one with a piece that is not UTF-8."""
    generator = random.Random(seed)
    models = [sentencepiece_model("bpe"), sentencepiece_model("unigram")]
    written = {
        "a piece that is not UTF-8": models[0].replace(b"\x03the", b"\x03t\xffe").replace(b"cat", b"c\xfft"),
        "an empty model": b"",
        "half a model": models[0][: len(models[0]) // 2],
        "text": b"this is no model\n",
    }
    yield from (Hostile(name, "tokenizer.model", {"tokenizer.model": data}) for name, data in written.items())
    for number in range(max(0, count - len(written))):
        data = _damage(generator.choice(models), generator)
        yield Hostile(f"fuzzed model {number}", "tokenizer.model", {"tokenizer.model": data})


# Trying them


def try_all(files: list[Hostile], folder: Path) -> list[Outcome]:
    """Try each file in this process."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return [try_one(hostile, corpus, folder / "one") for hostile in files]


def load_all(files: list[Hostile], folder: Path) -> list[Outcome]:
    """Load each file as a run does before it starts any work; this takes milliseconds."""
    from tokenmill.engines import choose, load_tokenizer

    def load(own: Path) -> None:
        choose(load_tokenizer(str(own)))

    return [_attempt(hostile, folder, load, "loads") for hostile in files]


def try_one(hostile: Hostile, corpus: Path, folder: Path) -> Outcome:
    """Tokenize a small corpus with a file."""
    import tokenmill

    def tokenize(own: Path) -> None:
        tokenmill.tokenize(corpus, folder / "store", tokenizer=str(own), workers=1, display="quiet")

    return _attempt(hostile, folder, tokenize, "store")


def _attempt(hostile: Hostile, folder: Path, use: Callable[[Path], None], good: str) -> Outcome:
    """Write a tokenizer to a directory of its own, use it and judge what happens."""
    own = folder / "hostile"
    for used in (own, folder / "store"):
        shutil.rmtree(used, ignore_errors=True)
    own.mkdir(parents=True)
    for name, data in hostile.files.items():
        (own / name).write_bytes(data)
    error: BaseException | None = None
    started = time.monotonic()
    with _Stderr() as printed:
        try:
            use(own / hostile.main_file)
        except BaseException as caught:
            if isinstance(caught, KeyboardInterrupt):
                raise
            error = caught
    wrong = _judge(error, folder / "store", printed.text, time.monotonic() - started)
    return Outcome(wrong or ("sentence" if error else good), f"{error or ''} {printed.text[:300]}".strip())


def _judge(error: BaseException | None, store: Path, printed: str, seconds: float) -> str | None:
    """Say what is wrong with an outcome; None if it is a store or a sentence."""
    import tokenmill

    if seconds > SLOW_SECONDS:
        return f"took {seconds:.0f} s"
    if printed:
        return "printed lines"
    if error is None:
        return None
    if not isinstance(error, tokenmill.TokenmillError):
        return f"raised {type(error).__name__}"
    said = str(error)
    if not any(name in said for name in ("hostile", "tokenizer.json", "own", "tokenizer.model", "tokenizer_config")):
        return "names no file"
    if "\n" in said or len(said) > 600:
        return "is no sentence"
    if "memory" in said:
        return "blames memory"
    # An error that only some texts cause is found only while reading them, and the run can be resumed.
    return "left a directory" if store.exists() and "cannot encode a text" not in said else None


class _Stderr:
    """Collects what this process and its children write to the standard error."""

    text = ""

    def __enter__(self) -> _Stderr:
        sys.stderr.flush()
        self._file = tempfile.TemporaryFile()
        self._saved = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._saved, 2)
        os.close(self._saved)
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()


KINDS: dict[str, Callable[[int, int], Iterator[Hostile]]] = {
    "written tokenizer.json": lambda _, __: written_configs(),
    "fuzzed tokenizer.json": fuzzed_configs,
    ".tiktoken": fuzzed_ranks,
    "tiktoken.json": fuzzed_descriptions,
    "SentencePiece .model": fuzzed_models,
}


def main() -> None:
    """Try every kind of file, print a table, and the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many fuzzed files of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzed files")
    parser.add_argument("--kind", choices=list(KINDS), help="only this kind")
    parser.add_argument("--show", action="store_true", help="print every sentence")
    arguments = parser.parse_args()
    tally = Tally("hostile_tokenizers")
    print(f"{'files':<24}{'tried':>7}{'stores':>8}{'sentences':>11}{'wrong':>7}{'seconds':>9}")
    for kind in [arguments.kind] if arguments.kind else KINDS:
        files = list(KINDS[kind](arguments.count, arguments.seed))
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcomes = try_all(files, Path(folder))
        counts = Counter(outcome.kind for outcome in outcomes)
        wrong = len(files) - counts["store"] - counts["sentence"]
        seconds = time.monotonic() - started
        print(f"{kind:<24}{len(files):>7}{counts['store']:>8}{counts['sentence']:>11}{wrong:>7}{seconds:>9.1f}")
        for hostile, outcome in zip(files, outcomes, strict=True):
            is_right = outcome.kind in ("store", "sentence")
            if arguments.show and is_right:
                print(f"  {hostile.name}: {outcome.kind}: {outcome.said[:400]}")
            tally.case(hostile.name, "" if is_right else f"{outcome.kind}: {outcome.said[:400]}")
    tally.end()


if __name__ == "__main__":
    main()
