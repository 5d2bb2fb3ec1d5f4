"""Formats whose readers find documents by a token: stores in which they would find other documents are refused."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.exports import documents_of, read_llmc, set_special_tokens
from tests.support.in_process import tokenmill_here
from tests.support.running import sentence, tokenize_here
from tests.support.stores import make_store
from tokenmill.errors import UsageError
from tokenmill.formats import _token_blocks
from tokenmill.formats.export import export

EOS, BOS = 1, 2
Documents = list[list[int]]


def first_wrong(documents: Documents, token: int, place: int) -> int | None:
    """The first document that does not have the token exactly once, at its first (0) or last (-1) place."""
    return next((n for n, ids in enumerate(documents) if ids[place:][:1] != [token] or ids.count(token) != 1), None)


def split_at(stream: list[int], token: int) -> Documents:
    """The documents that a reader finds which starts a new one at every token of this kind."""
    starts = [place for place, found in enumerate(stream) if found == token]
    return [stream[a:b] for a, b in zip(starts, [*starts[1:], len(stream)], strict=True)]


bodies = st.lists(st.lists(st.integers(3, 6), max_size=5), min_size=1, max_size=8)


@st.composite
def some_documents(draw: Any) -> Documents:
    """Documents of which all, or all but some, end with EOS and have no other one."""
    documents = [[*body, EOS] for body in draw(bodies)]
    for number in draw(st.lists(st.integers(0, len(documents) - 1), max_size=2)):
        body = documents[number][:-1]
        documents[number] = draw(st.sampled_from([body, [EOS, *body, EOS], [*body, EOS, EOS], [*body, EOS, 3], []]))
    return documents


@settings(max_examples=150, deadline=None)
@given(documents=some_documents().filter(any), num_shards=st.integers(1, 4), block=st.integers(1, 9))
@example(documents=[[3, 1], []], num_shards=1, block=9)
@example(documents=[[1, 3, 1], [3, 1]], num_shards=2, block=1)
def test_olmo_takes_documents_with_one_eos_at_the_end_and_names_the_first_other_one(
    documents: Documents, num_shards: int, block: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_token_blocks, "BLOCK_TOKENS", block)
        patch.setattr(os, "fsync", lambda descriptor: None)
        store = set_special_tokens(make_store(Path(name) / "store", documents, num_shards=num_shards), eos_id=EOS)
        wrong = first_wrong(documents, EOS, -1)
        if wrong is None:
            export(store, Path(name) / "out", to="olmo")
            return
        with pytest.raises(UsageError, match=f"OLMo-core finds .* document {wrong} of split train .*--no-eos-check"):
            export(store, Path(name) / "out", to="olmo")
        assert not (Path(name) / "out").exists()
        export(store, Path(name) / "out", to="olmo", eos_check=False)


@settings(max_examples=100, deadline=None)
@given(documents=some_documents().filter(any), num_shards=st.integers(1, 3), with_bos=st.booleans())
def test_llmc_is_written_only_if_its_reader_finds_the_same_documents(
    documents: Documents, num_shards: int, with_bos: bool
) -> None:
    if with_bos:
        documents = [[BOS if token == EOS else token for token in reversed(ids)] for ids in documents]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        store = make_store(Path(name) / "store", documents, num_shards=num_shards)
        set_special_tokens(store, eos_id=EOS, bos_id=BOS if with_bos else None)
        token = BOS if with_bos else EOS
        wrong = first_wrong(documents, token, 0 if with_bos else -1)
        if wrong is not None:
            # A document without tokens begins where the next one does, so either may be named.
            named = r"\d+" if with_bos and [] in documents else wrong
            with pytest.raises(UsageError, match=rf"modded-nanogpt finds .* document {named} of split train"):
                export(store, Path(name) / "out", to="llmc")
            return
        export(store, Path(name) / "out", to="llmc")
        (stream,), _ = read_llmc(Path(name) / "out")
        in_front = documents if with_bos else [[EOS, *ids[:-1]] for ids in documents]
        assert split_at(stream, token) == in_front


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose EOS ends every turn, as those of many chat models do."""
    folder = tmp_path_factory.mktemp("chatml")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ["[UNK]", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    config = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": name, **special} for number, name in enumerate(names)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {name: n for n, name in enumerate([*names, "user", "assistant", "hi", "yes"])},
            "unk_token": "[UNK]",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    records = [{"messages": turns * count} for count in (1, 2, 1, 3)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def chat_store(chatml: Path, out: Path, **flags: Any) -> Path:
    return tokenize_here(chatml / "chat.jsonl", out, tokenizer=str(chatml), messages_key="messages", **flags).path


def test_conversations_whose_turns_end_with_eos_are_refused(chatml: Path, tmp_path: Path) -> None:
    for name, flags in (("plain", {}), ("eos", {"eos": True})):
        store = chat_store(chatml, tmp_path / name, **flags)
        done = tokenmill_here("export", store, tmp_path / "out", "--to", "olmo")
        said = sentence(done)
        assert done.returncode == 2 and "document 0 of split train has id 2 in other places, too" in said
        assert "tokenize with --eos --eos-token TOKEN, a token that no text has, or pass --no-eos-check" in said
    store = chat_store(chatml, tmp_path / "apart", eos=True, eos_token="<|endoftext|>")
    export(store, tmp_path / "out", to="olmo")
    stream = np.fromfile(tmp_path / "out" / "train.npy", "<u2").tolist()
    ends = [place + 1 for place, token in enumerate(stream) if token == 3]
    assert ends == np.cumsum([len(ids) for ids in documents_of(tm.open(store))]).tolist()


def test_an_eos_that_the_template_writes_counts(tmp_path: Path, chatml: Path) -> None:
    template = "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else ' ') }}{% endfor %}"
    (tmp_path / "one.jinja").write_text(template)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    store = tokenize_here(
        tmp_path / "one.jsonl",
        tmp_path / "store",
        tokenizer=str(chatml),
        messages_key="messages",
        chat_template=str(tmp_path / "one.jinja"),
    )
    assert store.manifest.special_tokens.eos_id is None
    export(store.path, tmp_path / "out", to="olmo")


def test_a_store_without_eos_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    store = tokenize_here(tmp_path / "in.jsonl", tmp_path / "store", tokenizer="bytes", eos=False)
    for to, reader in (("olmo", "OLMo-core"), ("llmc", "modded-nanogpt")):
        done = tokenmill_here("export", store.path, tmp_path / "out", "--to", to)
        assert done.returncode == 2 and re.search(
            f"{reader} finds documents by their end-of-text token, and .*; tokenize with --eos, or pass --no-eos-check",
            sentence(done),
        )
        assert tokenmill_here("export", store.path, tmp_path / to, "--to", to, "--no-eos-check").returncode == 0
