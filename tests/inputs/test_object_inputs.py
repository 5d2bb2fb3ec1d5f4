"""Inputs in a bucket: read by range in place, never mixed with objects that replace them, also with server faults."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.object_server import FaultyProxy
from tests.support.running import tokenize_here, tokenmill
from tokenmill.errors import DataError, StoreError, TokenmillError, UsageError
from tokenmill.inputs import expand_inputs
from tokenmill.pipeline.input_file import check_unchanged
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.readers.base import ReadOptions
from tokenmill.remote import split_url
from tokenmill.remote.paths import BLOCK_BYTES, RemotePath
from tokenmill.tools.verify import verify


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The same documents in every format that is read."""
    folder = tmp_path / "corpus"
    texts = [text.replace("\n", " ") for text in make_texts(200, seed=5)]
    lines = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    pq.write_table(pa.table({"text": texts, "id": list(range(200))}), folder / "d.parquet", row_group_size=40)
    (folder / "e.json").write_text(json.dumps([{"text": text} for text in texts]))
    (folder / "sub").mkdir()
    (folder / "sub" / "f.txt").write_text("\n".join(texts) + "\n")
    return folder


def upload(folder: Path, url: str) -> str:
    bucket, prefix = split_url(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        bucket.upload(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
    return url


def tokens_of(store: Any) -> list[list[int]]:
    return [store.document(number).tolist() for number in range(store.num_documents)]


def test_every_format_gives_the_same_tokens_as_from_the_disk(
    tmp_path: Path, corpus: Path, s3: str, tiny_tokenizer: Path
) -> None:
    url = upload(corpus, f"{s3}/corpus")
    flags: dict[str, Any] = {"tokenizer": str(tiny_tokenizer), "task_bytes": 20_000, "workers": 1}
    local = tokenize_here(corpus, tmp_path / "local", **flags)
    remote = tokenize_here(url, tmp_path / "remote", **flags)
    assert tokens_of(remote) == tokens_of(local)
    name = url.removeprefix("s3://")
    assert [item.path for item in remote.manifest.inputs][:2] == [f"{name}/a.jsonl", f"{name}/b.jsonl.gz"]
    assert all(item.fingerprint.startswith("s3:") for item in remote.manifest.inputs)
    result = verify(tmp_path / "remote", against=[url])
    assert result.is_sound
    assert result.num_compared > 0


def test_an_item_that_names_no_object_is_refused(s3: str) -> None:
    split_url(s3)[0].put("corpus2/x.jsonl", b"{}")
    for item, message in (
        (f"{s3}/*.csv", "no object matches"),
        (f"{s3}/corpus", "there is no such object"),
        ("s3://no-such-bucket-at-all/x", "does not exist"),
        ("s3://bu*ket/x", "the name of a bucket has no wildcards"),
        ("ftp://host/x", "ftp:// is not read"),
    ):
        with pytest.raises(TokenmillError, match=message):
            expand_inputs([item])


def test_an_object_whose_name_has_wildcards_is_named(s3: str) -> None:
    bucket, _ = split_url(s3)
    for name in ("p%20q+r&s=[1]#x?.txt", "a*.txt"):
        bucket.put(f"odd/{name}", b"x\n")
        assert [item.path for item in expand_inputs([f"{s3}/odd/{name}"])] == [f"{s3}/odd/{name}"]
    bucket.put("odd/ab.txt", b"x\n")
    assert len(expand_inputs([f"{s3}/odd/?*.txt"])) == 3


def test_a_range_is_fetched_and_not_the_whole(s3: str, faulty: FaultyProxy) -> None:
    bucket, _ = split_url(s3)
    data = random.Random(1).randbytes(12 * BLOCK_BYTES + 17)
    bucket.put("big", data)
    path = RemotePath(f"{s3}/big")
    faulty.num_bytes = 0
    with path.open() as file:
        file.seek(5 * BLOCK_BYTES + 7)
        assert file.read(100) == data[5 * BLOCK_BYTES + 7 :][:100]
    assert faulty.num_bytes < 2 * BLOCK_BYTES
    with path.open() as file:
        assert file.read() == data
        assert file.read(1) == b""
        file.seek(-5, os.SEEK_END)
        assert file.read() == data[-5:]


def test_reading_at_random_gives_the_bytes_of_the_object(s3: str) -> None:
    bucket, _ = split_url(s3)
    rng = random.Random(2)
    data = rng.randbytes(20 * BLOCK_BYTES + 333)
    bucket.put("big", data)
    with RemotePath(f"{s3}/big").open() as file:
        for _ in range(200):
            start, size = rng.randrange(len(data)), rng.randrange(3 * BLOCK_BYTES)
            file.seek(start)
            assert file.read(size) == data[start : start + size]


def test_a_run_goes_through_faults_with_the_same_bytes(
    tmp_path: Path, corpus: Path, s3: str, faulty: FaultyProxy, tiny_tokenizer: Path
) -> None:
    url = upload(corpus, f"{s3}/corpus")
    flags: dict[str, Any] = {"tokenizer": str(tiny_tokenizer), "task_bytes": 20_000, "workers": 2}
    tokenize_here(url, tmp_path / "calm", **flags)
    faulty.rate = 0.25
    tm.tokenize(url, tmp_path / "faulty", **flags)
    assert sum(faulty.counts[fault] for fault in faulty.faults) > 10
    for path in sorted((tmp_path / "calm").rglob("*")):
        if path.is_file() and path.name != "run.json":
            assert path.read_bytes() == (tmp_path / "faulty" / path.relative_to(tmp_path / "calm")).read_bytes(), path


def test_an_input_that_is_replaced_is_refused(tmp_path: Path, corpus: Path, s3: str, tiny_tokenizer: Path) -> None:
    url = upload(corpus, f"{s3}/corpus")
    bucket, prefix = split_url(url)
    files = inspect_inputs(expand_inputs([f"{url}/a.jsonl"]), "auto", ReadOptions())
    with RemotePath(files[0].path).open() as opened:
        data = (corpus / "a.jsonl").read_bytes().replace(b"mill", b"MILL")
        bucket.put(f"{prefix}/a.jsonl", data)
        with pytest.raises(TokenmillError, match="was replaced while it was being read"):
            opened.read(10)
    with pytest.raises(DataError, match="other content in the same"):
        check_unchanged(files)
    tokenize_here(f"{url}/a.jsonl", tmp_path / "out", tokenizer=str(tiny_tokenizer))
    bucket.put(f"{prefix}/a.jsonl", (corpus / "a.jsonl").read_bytes())
    with pytest.raises(StoreError, match="has other content than when"):
        tokenize_here(f"{url}/a.jsonl", tmp_path / "out", tokenizer=str(tiny_tokenizer))


def test_estimate_and_limit_read_objects(corpus: Path, s3: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    url = upload(corpus, f"{s3}/corpus")
    done = tokenmill("estimate", f"{url}/*.jsonl*", "--tokenizer", str(tiny_tokenizer))
    assert done.returncode == 0, done.stderr
    store = tokenize_here(
        f"{url}/d.parquet", tmp_path / "few", tokenizer=str(tiny_tokenizer), limit=50, keep_keys=["id"]
    )
    assert store.num_documents == 50


def test_a_bad_line_is_named_with_its_object(tmp_path: Path, s3: str, tiny_tokenizer: Path) -> None:
    bucket, _ = split_url(s3)
    bucket.put("x.jsonl", b'{"text": "good"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=rf"{s3}/x.jsonl line 2: "):
        tokenize_here(f"{s3}/x.jsonl", tmp_path / "out", tokenizer=str(tiny_tokenizer))


def test_no_endpoint_is_a_sentence_on_the_command_line(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    done = tokenmill("tokenize", f"{s3}/x.jsonl", "-o", "never", "--tokenizer", "bytes")
    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tokenizer_in_a_bucket_is_refused_in_a_sentence(tmp_path: Path, s3: str) -> None:
    with pytest.raises(UsageError, match="tokenizers are not read from buckets; copy it to this machine first"):
        tm.tokenize(f"{s3}/x.jsonl", tmp_path / "out", tokenizer=f"{s3}/tokenizer")


def test_a_list_in_a_bucket_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="list of inputs s3://bucket/list.txt must be a file of this machine"):
        tm.tokenize("@s3://bucket/list.txt", tmp_path / "out", tokenizer="bytes")
