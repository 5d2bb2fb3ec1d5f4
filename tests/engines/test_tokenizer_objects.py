"""Tokenizers as objects: the store that they make is that of their files, wherever they were loaded from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.running import ThreadExecutor, ids_of, snapshot
from tokenmill.engines import load_tokenizer
from tokenmill.engines.tokenizer_objects import tokenizer_spec
from tokenmill.errors import UsageError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", make_texts(80, seed=2))


def tokenize(corpus: Path, out: Path, tokenizer: Any, **flags: Any) -> tm.TokenStore:
    settings = {"executor": ThreadExecutor(), "display": "quiet", **flags}
    return tm.tokenize(corpus, out, tokenizer=tokenizer, **settings)


def test_a_tokenizer_of_tokenizers_makes_a_store_that_explains_itself(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    held = tokenizers.Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    of_files = tokenize(corpus, tmp_path / "files", str(tiny_tokenizer))
    store = tokenize(corpus, tmp_path / "object", held, eos_token="<|endoftext|>")
    assert ids_of(store) == ids_of(of_files)
    assert store.decode(store.document(3)) == of_files.decode(of_files.document(3))
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "object" / "tokenizer" / "tokenizer.json"))
    assert saved.to_str() == held.to_str()
    held.enable_truncation(3)
    held.enable_padding()
    assert ids_of(tokenize(corpus, tmp_path / "cut", held, eos_token="<|endoftext|>")) == ids_of(of_files)
    with pytest.raises(UsageError, match="tokenizer names no end-of-text token; pass --eos-token"):
        tokenize(corpus, tmp_path / "no eos", held)


def test_the_tokenizer_of_a_store_is_a_tokenizer(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    store = tokenize(corpus, tmp_path / "a", tiny_tokenizer)
    again = tokenize(corpus, tmp_path / "b", store.tokenizer)
    assert snapshot(again.path)["manifest.json"] == snapshot(store.path)["manifest.json"]


def test_a_tokenizer_of_transformers_makes_the_store_of_its_files(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    of_files = tokenize(corpus, tmp_path / "files", str(tiny_tokenizer))
    stores = []
    for name in ("a", "b"):
        folder = tmp_path / name / "tiny"
        transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tiny_tokenizer / "tokenizer.json"), eos_token="<|endoftext|>", bos_token="<|begin|>"
        ).save_pretrained(folder)
        held = transformers.AutoTokenizer.from_pretrained(folder)
        held.chat_template = "{{ messages }}"
        stores.append(tokenize(corpus, tmp_path / f"store-{name}", held))
    assert ids_of(stores[0]) == ids_of(of_files)
    assert snapshot(stores[0].path) == snapshot(stores[1].path)
    assert stores[0].manifest.tokenizer.name == "tiny"
    assert stores[0].tokenizer.chat_template == "{{ messages }}"
    assert stores[0].manifest.special_tokens.eos_id == of_files.manifest.special_tokens.eos_id


def test_a_sentencepiece_processor_is_a_tokenizer(shared_data: Path, corpus: Path, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = shared_data / "tokenizers" / "spm_bpe32k" / "tokenizer.model"
    held = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert ids_of(tokenize(corpus, tmp_path / "object", held)) == ids_of(tokenize(corpus, tmp_path / "file", path))


def test_an_object_that_is_no_tokenizer_is_refused_in_a_sentence(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer 5 \(int\) is unknown; expected a path, a Hub id, .* or an object"):
        tokenize(corpus, tmp_path / "out", 5)
    held = tokenizers.Tokenizer(tokenizers.models.BPE())

    class Words:
        def pre_tokenize(self, text: Any) -> None: ...

    held.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Words())
    with pytest.raises(UsageError, match="cannot be saved as a tokenizer.json: Custom PreTokenizer"):
        tokenize(corpus, tmp_path / "out", held)
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding("mine", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    with pytest.raises(UsageError, match="cannot be saved to files; pass 'tiktoken:mine'"):
        tokenize(corpus, tmp_path / "out", encoding)
    assert not any(tmp_path.iterdir())


PROGRAM = """
import os, sys, tokenizers
from tokenmill.engines.tokenizer_objects import tokenizer_spec
folder = tokenizer_spec(tokenizers.Tokenizer.from_file(sys.argv[1]))
if os.fork() == 0:
    sys.exit()
os.wait()
print(folder, os.path.isfile(folder + "/tokenizer.json"))
"""


def test_the_files_of_an_object_last_as_long_as_the_program(tiny_tokenizer: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_tokenizer / "tokenizer.json")]
    folder, was_there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert was_there == "True"
    assert not Path(folder).parents[1].exists()


def test_equal_objects_have_one_folder(tiny_tokenizer: Path) -> None:
    opened = load_tokenizer(str(tiny_tokenizer))
    assert tokenizer_spec(opened) == tokenizer_spec(load_tokenizer(str(tiny_tokenizer)))
    assert json.loads((Path(tokenizer_spec(opened)) / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer_spec(tiny_tokenizer) == str(tiny_tokenizer)
