"""Batches from raw text: the same order at any speed, exact resuming, and the store that `tokenize` makes."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.program import Program
from tests.support.running import compress, jsonl, snapshot, wait_for, write_parquet
from tokenmill.streaming import first_window, tokenized_text
from tokenmill.streaming.windows import WindowedRows

SEQ_LEN, BATCH_SIZE = 64, 4
SMALL = {"task_bytes": 20_000, "workers": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind of input that is cut differently: plain, compressed, Parquet and many small ones."""
    folder = tmp_path_factory.mktemp("text")
    write_jsonl(folder / "plain.jsonl", make_texts(300, seed=1))
    (folder / "stream.jsonl.zst").write_bytes(compress(jsonl(make_texts(300, seed=2)), "zst"))
    write_parquet(folder / "rows.parquet", make_texts(200, seed=3), rows_per_group=40)
    for number in range(3):
        write_jsonl(folder / f"small-{number}.jsonl", make_texts(10, seed=10 + number))
    return folder


def load(corpus: Path, cache: Path, tokenizer: Path, **settings: Any) -> Any:
    told = {**SMALL, **settings}
    return tm.load(
        f"{corpus}/**" if corpus.is_dir() else str(corpus),
        SEQ_LEN,
        BATCH_SIZE,
        tokenizer=str(tokenizer),
        cache=cache,
        **told,
    )


def hashes(loader: Any, count: int | None = None) -> list[str]:
    return [
        hashlib.sha256(np.asarray(x).astype(np.int64).tobytes() + np.asarray(y).astype(np.int64).tobytes()).hexdigest()
        for x, y in itertools.islice(loader, count)
    ]


