"""Files of ranks under other names, and pickles, which are not opened."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest

from tests.conftest import make_texts
from tests.support.structures import NANOCHAT
from tokenmill.engines import choose, create, load_tokenizer, make_reference, open_tokenizer
from tokenmill.engines.tokenizer import PICKLE
from tokenmill.errors import UsageError

tiktoken = pytest.importorskip("tiktoken")
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b" th": 257}
SPECIALS = {"<|bos|>": 258}


def write_ranks(path: Path) -> None:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()))
    definition = {"name": "own", "pattern": NANOCHAT, "special_tokens": SPECIALS}
    path.with_name("tiktoken.json").write_text(json.dumps(definition))


def test_a_model_of_ranks_is_read_with_the_pattern_beside_it(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.kind == "tiktoken"
    assert choose(tokenizer).engine == "wordcache"
    tokenizer.save(tmp_path / "saved")
    again = open_tokenizer(tmp_path / "saved", "again")
    texts = make_texts(100, seed=1)
    assert create("wordcache", again).encode(texts).ids.tolist() == make_reference(tokenizer).encode(texts).ids.tolist()


def test_a_model_of_ranks_without_a_pattern_says_what_is_missing(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tokenizer.model")
    (tmp_path / "tiktoken.json").unlink()
    with pytest.raises(UsageError, match=r"put a tiktoken\.json with name, pattern and special_tokens beside it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("named", ["file", "directory"])
def test_a_pickle_is_not_opened_and_the_two_lines_convert_it(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = tiktoken.Encoding("x", pat_str=NANOCHAT, mergeable_ranks=RANKS, special_tokens=SPECIALS)
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    with pytest.raises(UsageError) as raised:
        load_tokenizer(str(tmp_path / "tokenizer.pkl" if named == "file" else tmp_path))
    lines = [line.strip() for line in str(raised.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    assert PICKLE in str(raised.value)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(lines))
    tokenizer = load_tokenizer("own.tiktoken")
    texts = make_texts(30, seed=2)
    assert make_reference(tokenizer).encode(texts).ids.tolist() == [
        i for t in texts for i in encoding.encode_ordinary(t)
    ]
