"""SentencePiece models are converted to what gigatoken encodes exactly, or refused by name."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_tokenizers import engine_ids, hard_texts, training_texts
from tokenmill.engines._piece_models import model_config, refuses_model

pytest.importorskip("gigatoken")
sentencepiece = pytest.importorskip("sentencepiece")


def train_model(**options: Any) -> bytes:
    """A small SentencePiece model like that of Llama."""
    lines = [re.sub(r"[\0\r\n▁]", " ", text) for text in training_texts()]
    target = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 800}
    settings |= {"remove_extra_whitespaces": False, "minloglevel": 2, "character_coverage": 0.98, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=target, **settings | options)
    return target.getvalue()


def model_mismatches(model: bytes) -> list[str]:
    texts = [*hard_texts(), "a" * 3000, " " * 500, "<s>a</s>", "▁", " ", ""]
    expected = sentencepiece.SentencePieceProcessor(model_proto=model).encode(texts)
    ours = engine_ids(model_config(model), texts)
    return [text for text, x, y in zip(texts, ours, expected, strict=True) if x != y]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"split_digits": True, "control_symbols": ["<|x|>", "▁x"]},
        {"allow_whitespace_only_pieces": True, "split_by_whitespace": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["<|x|>", "xx"]},
    ],
)
def test_eligible_models_give_the_ids_of_sentencepiece(options: dict[str, Any]) -> None:
    model = train_model(**options)
    assert refuses_model(model) is None
    assert model_mismatches(model) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "not BPE"),
        ({"byte_fallback": False}, "byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes"),
        ({"remove_extra_whitespaces": True}, "extra white space"),
        ({"treat_whitespace_as_suffix": True}, "suffix"),
        ({"user_defined_symbols": ["xx"]}, "dummy prefix"),
        ({"add_dummy_prefix": False, "user_defined_symbols": ["a▁b"]}, "with spaces"),
    ],
)
def test_models_that_disagree_are_refused(options: dict[str, Any], reason: str) -> None:
    assert reason in str(refuses_model(train_model(**options)))


def changed_piece(model: bytes, piece: str, *, score: float | None = None, kind: int | None = None) -> bytes:
    """The model with another score or type of one piece: field 2, four bytes, and field 3, one byte."""
    text = piece.encode()
    start = model.index(b"\n" + bytes([len(text)]) + text + b"\x15") - 1
    length = model[start]
    body = model[start + 1 : start + 1 + length]
    at = len(text) + 3
    assert len(body) == at + 4, "a normal piece has no type field"
    body = body[:at] + (body[at:] if score is None else struct.pack("<f", score))
    body += b"" if kind is None else b"\x18" + bytes([kind])
    return model[:start] + bytes([len(body)]) + body + model[start + 1 + length :]


def test_unused_pieces_and_equal_scores_are_refused() -> None:
    model = train_model()
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    score = pieces.get_score(pieces.piece_to_id("ab"))
    short = [
        piece for piece in map(pieces.id_to_piece, range(pieces.vocab_size())) if len(piece) == 2 and piece != "ab"
    ]
    assert refuses_model(changed_piece(model, "ab", score=score)) is None
    assert "equal score" in str(refuses_model(changed_piece(model, short[0], score=score)))
    assert "unused" in str(refuses_model(changed_piece(model, "ab", kind=5)))


def test_control_pieces_in_a_text_are_plain_text() -> None:
    model = train_model()
    ids = engine_ids(model_config(model), ["<s>a</s>"])[0]
    assert not {1, 2} & set(ids)
    assert ids == sentencepiece.SentencePieceProcessor(model_proto=model).encode("<s>a</s>")


def test_a_real_model_is_eligible(shared_data: Path) -> None:
    model = (shared_data / "tokenizers/spm_bpe32k/tokenizer.model").read_bytes()
    assert refuses_model(model) is None
    assert model_mismatches(model) == []
    assert "not BPE" in str(refuses_model((shared_data / "tokenizers/spm_unigram16k/tokenizer.model").read_bytes()))


def test_a_file_that_is_not_a_model_is_refused_without_an_exception() -> None:
    for data in (b"", b"\xff\xff\xff", b"hello world", b"\x0a\x7f\x01"):
        assert "not a SentencePiece model" in str(refuses_model(data))
