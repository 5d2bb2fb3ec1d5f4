"""Tokenizers of every structure in use, trained here: what an engine does must not depend on whose vocabulary it is.

Each entry is a normalizer, a pre-tokenizer and a model, as the vendors' own files have them. `train` needs
`tokenizers` before version 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import make_texts
from tokenmill.engines._eligibility import SCHEMES

Config = dict[str, Any]


def byte_level(*, splits: bool) -> Config:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def split(pattern: str) -> Config:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps: Config) -> Config:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def normalizers(*steps: Config) -> Config:
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(content: str, **pattern: str) -> Config:
    return {"type": "Replace", "pattern": pattern, "content": content}


def bert(*, lowercase: bool) -> Config:
    flags = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": lowercase}
    return {"type": "BertNormalizer", **flags}


DIGITS = {"type": "Digits", "individual_digits": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDS = {"type": "WhitespaceSplit"}
PRECOMPILED = {"type": "Precompiled"}
"""Stands for the table of `nmt_nfkc`, which is taken from a SentencePiece model."""
BERT_WORDS = {"type": "BertPreTokenizer"}
NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


class Structure(NamedTuple):
    """What a `tokenizer.json` of this kind has, and who uses it."""

    model: str
    normalizer: Config | None
    pre_tokenizer: Config
    users: str


STRUCTURES: dict[str, Structure] = {
    "wordpiece-uncased": Structure("WordPiece", bert(lowercase=True), BERT_WORDS, "BERT, MiniLM, BGE"),
    "wordpiece-cased": Structure("WordPiece", bert(lowercase=False), BERT_WORDS, "BERT cased"),
    "unigram-xlmr": Structure("Unigram", PRECOMPILED, sequence(WORDS, METASPACE), "XLM-R, T5, mT5, E5"),
    "unigram-albert": Structure(
        "Unigram",
        normalizers(
            replace('"', String="``"),
            replace('"', String="''"),
            *({"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, PRECOMPILED),
        ),
        sequence(WORDS, METASPACE),
        "ALBERT, XLNet",
    ),
    "unigram-metaspace": Structure(
        "Unigram", normalizers(PRECOMPILED, replace(" ", Regex=" {2,}")), METASPACE, "DeBERTa-v3, conversions"
    ),
    "unigram-nfkc": Structure("Unigram", {"type": "NFKC"}, METASPACE, "trained with tokenizers"),
    "digits": Structure("BPE", None, sequence(DIGITS, byte_level(splits=True)), "SmolLM, StarCoder"),
    "digits-nfc": Structure("BPE", {"type": "NFC"}, sequence(DIGITS, byte_level(splits=True)), "Command R"),
    "falcon": Structure(
        "BPE",
        None,
        sequence(
            *({"type": "Punctuation", "behavior": "Contiguous"}, byte_level(splits=True)),
            *({"type": "Digits", "individual_digits": False}, split("[0-9][0-9][0-9]")),
        ),
        "Falcon",
    ),
    "nanochat": Structure("BPE", None, sequence(split(NANOCHAT), byte_level(splits=False)), "nanochat"),
    "tekken": Structure(
        "BPE", None, sequence(split(SCHEMES["nemotron"][0]), byte_level(splits=False)), "Mistral Nemo, Tekken"
    ),
    "gpt2": Structure("BPE", None, byte_level(splits=True), "GPT-2, OLMo"),
    "llama3": Structure("BPE", None, sequence(split(SCHEMES["llama3"][0]), byte_level(splits=False)), "Llama 3"),
}


def train(name: str, texts: Iterable[str], *, vocab_size: int) -> Config:
    """Train a tokenizer of this structure."""
    from tokenizers import AddedToken, Tokenizer, trainers

    structure = STRUCTURES[name]
    tokenizer = Tokenizer.from_str(json.dumps(_untrained(structure)))
    common = {"vocab_size": vocab_size, "show_progress": False}
    if structure.model == "WordPiece":
        specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(special_tokens=specials, **common)
    elif structure.model == "Unigram":
        trainer = trainers.UnigramTrainer(special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", **common)
    else:
        from tokenizers import pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, **common)
    tokenizer.train_from_iterator(texts, trainer)
    if structure.model == "BPE":
        tokenizer.add_special_tokens([AddedToken("<|im_start|>", normalized=False)])
    return dict(json.loads(tokenizer.to_str()))


def write_structures(folder: Path) -> None:
    """Write a small tokenizer of each structure."""
    for name in STRUCTURES:
        config = train(name, make_texts(300, seed=7), vocab_size=700)
        (folder / name).mkdir(parents=True)
        (folder / name / "tokenizer.json").write_text(json.dumps(config), "utf-8")


def _untrained(structure: Structure) -> Config:
    models = {
        "WordPiece": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {}},
        "Unigram": {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False},
        "BPE": {"type": "BPE", "vocab": {}, "merges": []},
    }
    models["WordPiece"]["max_input_chars_per_word"] = 100
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": _with_table(structure.normalizer),
        "pre_tokenizer": structure.pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": models[structure.model],
    }


def _with_table(step: Any) -> Any:
    """Put the table of `nmt_nfkc` into a normalizer."""
    if isinstance(step, dict) and step["type"] == "Sequence":
        return {**step, "normalizers": [_with_table(one) for one in step["normalizers"]]}
    return {**step, "precompiled_charsmap": _character_map()} if step == PRECOMPILED else step


@lru_cache(maxsize=1)
def _character_map() -> str:
    import base64
    import io

    import sentencepiece

    from tokenmill.engines._piece_models import character_map

    model = io.BytesIO()
    lines = iter(["the quick brown fox jumps over the lazy dog"] * 20)
    settings = {"vocab_size": 40, "normalization_rule_name": "nmt_nfkc", "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **settings)
    return base64.b64encode(character_map(model.getvalue())).decode()
