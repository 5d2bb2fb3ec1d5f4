"""What the pipeline needs of every engine: exact ids, one document per text, nothing lost on recycling."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import build_once, make_texts
from tests.support.structures import STRUCTURES, write_structures
from tokenmill.engines import ENGINES, REFERENCES, Engine, Tokenizer, choose, create, load_tokenizer, open_tokenizer
from tokenmill.engines.huggingface import has_old_interface
from tokenmill.errors import UsageError
from tokenmill.text_batch import PackedTexts

CASES = [
    "gigatoken/json",
    "wordcache/json",
    "wordcache/ranks",
    *(f"wordcache/{name}" for name in STRUCTURES),
    "huggingface/json",
    "sentencepiece/model",
    "gigatoken/model",
    "tiktoken/ranks",
    "bytes/bytes",
]
TEXTS = [
    "",
    " ",
    "a",
    "\n\n",
    "plain words",
    "<|endoftext|> <s> </s>",
    "日本語 ไทย",
    "a\u0301\u0300",
    "\U0003298a'll",
    "👩‍👩‍👧",
]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece BPE model with byte fallback."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("piece-model")
    text = folder / "text.txt"
    text.write_text("\n".join(line for document in make_texts(300, seed=3) for line in document.split("\n") if line))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="session")
def ranks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiktoken rank file that says what it is: all bytes and a few merges."""
    pytest.importorskip("tiktoken")
    import base64

    folder = tmp_path_factory.mktemp("ranks")
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"mi", b"ll", b"mill", b" mill"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiny.tiktoken").write_bytes(b"".join(lines))
    definition = {
        "name": "tiny",
        "pattern": r" ?\p{L}+| ?\p{N}+|\s+|.",
        "special_tokens": {"<|endoftext|>": len(tokens)},
    }
    (folder / "tiktoken.json").write_text(json.dumps(definition))
    return folder / "tiny.tiktoken"


@pytest.fixture(scope="session")
def structures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of each structure; they were made elsewhere if `tokenizers` cannot train."""
    if made := os.environ.get("TOKENMILL_TEST_TOKENIZERS"):
        return Path(made) / "structures"
    return build_once(tmp_path_factory, "tokenizers/structures", write_structures)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    """The name of an engine, and a tokenizer that it can load."""
    name, kind = request.param.split("/")
    sources: dict[str, Callable[[], str]] = {
        "json": lambda: str(request.getfixturevalue("tiny_tokenizer")),
        "model": lambda: str(request.getfixturevalue("model_file")),
        "ranks": lambda: str(request.getfixturevalue("ranks_file")),
        "bytes": lambda: "bytes",
    }
    if kind in STRUCTURES:
        sources[kind] = lambda: str(request.getfixturevalue("structures") / kind)
    tokenizer = load_tokenizer(sources[kind]())
    try:
        choose(tokenizer, name)
    except UsageError as error:
        pytest.skip(str(error))
    return name, tokenizer


@pytest.fixture(scope="module")
def engine(case: tuple[str, Tokenizer]) -> Engine:
    return create(*case)


def lists(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    batch = engine.encode(texts)
    assert len(batch) == len(texts)
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == len(batch.ids)
    return [batch.ids[start:stop].tolist() for start, stop in zip(batch.offsets, batch.offsets[1:], strict=False)]


def test_every_engine_is_here() -> None:
    assert {case.split("/")[0] for case in CASES} == set(ENGINES)


def test_ids_are_the_reference_librarys(engine: Engine, case: tuple[str, Tokenizer], tmp_path: Path) -> None:
    texts = TEXTS + make_texts(200, seed=5)
    assert lists(engine, texts) == independent_ids(case[1], texts, tmp_path)


def independent_ids(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> list[list[int]]:
    """The library that defines the ids, called without tokenmill."""
    main = tokenizer.files.get(tokenizer.main_file, b"")
    if tokenizer.kind == "huggingface":
        import tokenizers

        if not has_old_interface():
            (tmp_path / "tokenizer.json").write_bytes(main)
            new = tokenizers.Tokenizer.from_file(tmp_path / "tokenizer.json")
            settings = {"add_special_tokens": False, "encode_special_tokens": True}
            return [new.encode(text, **settings).ids for text in texts]
        library = tokenizers.Tokenizer.from_str(main.decode())
        library.encode_special_tokens = True
        return [library.encode(text, add_special_tokens=False).ids for text in texts]
    if tokenizer.kind == "sentencepiece":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=main).encode(texts)
    if tokenizer.kind == "tiktoken":
        from tokenmill.engines.tiktoken import open_encoding

        encoding = open_encoding(tokenizer)
        return [encoding.encode_ordinary(text) for text in texts]
    return [list(text.encode()) for text in texts]


def test_packed_texts_have_the_ids_of_their_strings(engine: Engine) -> None:
    for texts in (TEXTS[1:] + make_texts(200, seed=5), TEXTS, [""], ["one"], []):
        assert lists(engine, PackedTexts.of(texts)) == lists(engine, texts)


def test_an_empty_batch_and_empty_texts_are_fine(engine: Engine) -> None:
    assert len(engine.encode([])) == 0
    assert lists(engine, ["", ""]) == [[], []]


def test_documents_do_not_depend_on_their_neighbours(engine: Engine) -> None:
    texts = make_texts(60, seed=6)
    assert lists(engine, texts) == [lists(engine, [text])[0] for text in texts]


def test_pieces_of_a_split_text_have_the_ids_of_the_whole(engine: Engine) -> None:
    for seed in range(3):
        text = " ".join(make_texts(80, seed=seed))
        for size in (1, 10, 100, 5000, 10**6):
            pieces = engine.split(text, size)
            assert "".join(pieces) == text
            assert [token for ids in lists(engine, pieces) for token in ids] == lists(engine, [text])[0]


def test_recycling_changes_no_id(engine: Engine) -> None:
    texts = make_texts(60, seed=8)
    before = lists(engine, texts)
    engine.recycle()
    assert lists(engine, texts) == before


def test_ids_are_below_the_vocabulary_size(engine: Engine, case: tuple[str, Tokenizer]) -> None:
    batch = engine.encode(make_texts(100, seed=9))
    assert int(np.max(batch.ids)) < case[1].vocab_size


def test_every_kind_of_tokenizer_survives_being_saved(case: tuple[str, Tokenizer], tmp_path: Path) -> None:
    _, tokenizer = case
    tokenizer.save(tmp_path / "saved")
    again = open_tokenizer(tmp_path / "saved", tokenizer.name)
    for name in ("kind", "vocab_size", "eos_id", "bos_id", "sha256"):
        assert getattr(again, name) == getattr(tokenizer, name)
    texts = make_texts(20, seed=2)
    reference = REFERENCES[tokenizer.kind]
    assert lists(create(reference, again), texts) == lists(create(reference, tokenizer), texts)
