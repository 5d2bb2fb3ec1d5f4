"""Estimates: close to the truth, inside their own intervals, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.in_process import tokenmill_here
from tests.support.running import tokenmill
from tokenmill.engines import choose, create, load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.inputs import Input
from tokenmill.pipeline.plan import prepare as preparing
from tokenmill.pipeline.request import Request
from tokenmill.tools.estimate import Estimate, estimate_run
from tokenmill.tools.estimate import survey as surveying


def estimate_of(
    path: Path, tokenizer: Path | str, *, share: float | None = None, seq_len: int | None = None, **flags: Any
) -> Estimate:
    request = {"inputs": [str(path)], "out": str(path.parent / "store"), "tokenizer": str(tokenizer), **flags}
    return estimate_run(Request.from_flags(request), share=share, seq_len=seq_len)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", make_texts(4000, seed=8))


@pytest.fixture(scope="module")
def store(corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tm.TokenStore:
    """The true figures of the corpus, which do not depend on its format."""
    return tm.tokenize(corpus, tmp_path_factory.mktemp("truth") / "out", tokenizer=str(tiny_tokenizer))


def check(found: Estimate, store: tm.TokenStore, margin: float = 0.05) -> None:
    tokens, documents = store.manifest.num_tokens, store.manifest.num_documents
    assert abs(found.tokens.value / tokens - 1) < margin
    assert found.tokens.low * 0.98 <= tokens <= found.tokens.high * 1.02
    assert abs(found.documents.value / documents - 1) < margin
    size = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file() and path.name != "run.json")
    assert abs(found.disk_bytes.value / size - 1) < 0.15


def test_a_small_sample_estimates_tokens_documents_and_disk(
    corpus: Path, store: tm.TokenStore, tiny_tokenizer: Path
) -> None:
    found = estimate_of(corpus, tiny_tokenizer, share=0.1)
    assert found.sample_bytes < 0.2 * found.text_bytes.value
    assert found.documents.is_exact and not found.tokens.is_exact
    check(found, store)
    assert not (corpus.parent / "store").exists()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
def test_large_inputs_are_read_in_places(
    corpus: Path,
    store: tm.TokenStore,
    tiny_tokenizer: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(surveying, "READ_ALL_BYTES", 60_000 if kind == "parquet" else 300_000)
    monkeypatch.setattr(surveying, "PLACE_BYTES", 4_000)
    path = tmp_path / f"large.{kind}"
    if kind == "parquet":
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        pq.write_table(pa.table({"text": texts}), path, row_group_size=50)
    else:
        data = corpus.read_bytes()
        path.write_bytes(data if kind == "jsonl" else zstandard.compress(data))
    found = estimate_of(path, tiny_tokenizer)
    # Row groups of equal size have no spread.
    assert found.documents.is_exact == (kind == "parquet")
    check(found, store, margin=0.15)


@pytest.mark.parametrize("reads_all_bytes", [10**9, 20_000])
def test_files_of_a_sample_count_for_the_files_that_they_represent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_all_bytes: int
) -> None:
    monkeypatch.setattr(surveying, "READ_ALL_BYTES", reads_all_bytes)
    monkeypatch.setattr(surveying, "PLACE_BYTES", 4_000)
    few = write_jsonl(tmp_path / "few.jsonl", ["a few words " * 40] * 100)
    many = write_jsonl(tmp_path / "many.jsonl", ["x"] * 400)
    inputs = [Input(str(few)), Input(str(many), weight=25.0)]
    monkeypatch.setattr(preparing, "expand_inputs", lambda *_, **__: inputs)
    found = estimate_of(few, "bytes")
    documents, text_bytes = 100 + 25 * 400, 100 * 480 + 25 * 400
    assert found.documents.value == pytest.approx(documents, rel=0.03)
    assert found.text_bytes.value == pytest.approx(text_bytes, rel=0.03)
    assert found.tokens.value == pytest.approx(text_bytes + documents, rel=0.1)
    assert not found.documents.is_exact
    assert any("2 files were looked at, and stand for all" in note for note in found.notes)


def count_tokens(path: Path, tokenizer: Path) -> int:
    """All tokens of a file of JSON lines, one EOS per document among them."""
    data = path.read_bytes()
    lines = (
        data if path.suffix == ".jsonl" else zstandard.ZstdDecompressor().decompressobj().decompress(data)
    ).splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    loaded = load_tokenizer(str(tokenizer))
    return len(create(choose(loaded).engine, loaded).encode(texts).ids) + len(texts)


def test_text_that_represents_more_is_sampled_more(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = write_jsonl(tmp_path / "words.jsonl", ["the same words and " * 100] * 200)
    digits = write_jsonl(tmp_path / "digits.jsonl", [f"{number:x}" * 300 for number in range(10**6, 10**6 + 200)])
    inputs = [Input(str(words)), Input(str(digits), weight=25.0)]
    monkeypatch.setattr(preparing, "expand_inputs", lambda *_, **__: inputs)
    found = estimate_of(words, tiny_tokenizer)
    monkeypatch.undo()
    tokens = count_tokens(words, tiny_tokenizer) + 25 * count_tokens(digits, tiny_tokenizer)
    assert found.tokens.value == pytest.approx(tokens, rel=0.03)


def test_a_field_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "text"}\n' * 3)
    for arguments in (["estimate", tmp_path / "a.jsonl"], ["tokenize", tmp_path / "a.jsonl", "-o", "out", "--dry-run"]):
        done = tokenmill(*arguments, "--tokenizer", "bytes", cwd=tmp_path)
        assert done.returncode == 1
        said = (
            "a.jsonl: none of the 3 records that were read can be tokenized: no field 'text'; the record has 'content'"
        )
        assert said in " ".join(done.stderr.split())


def test_supervised_data_is_rendered_first(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = [text for text in make_texts(600, seed=3) if text]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"p": text, "r": "yes " + text}) + "\n" for text in texts))
    flags = {"prompt_key": "p", "response_key": "r"}
    found = estimate_of(path, tiny_tokenizer, **flags)
    check(found, tm.tokenize(path, tmp_path / "out", tokenizer=str(tiny_tokenizer), **flags))


def test_padded_arrays_are_as_large_as_the_export_makes_them(
    corpus: Path, store: tm.TokenStore, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    found = estimate_of(corpus, tiny_tokenizer, seq_len=32).padded
    assert found is not None
    rows = len(tm.pack(store, seq_len=32, method="pad"))
    assert store.num_documents < rows
    assert abs(found.rows.value / rows - 1) < 0.03
    assert found.rows.low <= rows <= found.rows.high
    tm.export(store, tmp_path / "npy", to="npy", seq_len=32)
    size = sum(path.stat().st_size for path in (tmp_path / "npy").rglob("*.npy"))
    assert abs(found.disk_bytes.value / size - 1) < 0.03
    tensors = 3 * 8 + 4
    assert found.memory_bytes.value == pytest.approx(found.rows.value * 32 * tensors)


def test_more_workers_need_less_time_and_limits_count(corpus: Path, tiny_tokenizer: Path) -> None:
    found = estimate_of(corpus, tiny_tokenizer, workers=4, limit=100)
    assert found.documents.value == 100
    seconds = [figure.value for _, figure in sorted(found.seconds.items())]
    assert seconds == sorted(seconds, reverse=True)
    assert all(figure.low <= figure.value <= figure.high for figure in found.seconds.values())
    with pytest.raises(UsageError, match="--sample 2 must be above 0"):
        estimate_of(corpus, tiny_tokenizer, share=2)


def test_the_command_line(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    found = json.loads(tokenmill_here("estimate", corpus, "--tokenizer", tiny_tokenizer, "--json").stdout)
    assert {"tokens", "documents", "disk_bytes", "memory_bytes", "seconds"} <= set(found)
    assert found["seconds"]["1"] > 0 and found["intervals"]["tokens"][0] <= found["tokens"]
    shown = tokenmill_here("estimate", corpus, "--tokenizer", tiny_tokenizer, "--seq-len", "512").stdout
    assert "x 512 x 28 bytes = " in shown and max(map(len, shown.splitlines())) <= 80
    dry = tokenmill("tokenize", corpus, "-o", tmp_path / "dry", "--tokenizer", tiny_tokenizer, "--dry-run")
    assert dry.returncode == 0 and "tokens" in dry.stdout and not (tmp_path / "dry").exists()


@pytest.mark.parametrize("corpus_name", ["web_en", "multi", "code"])
@pytest.mark.parametrize("tokenizer", ["gpt2", "bytebpe8k"])
def test_two_percent_of_real_corpora_estimate_tokens_within_five_percent(
    shared_data: Path, corpus_name: str, tokenizer: str, tmp_path: Path
) -> None:
    path, spec = shared_data / f"{corpus_name}.jsonl.zst", shared_data / "tokenizers" / tokenizer
    found = estimate_run(
        Request.from_flags({"inputs": [str(path)], "out": str(tmp_path), "tokenizer": str(spec)}), share=0.02
    )
    truth = count_tokens(path, spec)
    assert abs(found.tokens.value / truth - 1) < 0.05
    assert found.tokens.low <= truth <= found.tokens.high


def test_some_of_many_compressed_files_stand_for_all(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes of each would be decompressed for nothing, and count as text that was not read."""
    num_bytes = 0
    for number in range(12):
        write_jsonl(tmp_path / "a.jsonl", make_texts(1500 + 100 * number, seed=number))
        data = (tmp_path / "a.jsonl").read_bytes()
        num_bytes += len(data)
        (tmp_path / f"{number:02}.jsonl.zst").write_bytes(zstandard.compress(data))
    (tmp_path / "a.jsonl").unlink()
    monkeypatch.setattr(surveying, "READ_ALL_BYTES", num_bytes // 2)
    found = estimate_of(tmp_path, tiny_tokenizer)
    store = tm.tokenize(tmp_path, tmp_path / "out", tokenizer=str(tiny_tokenizer))
    check(found, store)
    assert found.notes[0].endswith("of 12 compressed inputs were read; the others may differ")


def test_a_text_that_is_shorter_than_a_snippet_is_counted(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n")
    found = estimate_of(tmp_path / "a.txt", tiny_tokenizer)
    assert found.tokens.value == tm.tokenize(tmp_path / "a.txt", tmp_path / "out", tokenizer=tiny_tokenizer).num_tokens
