"""Stores that are written to a bucket: the same bytes as on a disk, after any kill, from any number of runs at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.object_server import FaultyProxy
from tests.running import command, sentence, snapshot, tokenmill
from tokenmill.errors import StoreError, UsageError
from tokenmill.remote import split_url

TASK_BYTES = 20_000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    texts = make_texts(600, seed=9)
    write_jsonl(folder / "a.jsonl", texts[:400])
    path = write_jsonl(folder / "b.jsonl", texts[400:])
    path.write_text(path.read_text() + '{"no": "text"}\n')
    (folder / "c.txt").write_text("plain words\n" * 3000)
    return folder


def flags(tokenizer: Path, **more: Any) -> dict[str, Any]:
    return {
        "tokenizer": str(tokenizer),
        "task_bytes": TASK_BYTES,
        "workers": 2,
        "val_fraction": 0.1,
        "on_error": "skip",
        **more,
    }


def objects(url: str) -> dict[str, bytes]:
    bucket, prefix = split_url(url)
    infos = bucket.list(prefix)
    return {info.key[len(prefix) + 1 :]: bucket.read(info.key) for info in infos if not info.key.endswith("run.json")}


@pytest.fixture
def expected(tmp_path: Path, corpus: Path, tiny_tokenizer: Path) -> dict[str, bytes]:
    """The same store on a disk."""
    tm.tokenize(str(corpus), tmp_path / "local", **flags(tiny_tokenizer))
    return snapshot(tmp_path / "local")


def arguments(corpus: Path, url: str, tokenizer: Path) -> list[str]:
    return [
        *("tokenize", str(corpus), "-o", url, "--tokenizer", str(tokenizer), "--task-bytes", str(TASK_BYTES)),
        *("--workers", "2", "--val-fraction", "0.1", "--on-error", "skip"),
    ]


def test_a_store_in_a_bucket_has_the_bytes_of_one_on_a_disk(
    tmp_path: Path, corpus: Path, s3: str, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/stores/tok"
    (tmp_path / "scratch").mkdir()
    store = tm.tokenize(str(corpus), url, **flags(tiny_tokenizer, scratch=str(tmp_path / "scratch")))
    assert objects(url) == expected
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left in the scratch directory"
    assert store.num_documents == tm.open(tmp_path / "local").num_documents
    again = tokenmill(*arguments(corpus, url, tiny_tokenizer))
    assert again.returncode == 0, again.stderr
    assert f"{url} is already finished" in again.stdout
    other = tokenmill(*arguments(corpus, url, tiny_tokenizer), "--no-eos")
    assert sentence(other).startswith(f"{url} was made with --eos")
    assert objects(url) == expected


def test_a_killed_run_is_continued_from_the_bucket(
    tmp_path: Path,
    corpus: Path,
    s3: str,
    faulty: FaultyProxy,
    tiny_tokenizer: Path,
    expected: dict[str, bytes],
) -> None:
    url = f"{s3}/tok"
    faulty.delay = 0.05
    bucket, prefix = split_url(url)
    for number in range(2):
        process = subprocess.Popen(
            command(*arguments(corpus, url, tiny_tokenizer)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            entries = [info.key for info in bucket.list(f"{prefix}/.tasks") if info.key[-6].isdigit()]
            if len(entries) > 3 * number + 2:
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    entries = [info.key for info in bucket.list(f"{prefix}/.tasks") if info.key[-6].isdigit()]
    assert entries, "some tasks were done before the kill"
    assert not bucket.exists(f"{prefix}/manifest.json")
    bucket.put(f"{prefix}/train/shard-99999-0000.bin", b"an orphan")
    faulty.delay = 0
    done = tokenmill(*arguments(corpus, url, tiny_tokenizer))
    assert done.returncode == 0, done.stderr
    assert "tasks are already done" in done.stderr
    assert objects(url) == expected


def test_faults_change_no_byte(
    corpus: Path, s3: str, faulty: FaultyProxy, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    faulty.rate = 0.4
    tm.tokenize(str(corpus), f"{s3}/tok", **flags(tiny_tokenizer))
    faulty.rate = 0
    assert sum(faulty.counts[fault] for fault in faulty.faults) > 15
    assert objects(f"{s3}/tok") == expected


def test_two_runs_at_once_make_one_store(
    corpus: Path, s3: str, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/tok"
    runs = [
        subprocess.Popen(
            command(*arguments(corpus, url, tiny_tokenizer)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for run in runs:
        _, said = run.communicate(timeout=100)
        assert run.returncode == 0, said
    assert objects(url) == expected


def test_ranks_without_a_common_disk_make_one_store(
    corpus: Path, s3: str, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/tok"
    for rank in (1, 0, 2):
        done = tokenmill(*arguments(corpus, url, tiny_tokenizer), "--rank", str(rank), "--world-size", "3")
        assert done.returncode == 0, done.stderr
    assert objects(url) == expected


def test_orphans_are_listed_by_verify_and_removed_by_the_next_run(
    corpus: Path, s3: str, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/tok"
    tm.tokenize(str(corpus), url, **flags(tiny_tokenizer))
    done = tokenmill("verify", url, "--against", str(corpus))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "sound"), done.stderr
    bucket, prefix = split_url(url)
    bucket.put(f"{prefix}/train/shard-00000-0777.bin", b"an orphan")
    bucket.put(f"{prefix}/.tasks/00000-0777.json", b"{}")
    done = tokenmill("verify", url)
    assert "shard-00000-0777.bin" in done.stderr
    assert ".tasks/00000-0777.json" in done.stderr
    assert "2 problems" in sentence(done)
    tm.tokenize(str(corpus), url, **flags(tiny_tokenizer))
    assert objects(url) == expected


def test_damage_is_found_by_verify(corpus: Path, s3: str, tiny_tokenizer: Path) -> None:
    url = f"{s3}/tok"
    tm.tokenize(str(corpus), url, **flags(tiny_tokenizer))
    bucket, prefix = split_url(url)
    key = next(info.key for info in bucket.list(f"{prefix}/train") if info.key.endswith(".bin"))
    data = bytearray(bucket.read(key))
    data[1] ^= 1
    bucket.put(key, bytes(data))
    done = tokenmill("verify", url)
    assert f"{bucket.url(key)} is damaged: its checksum" in done.stderr


def test_overwrite_and_what_is_not_ours(corpus: Path, s3: str, tiny_tokenizer: Path) -> None:
    bucket, _ = split_url(s3)
    bucket.put("mine/notes.txt", b"not a store")
    with pytest.raises(StoreError, match=r"is not empty and not a token store: it has notes.txt"):
        tm.tokenize(str(corpus), f"{s3}/mine", **flags(tiny_tokenizer))
    with pytest.raises(StoreError, match=r"is not a token store: it has notes.txt"):
        tm.tokenize(str(corpus), f"{s3}/mine", **flags(tiny_tokenizer, overwrite=True))
    assert bucket.read("mine/notes.txt") == b"not a store"
    tm.tokenize(str(corpus), f"{s3}/tok", **flags(tiny_tokenizer))
    with pytest.raises(StoreError, match=rf"{s3}/tok was made with --eos"):
        tm.tokenize(str(corpus), f"{s3}/tok", **flags(tiny_tokenizer, eos=False))
    store = tm.tokenize(str(corpus), f"{s3}/tok", **flags(tiny_tokenizer, eos=False, overwrite=True))
    assert store.manifest.special_tokens.eos_id is None


def test_mistakes_are_sentences(tmp_path: Path, corpus: Path, s3: str, tiny_tokenizer: Path) -> None:
    with pytest.raises(UsageError, match="is a whole bucket; name a folder in it"):
        tm.tokenize(str(corpus), s3, **flags(tiny_tokenizer))
    with pytest.raises(UsageError, match="--scratch x is for a store in a bucket"):
        tm.tokenize(str(corpus), tmp_path / "out", **flags(tiny_tokenizer, scratch="x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--scratch .* cannot be used"):
        tm.tokenize(str(corpus), f"{s3}/tok", **flags(tiny_tokenizer, scratch=str(tmp_path / "file")))
    done = tokenmill("status", f"{s3}/tok")
    assert "is in a bucket" in sentence(done)


def test_commands_look_at_a_store_in_a_bucket(
    tmp_path: Path, corpus: Path, s3: str, tiny_tokenizer: Path, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/tok"
    tm.tokenize(str(corpus), url, **flags(tiny_tokenizer))
    for arguments_ in (
        ("inspect", "--json"),
        ("inspect", "--document", "3", "--json"),
        ("trace", "--step", "1", "--seq-len", "16", "--json"),
    ):
        remote = tokenmill(arguments_[0], url, *arguments_[1:])
        local = tokenmill(arguments_[0], tmp_path / "local", *arguments_[1:])
        assert remote.returncode == 0, remote.stderr
        said = local.stdout.replace(str(tmp_path / "local"), url).replace('"local/train"', '"tok/train"')
        assert json.loads(remote.stdout) == json.loads(said)
    done = tokenmill("export", url, str(tmp_path / "export"), "--to", "nanogpt")
    assert done.returncode == 0, done.stderr
    done = tokenmill("report", url, "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "page.json"))
    assert done.returncode == 0, done.stderr
    done = tokenmill(
        "report", str(tmp_path / "local"), "-o", str(tmp_path / "l.html"), "--json", str(tmp_path / "l.json")
    )
    ours, theirs = (json.loads((tmp_path / name).read_text()) for name in ("page.json", "l.json"))
    assert ours["num_tokens"] == theirs["num_tokens"]
    assert ours["checks"]["problems"] == []
