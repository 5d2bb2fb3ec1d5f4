"""Targets of the fuzzer for the modules in C: the scanner of lines, the cache of words and Unigram models.

The fuzzer sees the coverage of Python alone, so these targets also make inputs at random, seeded by the fuzzer's bytes.
`sanitizers.py` gives them some thousand inputs while the modules are checked.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.structures import NANOCHAT, STRUCTURES, byte_level, sequence, split
from tests.support.tiny_tokenizers import byte_level_config
from tokenmill.engines import create, load_tokenizer, make_reference
from tokenmill.engines._characters import make_groups
from tokenmill.engines.base import Engine
from tokenmill.engines.words import Words
from tokenmill.readers import _line_scanner, delimited_reader_for
from tokenmill.readers.base import NO_LIMIT, ReadOptions
from tokenmill.text_batch import PackedTexts

TEXT_LIMITS = (256_000_000, 1, 12, 40)
FIELDS = ((b"text",), (b"a", b"text"), (b"a",), (b"id",), (b"text",))


# Lines


def lines(data: bytes) -> None:
    """Scanned and decoded by Python, a block gives the same documents; every text that is scanned is that of `json`."""
    if not data:
        return
    mode, data = data[0], data[1:]
    key, limit = ("text", "a.text")[mode & 1], TEXT_LIMITS[mode >> 1 & 3]
    kept = (("id", "a", key), ("a.b.c",), ())[mode >> 3 & 3 if mode >> 3 & 3 < 3 else 0]
    size = len(data) - (mode >> 5) % (len(data) + 1)
    for format in ("jsonl", "text"):
        scanned, decoded = (
            delimited_reader_for(
                format, ReadOptions(text_key=key, keep_keys=kept, max_document_bytes=limit, packed=packed)
            ).decode(data, size, mode >> 7, 5)
            for packed in (True, False)
        )
        assert list(scanned.texts) == list(decoded.texts), (list(scanned.texts), list(decoded.texts))
        assert (scanned.kept or None) == (decoded.kept or None), (scanned.kept, decoded.kept)
        assert scanned.rejects == decoded.rejects, (scanned.rejects, decoded.rejects)
        assert scanned.num_lines == decoded.num_lines
        for name in ("positions", "lines"):
            assert getattr(scanned, name).tolist() == getattr(decoded, name).tolist(), name
    compare_scanned(data[:size], FIELDS[mode & 1 :], limit)


def compare_scanned(data: bytes, fields: tuple[tuple[bytes, ...], ...], limit: int) -> None:
    """Every text and field that the scanner finds is the one that the `json` module finds in that line."""
    texts, longest, leads, _, documents, _ = _line_scanner.scan_json(data, len(data), fields, limit, NO_LIMIT)
    rows = np.frombuffer(documents, np.int64).reshape(-1, 2 * len(fields)).tolist()
    pieces = PackedTexts(texts, len(rows), longest, leads).pieces
    assert {byte - 0xC0 for byte in texts if 0xC0 <= byte < 0xFF} <= {bit for bit in range(64) if leads >> bit & 1}
    lengths = []
    for row, piece in zip(rows, pieces, strict=True):
        line = data[row[0] :].partition(b"\n")[0]
        lengths.append(len(line))
        record = json.loads(line.decode())
        for path, start, stop in zip(fields, (-1, *row[2::2]), (-1, *row[3::2]), strict=True):
            found = json.loads(data[start:stop]) if start >= 0 else None
            expected = record
            for name in path:
                expected = expected.get(name.decode()) if isinstance(expected, dict) else None
            if (start, stop) == (-1, -1) and path == fields[0]:
                found = piece.decode()
            assert found == expected or math.isnan(found), (found, expected, line)
        assert len(piece) <= limit
    shortest = sorted(lengths)[: len(lengths) // 2]
    if shortest:
        kept = _line_scanner.scan_json(data, len(data), fields, limit, shortest[-1])[4]
        assert len(kept) == 16 * len(fields) * sum(length <= shortest[-1] for length in lengths)


# The cache of words


def words(data: bytes) -> None:
    """The cache gives the ids of the reference; bytes that are no texts give an error."""
    if not data:
        return
    mode, data = data[0], data[1:]
    if mode & 1:
        packed_words(data)
        return
    cached, reference = engines()[mode >> 1 & 3 if mode >> 1 & 3 < len(engines()) else 0]
    compare_engines(cached, reference, texts_of(data, ALPHABET))


ALPHABET = [
    *"aabeqz  \n\r\t'.,-19\u00e9\u0301\u4e2d\u0660\U0001f600\u2581\u00a0\u200d\x00\"",
    "'s",
    "the",
    "\r\n",
    "<|x|>",
    "1234",
]


def texts_of(data: bytes, alphabet: list[str]) -> list[str]:
    """The bytes as texts, and others that they decide."""
    rng = random.Random(data)
    found = data.decode(errors="ignore").split("\x01")
    return [*found, *("".join(rng.choices(alphabet, k=rng.choice((0, 1, 3, 9, 70, 300)))) for _ in range(6))]


@cache
def engines() -> list[tuple[Engine, Engine]]:
    """Engines with the cache, and their references, of several structures."""
    own = sequence(split(NANOCHAT), byte_level(splits=False))
    configs = [
        byte_level_config(),
        byte_level_config(STRUCTURES["digits"].pre_tokenizer, {"type": "NFC"}),
        byte_level_config(own, {"type": "Lowercase"}),
    ]
    return [pair_of(config) for config in configs]


def pair_of(config: Any) -> tuple[Engine, Engine]:
    from tests.faults.fuzz_targets import put

    path: Path = put("tokenizer.json", json.dumps(config).encode())
    tokenizer = load_tokenizer(str(path))
    return create("wordcache", tokenizer), make_reference(tokenizer)


def compare_engines(cached: Engine, reference: Engine, texts: list[str]) -> None:
    expected = reference.encode(texts)
    for _ in range(2):
        found = cached.encode(texts)
        assert found.ids.tolist() == expected.ids.tolist(), texts
        assert found.offsets.tolist() == expected.offsets.tolist(), texts


def packed_words(data: bytes) -> None:
    """Any bytes are refused, or cut into words that together are what they were."""
    rng = random.Random(data)
    pairs = bytes(rng.choices((0, 1), (3, 1), k=1 << 16)) if len(data) % 2 else bytes([1]) * (1 << 16)
    table = Words(make_groups(()), pairs)
    for piece in (data, data, data.replace(b" ", PackedTexts.SEPARATOR)):
        try:
            ids, edges = table.encode(piece, spell, 2)
        except ValueError:
            continue
        expected = PackedTexts(piece, 1, len(piece)).pieces
        places = np.frombuffer(edges, np.int64).tolist()
        spelled = np.frombuffer(ids, np.uint16).astype(np.uint8).tobytes()
        assert [spelled[a:b] for a, b in pairwise(places)] == expected, (piece, spelled)


def spell(texts: list[str]) -> tuple[object, object]:
    """The bytes of words as their ids."""
    encoded = [text.encode() for text in texts]
    texts.clear()
    ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
    return ids, np.cumsum([0, *map(len, encoded)], dtype=np.int64)


# Unigram models

SCORES = (lambda rng: rng.choice((-1.0, -2.0, -3.0)), lambda rng: -20 * rng.random(), lambda rng: -rng.random() * 1e12)
"""Scores with many ties, ordinary ones, and ones whose rounding errors are large."""


def unigram(data: bytes) -> None:
    """A model with random pieces encodes random texts as the library does."""
    rng = random.Random(data)
    letters = rng.sample([*"abcd\u00e9\u4e2d.1\u0301"], rng.randint(1, 5))
    score: Callable[[random.Random], float] = rng.choice(SCORES)
    pieces = {"<unk>": 0.0} if rng.random() < 0.9 else {}
    for piece in random_pieces(rng, letters):
        pieces.setdefault(piece, score(rng))
    model = {
        "type": "Unigram",
        "unk_id": 0 if pieces.get("<unk>") == 0.0 else None,
        "vocab": list(pieces.items()),
        "byte_fallback": False,
    }
    structure = STRUCTURES[rng.choice(("unigram-nfkc", "unigram-albert", "unigram-xlmr"))]
    normalizer = (
        structure.normalizer if structure is STRUCTURES["unigram-nfkc"] else rng.choice((None, {"type": "NFKC"}))
    )
    config = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": structure.pre_tokenizer, "post_processor": None, "decoder": None, "model": model,
    }  # fmt: skip
    cached, reference = pair_of(config)
    known = [*letters, *letters, " ", *rng.choice(((), ("  ", "\t", "z", "\U0001f600", "\u2581")))]
    texts = texts_of(data, known)
    try:
        compare_engines(cached, reference, texts)
    except AssertionError:
        raise
    except Exception:
        # Without a token for unknown pieces the library cannot encode everything.
        if model["unk_id"] is not None:
            raise


def random_pieces(rng: random.Random, letters: list[str]) -> Iterator[str]:
    yield from (letter for letter in ("\u2581", *letters) if rng.random() < 0.95)
    for _ in range(rng.choice((0, 5, 60))):
        mark = rng.choice(("", "", "\u2581"))
        yield mark + "".join(rng.choices(letters, k=rng.randint(1, 6)))


COMPILED: dict[str, Callable[[bytes], None]] = {"lines": lines, "words": words, "unigram": unigram}


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with."""
    if name == "lines":
        some = b'{"text": "a \\n b \\u00e9", "id": 1e5}\n \t\r\n{"text": "\\ud83d\\ude00", "a": {"text": "\xe4\xb8\xad", "b": {"c": []}}}\n'
        return [
            bytes([mode]) + some * 2 + b'{"a": {"text": "x"}, "id": -0.5} \r\nplain \xf0\x9f\x98\x80'
            for mode in range(0, 256, 7)
        ]
    if name == "words":
        some = b"The the's 1234 a\xcc\x81 \xe4\xb8\xad\xe6\x96\x87 \xf0\x9f\x98\x80\n\n x\x01" + b"long" * 30
        return [bytes([mode]) + some[mode:] for mode in range(8)] + [b"\1" + PackedTexts.SEPARATOR * n for n in (1, 2)]
    return [bytes([number]) * 3 for number in range(12)]