@pytest.fixture(scope="module")
def finished(corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The cache of a stream that was read for two epochs while it was tokenized, and its batches."""
    cache = tmp_path_factory.mktemp("truth") / "tok"
    return cache, hashes(load(corpus, cache, tiny_tokenizer, epochs=2))


@pytest.fixture(scope="module")
def truth(finished: tuple[Path, list[str]]) -> list[str]:
    """The batches of two epochs."""
    return finished[1]


def test_the_store_is_the_one_that_tokenize_makes(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    settings = {"val_fraction": 0.1}
    hashes(load(corpus, tmp_path / "a", tiny_tokenizer, epochs=1.5, **settings))
    tm.tokenize(f"{corpus}/**", tmp_path / "b", tokenizer=str(tiny_tokenizer), task_bytes=20_000, **settings)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_order_depends_on_neither_timing_nor_workers_nor_what_is_on_disk(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]
) -> None:
    assert hashes(load(corpus, tmp_path / "two", tiny_tokenizer, epochs=2, workers=2)) == truth
    assert hashes(load(corpus, tmp_path / "two", tiny_tokenizer, epochs=2)) == truth
    # Some tasks are done, and not the first ones.
    half = tmp_path / "half"
    tm.tokenize(f"{corpus}/**", half, tokenizer=str(tiny_tokenizer), **SMALL)
    assert hashes(load(corpus, half, tiny_tokenizer, epochs=2)) == truth


def test_later_epochs_are_those_of_the_store(corpus: Path, tiny_tokenizer: Path, finished: Any) -> None:
    loader = load(corpus, finished[0], tiny_tokenizer, epochs=3)
    rows = [row for x, _ in loader for row in np.asarray(x).tolist()]
    first = loader.rows.num_rows
    from_store = tm.load(finished[0], SEQ_LEN, BATCH_SIZE).rows
    assert from_store.num_rows - first in range(12)
    assert len(loader) == -(-(first + 2 * from_store.num_rows) // BATCH_SIZE)
    later = [from_store[from_store.num_rows + number].tolist() for number in range(2 * from_store.num_rows)]
    assert rows[first : first + len(later)] == later
    # The first epoch has rows of all documents, each token at most once.
    assert len({tuple(row) for row in rows[:first]}) > 0.9 * first


def test_rows_of_the_first_epoch_are_shuffled_over_inputs(corpus: Path, tiny_tokenizer: Path, finished: Any) -> None:
    orders = []
    for seed in (0, 1):
        loader = load(corpus, finished[0], tiny_tokenizer, epochs=1, seed=seed)
        orders.append([row for x, _ in loader for row in np.asarray(x).tolist()])
    assert orders[0] != orders[1]
    plain = load(corpus, finished[0], tiny_tokenizer, epochs=1, shuffle=False)
    rows = [row for x, _ in plain for row in np.asarray(x).tolist()]
    assert rows[0] == tm.open(finished[0]).read(0, SEQ_LEN).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "best-fit", "document_mask": True},
        {"packing": "pad", "shuffle": False},
        {"packing": "best-fit", "long_documents": "drop"},
        {"split": "val", "val_fraction": 0.3},
        {"window": "30KB", "seed": 5},
    ],
)
def test_any_kind_of_rows(corpus: Path, tiny_tokenizer: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    text = corpus / "plain.jsonl"
    live = hashes(load(text, tmp_path / "tok", tiny_tokenizer, epochs=2, **settings))
    assert live
    assert hashes(load(text, tmp_path / "tok", tiny_tokenizer, epochs=2, **settings)) == live


@pytest.mark.parametrize("name", ["plain.jsonl", "stream.jsonl.zst", "rows.parquet"])
def test_the_beginning_is_the_start_of_the_first_shard(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_window, "HEAD_BYTES", 3000)
    encoded = []
    encode = first_window.FirstWindow.encode

    def watch(self: first_window.FirstWindow, *arguments: Any) -> Any:
        encoded.append((self, encode(self, *arguments)))
        return encoded[-1][1]

    monkeypatch.setattr(first_window.FirstWindow, "encode", watch)
    live = load(corpus / name, tmp_path / "tok", tiny_tokenizer, epochs=2, shuffle=False)
    got = hashes(live)
    ((head, documents),) = encoded
    store = tm.open(tmp_path / "tok")
    shard = store.manifest.splits["train"].shards[0]
    assert 0 < documents.num_documents == head.count(store.path, shard) < shard.num_documents
    assert all((documents.document(n) == store.document(n)).all() for n in range(documents.num_documents))
    assert hashes(load(corpus / name, tmp_path / "tok", tiny_tokenizer, epochs=2, shuffle=False)) == got
    assert len(encoded) == 1


def test_the_first_batch_comes_long_before_the_text_is_tokenized(tiny_tokenizer: Path, tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "big.jsonl", make_texts(20_000, seed=4))
    # All of the text in one task, with the slow engine.
    settings = {"engine": "huggingface", "task_bytes": "256MB", "workers": 1}
    started = time.monotonic()
    loader = load(text, tmp_path / "tok", tiny_tokenizer, **settings)
    batches = iter(loader)
    next(batches)
    assert time.monotonic() - started < 5
    assert not list(tmp_path.glob("tok/train/*.bin"))
    assert loader.bottleneck != "tokenizing; run `tokenmill tokenize` first"
    for _ in range(100 * len(loader.rows._windows[0]) // BATCH_SIZE):
        next(batches)
        if len(loader.rows._windows) > 1:
            break
    assert loader.bottleneck == "tokenizing; run `tokenmill tokenize` first"


PROGRAM = """
import hashlib, json, sys, time
from pathlib import Path
import tokenmill as tm

corpus, cache, tokenizer, log, pause = sys.argv[1:]
log = Path(log)
done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
loader = tm.load(corpus, 64, 4, tokenizer=tokenizer, cache=cache, epochs=2, task_bytes=20_000, workers=1)
if done:
    loader.load_state_dict(done[-1]["state"])
with log.open("a") as file:
    for x, y in loader:
        digest = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
        file.write(json.dumps({"hash": digest, "state": loader.state_dict()}) + chr(10))
        file.flush()
        time.sleep(float(pause))
"""


def test_a_killed_training_resumes_exactly(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]
) -> None:
    log = tmp_path / "log.jsonl"
    arguments = [f"{corpus}/**", str(tmp_path / "tok"), str(tiny_tokenizer), str(log)]

    def num_lines() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    for stop in (3, len(truth) // 4, len(truth) // 2 + 5):
        run = Program([sys.executable, "-c", PROGRAM, *arguments, "0.002"])
        wait_for(lambda stop=stop: num_lines() >= stop, 60)
        run.send_signal(signal.SIGKILL)
        run.wait()
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if line.endswith("}\n")))
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments, "0"], check=True, timeout=90)
    assert [json.loads(line)["hash"] for line in log.read_text().splitlines()] == truth


def test_ranks_share_one_cache_and_one_of_them_tokenizes(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]
) -> None:
    cache = tmp_path / "tok"
    told: dict[str, Any] = {"tokenizer": str(tiny_tokenizer), "cache": cache, "epochs": 2, **SMALL}
    loaders = [tm.load(f"{corpus}/**", SEQ_LEN, 2, rank=rank, world_size=2, **told) for rank in range(2)]
    joined = []
    for (x0, y0), (x1, y1) in zip(*loaders, strict=True):
        x, y = np.concatenate([x0, x1]), np.concatenate([y0, y1])
        joined.append(hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest())
    assert joined == truth


def test_another_process_takes_over_when_the_one_that_tokenizes_dies(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]
) -> None:
    cache = tmp_path / "tok"
    arguments = [f"{corpus}/**", str(cache), str(tiny_tokenizer), str(tmp_path / "log"), "5"]
    other = Program([sys.executable, "-c", PROGRAM, *arguments])
    wait_for(lambda: (cache / ".lock").exists() and (cache / ".tasks").exists(), 30)
    loader = load(corpus, cache, tiny_tokenizer, epochs=2)
    batches = iter(loader)
    first = hashes(batches, 1)
    other.kill()
    other.wait()
    assert first + hashes(batches) == truth


@pytest.mark.parametrize("framework", ["torch", "jax", "grain", "tf"])
def test_every_framework(corpus: Path, tiny_tokenizer: Path, finished: Any, framework: str) -> None:
    pytest.importorskip({"tf": "tensorflow"}.get(framework, framework))
    loader = load(corpus, finished[0], tiny_tokenizer, epochs=2, framework=framework)
    if framework == "grain":
        loader = ((batch["inputs"], batch["targets"]) for batch in loader)
    assert hashes(loader) == finished[1]


def test_torch_workers_follow_the_run(corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]) -> None:
    pytest.importorskip("torch")
    loader = load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=2, framework="torch", num_workers=2)
    assert hashes(loader) == truth


def test_tf_data_of_text_that_is_still_tokenized(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, truth: list[str]
) -> None:
    pytest.importorskip("tensorflow")
    loader = load(corpus, tmp_path / "tok", tiny_tokenizer, framework="tf")
    assert hashes(loader.dataset(), 40) == truth[:40]
    with pytest.raises(tm.UsageError, match="leave epochs out"):
        load(corpus, tmp_path / "new", tiny_tokenizer, framework="tf", epochs=1).dataset()


def test_a_copy_follows_without_tokenizing(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    loader = load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=2)
    copied: WindowedRows = pickle.loads(pickle.dumps(loader.rows))
    assert [row.tolist() for row in copied] == [row.tolist() for row in loader.rows]
    assert copied.fingerprint == loader.rows.fingerprint
    assert repr(copied) == repr(loader.rows)


def test_steps_are_known_when_the_text_is_tokenized(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    loader = load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=2)
    assert not loader.rows.is_known
    with pytest.raises(TypeError, match="known only when all text is tokenized"):
        len(loader)
    with pytest.raises(TypeError, match="count steps"):
        len(loader.rows)
    with pytest.raises(tm.UsageError, match="count steps"):
        tm.mix([(loader.rows, 0.5), (loader.rows, 0.5)])
    assert len(hashes(loader)) == len(loader)
    # Iterating again goes on with the next epochs.
    assert len(hashes(loader)) == len(loader)


def test_where_a_row_comes_up(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    rows = load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=1).rows
    num_rows = len(list(rows))
    later = [rows[num_rows + number].tolist() for number in range(20)]
    for leaf in rows.leaves():
        for number in rows.where(leaf, 0, num_rows + 20):
            found = rows[number].tolist() if number < num_rows else later[number - num_rows]
            assert found == leaf[0].tolist()


def test_verbose_prints_the_time_of_each_window(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hashes(load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=1, verbose=True))
    lines = capfd.readouterr().err.splitlines()
    said = r"tokenized [\d,]+ documents in [\d,]+ ms \(\d+\.\d{3} ms per document\), training waited [\d,]+ ms"
    assert lines
    assert all(re.fullmatch(said, line) for line in lines), lines
    hashes(load(corpus, tmp_path / "tok", tiny_tokenizer, epochs=1, verbose=True))
    lines = capfd.readouterr().err.splitlines()
    assert all(re.fullmatch(r"read [\d,]+ documents from .*, training waited [\d,]+ ms", line) for line in lines)


def test_conversations_are_streamed_with_their_masks(tmp_path: Path, tiny_tokenizer: Path) -> None:
    records = [{"q": f"how many {n}?", "a": f"{n} of them, and not {n + 1}"} for n in range(400)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"prompt_key": "q", "response_key": "a", "packing": "pad", "epochs": 1}
    live = [y.tolist() for _, y in load(path, tmp_path / "tok", tiny_tokenizer, **settings)]
    assert [y.tolist() for _, y in load(path, tmp_path / "tok", tiny_tokenizer, **settings)] == live
    assert any(token == -100 for batch in live for row in batch for token in row[:5])


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"cache": None}, "raw text needs a cache"),
    ({"split": "test"}, "split 'test'"),
    ({"overwrite": True}, "would tokenize again at every start"),
    ({"packing": "best"}, "packing"),
    ({"seq_len": 0}, "seq_len"),
    ({"window": "much"}, "window"),
    ({"vocab_size": 100}, "room for 100"),
    ({"temperature": 3}, "'temperature' is no setting"),
    ({"text_key": "body"}, "body"),
    ({"limit": 2, "seq_len": 4096}, "use a smaller seq_len"),
]


@pytest.mark.parametrize(("wrong", "said"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(corpus: Path, tiny_tokenizer: Path, tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    told = {"seq_len": 64, "cache": tmp_path / "tok", "tokenizer": str(tiny_tokenizer), **SMALL, **wrong}
    with pytest.raises(tm.TokenmillError, match=said):
        hashes(tm.stream(str(corpus / "plain.jsonl"), batch_size=4, **told), 3)


def test_a_bad_record_is_an_error_of_the_loader(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = make_texts(300, seed=6)
    (tmp_path / "bad.jsonl").write_bytes(jsonl(texts[:250]) + b"{no\n" + jsonl(texts[250:]))
    loader = load(tmp_path / "bad.jsonl", tmp_path / "tok", tiny_tokenizer, epochs=1, shuffle=False)
    for _ in range(2):
        with pytest.raises(tm.DataError, match="line 251"):
            hashes(loader)
    skipping = load(tmp_path / "bad.jsonl", tmp_path / "tok", tiny_tokenizer, epochs=1, on_error="skip")
    assert hashes(skipping)


def test_a_copy_of_a_run_that_failed_does_not_wait_for_it(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized_text, "LOST_SECONDS", 0.5)
    records = [{"text": text} for text in make_texts(250)] + [{"wrong": 1}]
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    loader = load(tmp_path / "bad.jsonl", tmp_path / "tok", tiny_tokenizer)
    with pytest.raises(tm.DataError, match="line 251"):
        list(loader)
    copied: WindowedRows = pickle.loads(pickle.dumps(loader.rows))
    with pytest.raises(tm.StoreError, match="no process has tokenized"):
        list(copied)


def test_a_cache_of_something_else_is_refused(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    tm.tokenize(f"{corpus}/**", tmp_path / "tok", tokenizer="bytes", **SMALL)
    with pytest.raises(tm.StoreError, match="was tokenized with bytes"):
        hashes(load(corpus, tmp_path / "tok", tiny_tokenizer), 1)
    shutil.rmtree(tmp_path / "tok")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "photo.jpg").write_bytes(b"x")
    with pytest.raises(tm.StoreError, match="not empty"):
        hashes(load(corpus, tmp_path / "tok", tiny_tokenizer), 10**6)


def test_a_state_of_other_text_is_refused(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    loader = load(corpus, tmp_path / "a", tiny_tokenizer)
    hashes(loader, 3)
    other = load(corpus / "plain.jsonl", tmp_path / "b", tiny_tokenizer)
    with pytest.raises(tm.UsageError, match="another dataset"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_damaged_archive_ends_the_loader_and_says_how_many_batches_it_gave(
    on_error: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    data = zstandard.ZstdCompressor(write_checksum=True).compress(
        jsonl(f"document {n} of many" for n in range(200_000))
    )
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    loader = tm.load(
        path,
        seq_len=64,
        batch_size=8,
        tokenizer=tiny_tokenizer,
        cache=tmp_path / "cache",
        task_bytes="1MB",
        on_error=on_error,
        epochs=1,
    )
    with pytest.raises(tm.DataError, match=r"a\.jsonl\.zst: .*checksum.*; up to [\d,]+ batches were made of this text"):
        list(loader)
    assert not (tmp_path / "cache" / "manifest.json").exists()
