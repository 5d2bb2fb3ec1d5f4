"""Tiny tokenizers whose merges cross words, spaces, digits and lines, so that ids show how a text was split.

A small vocabulary that is trained the usual way has no token that spans two pre-tokens, and an engine that splits
wrongly would return the same ids.
"""

from __future__ import annotations

import copy
import json
import random
from functools import lru_cache
from itertools import product
from typing import Any

from tests.conftest import make_texts
from tokenmill.engines._eligibility import SCHEMES
from tokenmill.engines.decoder import byte_alphabet
from tokenmill.engines.probe_strings import make_probe_strings

Config = dict[str, Any]

PIECES = ["'s", "'S", "'LL", " ", "  ", "\n", "\r\n", "\t", "a", "the", "The", "1", "123", "1234", "!", "...", "/", "-"]
PIECES += [
    "\u0301",
    "\u00a0",
    "\u3000",
    "\u2581",
    "<s>",
    "<|x|>",
    "é",
    "中",
    "中文",
    "カ",
    "한",
    "😀",
    "ab",
    "xx",
    "K",
    ";",
]


def byte_level(*, splits: bool = True, prefix: bool = False) -> Config:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": splits}


def split(*patterns: str, behavior: str = "Isolated", invert: bool = False) -> Config:
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": behavior, "invert": invert} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level(splits=False)]}


def scheme(name: str) -> Config:
    return split(*SCHEMES[name])


def added(content: str, number: int, **flags: bool) -> Config:
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": number, "content": content, **off, **flags}


@lru_cache(maxsize=1)
def training_texts() -> list[str]:
    """Fragments in any order and all of their pairs, with few different characters."""
    generator = random.Random(3)
    texts = ["".join(generator.choices(PIECES, k=generator.choice([2, 3, 5, 9]))) for _ in range(1500)]
    return texts + [left + right for left, right in product(PIECES, repeat=2)] + make_texts(150, seed=5)


def hard_texts() -> list[str]:
    """Some 1,500 short texts: every third training text and an eighth of the probe strings."""
    return [*training_texts()[::3], *make_probe_strings(["<|x|>"])[::8]]


def _train(model: Any, normalizer: Any, pre_tokenizer: Any, alphabet: list[str], specials: list[str]) -> Config:
    from tokenizers import Tokenizer, trainers

    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=specials,
        initial_alphabet=alphabet,
        limit_alphabet=max(len(alphabet), 200),
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts() * 2, trainer)
    return dict(json.loads(tokenizer.to_str()))


@lru_cache(maxsize=1)
def _byte_level_config() -> Config:
    from tokenizers import models, pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    config = _train(models.BPE(), None, whole, sorted(byte_alphabet()), ["<|x|>"])
    return {**config, "pre_tokenizer": byte_level()}


def byte_level_config(pre_tokenizer: Config | None = None, normalizer: Config | None = None, **model: Any) -> Config:
    """A byte-level BPE tokenizer with 1,200 tokens, GPT-2's unless told otherwise; `<|x|>` is special."""
    config = copy.deepcopy(_byte_level_config())
    if pre_tokenizer is not None:
        config["pre_tokenizer"] = pre_tokenizer
    config["normalizer"] = normalizer
    config["model"].update(model)
    return config


@lru_cache(maxsize=1)
def _byte_fallback_config() -> Config:
    from tokenizers import models, normalizers

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    config = _train(model, spaces, None, [], ["<unk>", "<s>", "</s>", *names])
    config["added_tokens"] = config["added_tokens"][:3]
    return config


def byte_fallback_config(**model: Any) -> Config:
    """A tokenizer in the manner of Llama 2, with `<unk>`, `<s>` and `</s>`."""
    config = copy.deepcopy(_byte_fallback_config())
    config["model"].update(model)
    return config


def reference_ids(config: Config, texts: list[str], *, parse_special: bool = False) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def engine_ids(config: Config, texts: list[str]) -> list[list[int]]:
    import gigatoken

    ids: list[list[int]] = gigatoken.Tokenizer.from_json(json.dumps(config)).encode_batch_list(texts, parallel=False)
    return ids
