"""`train-tokenizer` makes the same tokenizer from the same text, from every format, within its bounds."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from tests.conftest import make_texts, write_jsonl
from tokenmill.display import Silence
from tokenmill.engines import choose, load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.tools.train_tokenizer import train_tokenizer


class Notes(Silence):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str, *, style: str = "") -> None:
        self.said.append(text)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", make_texts(200, 1))
    write_jsonl(tmp_path / "corpus" / "b.jsonl", make_texts(200, 2))
    return tmp_path / "corpus"


def test_a_trained_tokenizer_is_ready_for_use(corpus: Path, tmp_path: Path) -> None:
    trained = train_tokenizer([str(corpus)], tmp_path / "tok", vocab_size=500)
    assert (trained.vocab_size, trained.num_documents, trained.num_rejects) == (500, 400, 0)
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.vocab_size == 500
    assert tokenizer.eos_id == tokenizer.special_tokens["<|endoftext|>"] == 0
    assert tokenizer.adds_bos is False
    assert choose(tokenizer).engine == "gigatoken"


def test_no_text_is_unknown_to_a_trained_tokenizer(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer([str(corpus)], tmp_path / "tok", vocab_size=300)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    for text in ("never seen: ꙮ \U0001f9ff\x00\x7f", " leading", "", "\n\t "):
        assert library.decode(library.encode(text).ids) == text


def test_the_same_text_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_tokenizer([str(corpus)], tmp_path / name, vocab_size=700)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_every_format_gives_the_same_tokenizer(tmp_path: Path) -> None:
    texts = [text.strip() or "x" for text in make_texts(150, 3)]
    texts = [" ".join(text.split()) for text in texts]
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("\n".join(texts), "utf-8")
    (tmp_path / "e.json").write_text(json.dumps([{"text": text} for text in texts]))
    made = set()
    for path in sorted(tmp_path.glob("*.*")):
        train_tokenizer([str(path)], tmp_path / "out" / path.name, vocab_size=400)
        made.add((tmp_path / "out" / path.name / "tokenizer.json").read_bytes())
    assert len(made) == 1


def test_a_sample_is_bounded_and_comes_from_all_parts_of_all_inputs(tmp_path: Path) -> None:
    for name, low in (("a", 0x3B1), ("b", 0x431)):
        lines = [chr(low + line // 1000) * 99 for line in range(9000)]
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    notes = Notes()
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    trained = train_tokenizer(inputs, tmp_path / "tok", vocab_size=500, limit_bytes=100_000, display=notes)
    assert 50_000 <= trained.num_bytes <= 100_000 + 64
    assert re.fullmatch(r"training on about 100 kB of text, spread over 2 files \(4 MB\)", notes.said[0])
    vocabulary = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    for low in (0x3B1, 0x431):
        for step in range(9):
            assert len(vocabulary.encode(chr(low + step) * 2).ids) < 4, "this part was not in the sample"


def test_one_document_above_the_limit_is_cut(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["é word " * 10_000])
    assert train_tokenizer([str(path)], tmp_path / "tok", vocab_size=300, limit_bytes=1000).num_bytes == 1000


def test_bad_records_are_counted_and_reported(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(50, 4))
    path.write_text(path.read_text("utf-8") + "{oops\n", "utf-8")
    notes = Notes()
    assert train_tokenizer([str(path)], tmp_path / "tok", vocab_size=300, display=notes).num_rejects == 1
    assert any("1 record could not be read" in text for text in notes.said)


def test_a_vocabulary_that_the_text_cannot_fill_is_reported(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["ab ab"])
    notes = Notes()
    trained = train_tokenizer([str(path)], tmp_path / "tok", vocab_size=5000, display=notes)
    assert trained.vocab_size < 270
    assert f"the text gives only {trained.vocab_size:,} tokens, not 5,000; use more text" in notes.said


def test_several_special_tokens_come_first_in_their_order(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer([str(corpus)], tmp_path / "tok", vocab_size=300, special_tokens=("<eot>", "<user>", "<bot>"))
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.special_tokens == {"<eot>": 0, "<user>": 1, "<bot>": 2}
    assert tokenizer.eos_id == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"vocab_size": 256}, "--vocab-size 256 must be from 257"),
        ({"vocab_size": 2_000_000}, "--vocab-size 2000000 must be from 257"),
        ({"vocab_size": 300, "special_tokens": ()}, "--special-tokens is empty"),
        ({"vocab_size": 300, "special_tokens": ("<a>", "<a>")}, "names a token twice"),
        ({"vocab_size": 300, "limit_bytes": 0}, "--sample 0 must be positive"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        train_tokenizer([str(tmp_path / "not-even-there")], tmp_path / "tok", **flags)
    assert not (tmp_path / "tok").exists()


def test_an_existing_tokenizer_is_not_replaced_unless_asked(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("precious")
    with pytest.raises(UsageError, match="exists; choose another directory with -o, or pass --overwrite"):
        train_tokenizer([str(corpus)], tmp_path / "tok", vocab_size=300)
    assert (tmp_path / "tok" / "tokenizer.json").read_text() == "precious"
    train_tokenizer([str(corpus)], tmp_path / "tok", vocab_size=300, overwrite=True)
    assert load_tokenizer(str(tmp_path / "tok")).vocab_size == 300


def test_inputs_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UsageError, match="no text to train on"):
        train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "tok", vocab_size=300)


def test_a_directory_that_cannot_be_made_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"choose (a|another) directory with -o"):
            train_tokenizer([str(corpus)], out, vocab_size=300)
