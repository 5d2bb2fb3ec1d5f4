"""Convert SentencePiece `.model` files for the fast engine, or refuse them.

gigatoken can convert a `.model` itself, but then control pieces such as `<s>` inside a text become ids, white space is
stripped by other rules than SentencePiece's, and NFKC works on grapheme clusters. So this module reads the model, a
protocol buffer of pieces with scores, and converts it to a `tokenizer.json` that does exactly what SentencePiece does.
A model for which there is no such file is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["character_map", "model_config", "refuses_model"]

# Field numbers and values of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _WHITE_SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVE_WHITE_SPACE, _ESCAPE_WHITE_SPACE = 2, 3, 4, 5
_BPE = 2
_NORMAL, _USER_DEFINED, _UNUSED, _BYTE = 1, 4, 5, 6


class _Piece(NamedTuple):
    text: str
    score: float
    type: int


class _Model(NamedTuple):
    pieces: list[_Piece]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def refuses_model(model: bytes) -> str | None:
    """Explain why gigatoken may not be used for a `.model`; None if its ids are those of SentencePiece.

    This applies to an engine that is loaded from `model_config(model)`.
    """
    try:
        read = _read(model)
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        return f"it is not a SentencePiece model ({error})"
    return next((reason for reason, is_true in _reasons(read) if is_true), None)


def _reasons(model: _Model) -> Iterator[tuple[str, Any]]:
    """Yield each reason for which a model is refused, and whether it applies to this one."""
    pieces, trainer, normalizer = model
    yield "its model is not BPE", trainer.get(_MODEL_TYPE, 1) != _BPE
    yield "it has no byte fallback", not trainer.get(_BYTE_FALLBACK, 0)
    yield "it treats white space as a suffix", trainer.get(_WHITE_SPACE_AS_SUFFIX, 0)
    yield "it normalizes characters", normalizer.get(_CHARACTER_MAP)
    yield "it removes extra white space", normalizer.get(_REMOVE_WHITE_SPACE, 1)
    yield "it does not mark spaces with ▁", not normalizer.get(_ESCAPE_WHITE_SPACE, 1)
    yield "it has a piece twice", len({piece.text for piece in pieces}) < len(pieces)
    is_unused = any(piece.type == _UNUSED for piece in pieces)
    yield "it has unused pieces, which SentencePiece merges and takes apart again", is_unused
    found = sorted(piece.text for piece in pieces if piece.type == _BYTE)
    yield "it does not have each of the 256 bytes as a piece", found != sorted(f"<0x{byte:02X}>" for byte in range(256))
    # SentencePiece merges by the score of the result, gigatoken by the rank of a pair. The order is the same unless two
    # pieces have equal scores: then SentencePiece takes the leftmost.
    results = {left + right for left, right in _merges(model)}
    scores = [piece.score for piece in pieces if piece.text in results]
    yield "it has pieces of equal score", len(set(scores)) < len(scores)
    defined = [piece.text for piece in pieces if piece.type == _USER_DEFINED]
    yield "it has user-defined pieces and adds a dummy prefix", defined and normalizer.get(_DUMMY_PREFIX, 1)
    yield "it has user-defined pieces with spaces", any(" " in text or "▁" in text for text in defined)


def model_config(model: bytes) -> dict[str, Any]:
    """Convert a `.model` that is not refused to the `tokenizer.json` for gigatoken.

    Control and unknown pieces are left out: no text becomes one of them.
    """
    read = _read(model)
    mark_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if read.normalizer.get(_DUMMY_PREFIX, 1) else []
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    numbered = list(enumerate(read.pieces))
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": p.text, **flags} for i, p in numbered if p.type == _USER_DEFINED],
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, mark_spaces]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {piece.text: i for i, piece in numbered if piece.type in (_NORMAL, _BYTE)},
            "merges": list(_merges(read)),
        },
    }


def character_map(model: bytes) -> bytes:
    """Return the table by which a `.model` normalizes characters."""
    return bytes(_read(model).normalizer.get(_CHARACTER_MAP, b""))


def _merges(model: _Model) -> list[tuple[str, str]]:
    """List every way to merge two pieces to a normal piece, best score first.

    For one piece the longer left part comes first. In a run such as "aaaa" this applies the leftmost of several equal
    merges first, as SentencePiece does.
    """
    scores = {piece.text: piece.score for piece in model.pieces if piece.type == _NORMAL}
    ranked = [
        (-score, -cut, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _read(model: bytes) -> _Model:
    read = _Model([], {}, {})
    for field, value in _fields(model):
        if field == _PIECES:
            parts = dict(_fields(value))
            score = struct.unpack("<f", parts.get(_SCORE, bytes(4)))[0]
            read.pieces.append(_Piece(parts[_TEXT].decode(), score, parts.get(_TYPE, _NORMAL)))
        elif field == _TRAINER:
            read.trainer.update(_fields(value))
        elif field == _NORMALIZER:
            read.normalizer.update(_fields(value))
    if not read.pieces:
        raise ValueError("no pieces")
    return read


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protocol buffer: an int for a varint, bytes for anything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(message):
            raise ValueError("truncated")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
