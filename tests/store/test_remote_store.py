"""Stores in a bucket: loaded through a bounded cache, in whole shards or by range, also from a server with faults."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.object_server import FaultyProxy, shorten_retries
from tests.support.program import Program
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.remote import split_url
from tokenmill.remote.bucket import Bucket
from tokenmill.remote.cache import Cache
from tokenmill.store.remote_store import RemoteStore
from tokenmill.tools.bench.contenders import Effort
from tokenmill.tools.bench.loader_race import LoaderChoice, bench_loaders


def upload(folder: Path, url: str) -> str:
    """Put a store into a bucket, file by file."""
    bucket, prefix = split_url(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        bucket.upload(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
    return url


_uploaded: dict[tuple[int, int], tuple[Path, str]] = {}


def make_remote(tmp_path: Path, s3: str, count: int = 400, num_shards: int = 7) -> tuple[Path, str]:
    """A store and its copy in a bucket, made by the first test that asks for it; tests only read both."""
    key = (count, num_shards)
    if key not in _uploaded:
        _uploaded[key] = make_own_remote(tmp_path, s3, count, num_shards)
    return _uploaded[key]


def make_own_remote(tmp_path: Path, s3: str, count: int = 400, num_shards: int = 7) -> tuple[Path, str]:
    """A store and its copy in a bucket that a test may damage."""
    folder = make_store(tmp_path / "local", make_documents(count, seed=3), num_shards=num_shards)
    return folder, upload(folder, f"{s3}/stores/tok")


def wait_until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "time is up"
        time.sleep(0.02)


def size_of(folder: Path) -> int:
    """The bytes in a cache at one moment: while its lock is held, no file is added or removed."""
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return sum(size for _, size, _ in Cache(folder, 1)._files())


def same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("fetch", ["shard", "range"])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_batches_equal_those_of_the_local_store(tmp_path: Path, s3: str, fetch: str, packing: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 8, "packing": packing, "document_mask": True}
    local, remote = tm.load(folder, **settings), tm.load(url, fetch=fetch, **settings)
    same(collect(remote, 60), collect(local, 60))
    assert remote.state_dict() == local.state_dict()


def test_documents_and_the_tokenizer_are_read(tiny_store: Path, s3: str) -> None:
    url = upload(tiny_store, f"{s3}/tiny")
    local, remote = tm.open(tiny_store), tm.open(url)
    assert remote.split("val").num_tokens == local.split("val").num_tokens
    assert remote.decode(remote.document(7)) == local.decode(local.document(7))
    np.testing.assert_array_equal(remote.read(5, 900), local.read(5, 900))
    assert isinstance(remote, RemoteStore)
    assert remote.path.name == "tiny"


def test_whole_shards_are_downloaded_in_the_background_and_then_mapped(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    loader = tm.load(url, seq_len=16, batch_size=8)
    collect(loader, 2)
    store = tm.open(url)
    wait_until(lambda: len(list(store.path.glob("train/*.bin"))) == 7)  # type: ignore[attr-defined]
    collect(loader, 60)
    again = tm.load(url, seq_len=16, batch_size=8)
    same(collect(again, 30), collect(tm.load(folder, seq_len=16, batch_size=8), 30))
    assert (again.rows.leaves()[0].documents.table._token_addresses > 0).all()


def test_a_store_that_does_not_fit_the_cache_is_read_by_range(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    size = sum(path.stat().st_size for path in folder.rglob("*.bin"))
    remote = tm.load(url, seq_len=16, batch_size=8, cache_bytes=size // 2)
    same(collect(remote, 40), collect(tm.load(folder, seq_len=16, batch_size=8), 40))
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_block_shuffle_keeps_the_cache_within_its_bounds(
    tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = make_remote(tmp_path, s3, count=3000, num_shards=24)
    size = sum(path.stat().st_size for path in folder.rglob("*.bin"))
    most = size // 3 + 2000
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 8, "shuffle": "blocks", "epochs": 2, "prefetch": 0}
    settings["block_tokens"] = most // 4 // 2
    remote = tm.load(url, cache_bytes=most, **settings)
    said = capsys.readouterr().err
    assert "each row among" in said
    assert "do not fit" not in said
    seen = []
    largest = 0
    for batch in remote:
        seen.append((batch.inputs.copy(), batch.targets.copy()))
        largest = max(largest, size_of(tmp_path / "cache"))
    assert 0 < largest <= most
    local = tm.load(folder, **settings)
    same(seen, [(batch.inputs, batch.targets) for batch in local])


def test_shards_of_blocks_are_downloaded_whole_and_not_row_by_row(
    tmp_path: Path, s3: str, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.store.remote_store.EARLY_ROWS", 8)
    _, url = make_remote(tmp_path, s3, count=3000, num_shards=24)
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 8, "shuffle": "blocks", "epochs": 3}
    loader = tm.load(url, block_tokens=2000, cache_bytes=1, **settings)
    room = loader.rows.room_bytes  # type: ignore[attr-defined]
    loader = tm.load(url, block_tokens=2000, cache_bytes=room, cache_dir=tmp_path / "tight", **settings)
    faulty.counts.clear()
    num_rows = sum(len(batch.inputs) for batch in loader)
    assert faulty.counts["GET"] < num_rows // 10


def test_the_order_of_blocks_does_not_depend_on_the_cache(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.load_any.DEFAULT_BLOCK_TOKENS", 5000)
    folder, url = make_remote(tmp_path, s3, count=3000, num_shards=24)
    size = sum(path.stat().st_size for path in folder.rglob("*.bin"))
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 8, "shuffle": "blocks", "epochs": 1}
    whole = tm.load(folder, seq_len=16, batch_size=16, shuffle="blocks", epochs=1)
    ranks = [
        tm.load(url, rank=rank, world_size=2, cache_bytes=room, cache_dir=tmp_path / f"machine-{rank}", **settings)
        for rank, room in enumerate((size // 2, 10 * size))
    ]
    assert ranks[0].rows.fingerprint == ranks[1].rows.fingerprint == whole.rows.fingerprint
    for batch, *shares in zip(whole, *ranks, strict=True):
        np.testing.assert_array_equal(batch.inputs, np.concatenate([share.inputs for share in shares]))
    again = tm.load(url, cache_bytes=size // 3, **settings)
    again.load_state_dict(ranks[1].state_dict())


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
def test_whole_shards_that_do_not_fit_are_prefetched_by_range(
    tmp_path: Path, s3: str, faulty: FaultyProxy, capsys: pytest.CaptureFixture[str], shuffle: bool | str
) -> None:
    folder, url = make_remote(tmp_path, s3, count=3000, num_shards=6)
    largest = max(path.stat().st_size for path in folder.rglob("*.bin"))
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 8, "shuffle": shuffle, "epochs": 1}
    for share, room in enumerate((largest // 2, 2 * largest)):
        faulty.counts.clear()
        remote = tm.load(url, fetch="shard", cache_bytes=room, cache_dir=tmp_path / f"c{share}", **settings)
        seen = [(batch.inputs.copy(), batch.targets.copy()) for batch in remote]
        said = capsys.readouterr().err
        warning = f"do not fit the cache of {room:,} bytes, so rows are read by range"
        assert said.count(warning) == (1 if shuffle else 0)
        assert faulty.counts["GET"] < len(seen), "rows are not asked for one by one"
        same(seen, [(batch.inputs, batch.targets) for batch in tm.load(folder, **settings)])
        capsys.readouterr()


def test_a_truncated_file_of_the_cache_is_downloaded_again(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    store = tm.open(url)
    assert isinstance(store, RemoteStore)
    store.make_local()
    for path in [*store.path.rglob("*.bin"), *store.path.rglob("*.idx")]:
        os.truncate(path, path.stat().st_size // 2)
    remote = tm.load(url, seq_len=16, batch_size=8, document_mask=True)
    same(collect(remote, 60), collect(tm.load(folder, seq_len=16, batch_size=8, document_mask=True), 60))
    wait_until(
        lambda: all(p.stat().st_size == (folder / p.relative_to(store.path)).stat().st_size for p in bins(store))
    )


def bins(store: RemoteStore) -> list[Path]:
    return sorted(store.path.rglob("*.bin"))


def test_a_store_in_the_cache_is_read_without_a_server(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shorten_retries(monkeypatch)
    folder, url = make_remote(tmp_path, s3)
    store = tm.open(url)
    assert isinstance(store, RemoteStore)
    store.make_local()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    remote = tm.load(url, seq_len=16, batch_size=8, document_mask=True)
    same(collect(remote, 60), collect(tm.load(folder, seq_len=16, batch_size=8, document_mask=True), 60))
    assert capsys.readouterr().err == (
        f"tokenmill: http://127.0.0.1:9 cannot be reached; {url} is read from the cache\n"
    )
    bins(store)[0].unlink()
    with pytest.raises(TokenmillError, match=r"\.bin: http://127.0.0.1:9 cannot be reached"):
        tm.open(url).read(0, 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:10")
    with pytest.raises(TokenmillError, match=r"manifest.json: http://127.0.0.1:10 cannot be reached"):
        tm.open(f"{s3}/another")


@pytest.mark.parametrize("fault", ["503", "reset"])
@pytest.mark.parametrize("fetch", ["shard", "range"])
def test_loading_waits_for_the_end_of_an_outage(
    tmp_path: Path, s3: str, faulty: FaultyProxy, fetch: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch)
    folder, url = make_remote(tmp_path, s3)
    loader = tm.load(url, seq_len=16, batch_size=8, fetch=fetch)
    faulty.fail_for(1, fault)
    same(collect(loader, 60), collect(tm.load(folder, seq_len=16, batch_size=8), 60))
    assert faulty.counts[fault] > 5


@pytest.mark.parametrize("fetch", ["shard", "range"])
def test_a_loader_continues_after_an_outage_that_was_an_error(
    tmp_path: Path, s3: str, faulty: FaultyProxy, fetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch, seconds=0.1)
    folder, url = make_remote(tmp_path, s3)
    loader = tm.load(url, seq_len=16, batch_size=8, fetch=fetch, prefetch=0)
    faulty.fail_for(600, "503")
    with pytest.raises(TokenmillError, match=r"the server answers 503 \(busy\); tried for"):
        collect(loader, 1)
    faulty.fail_for(0, "none")
    same(collect(loader, 60), collect(tm.load(folder, seq_len=16, batch_size=8), 60))


def test_a_run_into_a_bucket_waits_for_the_end_of_an_outage(tmp_path: Path, s3: str, faulty: FaultyProxy) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", make_texts(200, seed=5))
    choose, uploads = faulty._choose, []

    def begin_at_first_upload(line: str) -> str:
        if line.startswith("PUT") and ".bin" in line and not uploads:
            uploads.append(line)
            faulty.fail_for(4, "503")
        # Workers have the real number of obstore's retries, so the outage is longer; its second half are resets.
        if faulty.counts["503"] > 12:
            faulty.replace_fault("reset")
        return choose(line)

    faulty._choose = begin_at_first_upload  # type: ignore[method-assign]
    settings: dict[str, Any] = {"tokenizer": "bytes", "task_bytes": 4000, "workers": 2}
    remote = tm.tokenize(str(lines), f"{s3}/tok", **settings)
    local = tm.tokenize(str(lines), tmp_path / "tok", **settings)
    assert min(faulty.counts["503"], faulty.counts["reset"]) > 5
    assert remote.manifest.splits == local.manifest.splits


def test_bench_measures_loaders_of_a_store_in_a_bucket(tiny_store: Path, s3: str) -> None:
    url = upload(tiny_store, f"{s3}/tiny")
    wanted = LoaderChoice([2], 32, 5, skip=["torch", "jax", "tf", "grain"])
    report = bench_loaders(url, wanted, Effort(repeat=1))
    assert [row.name for row in report.rows] == ["np.memmap loop", "tokenmill numpy"]


def test_forked_workers_read_the_store(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    for fetch in ("shard", "range"):
        remote = tm.load(url, seq_len=16, batch_size=8, framework="torch", num_workers=2, fetch=fetch, epochs=1)
        local = tm.load(folder, seq_len=16, batch_size=8, framework="torch", epochs=1)
        same([(x.numpy(), y.numpy()) for x, y in remote], [(x.numpy(), y.numpy()) for x, y in local])


def test_a_copy_in_another_process_reads_the_same_rows(tmp_path: Path, s3: str) -> None:
    _, url = make_remote(tmp_path, s3)
    rows = tm.shuffle(tm.pack(tm.open(url), seq_len=16))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)[5].tolist())"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(rows), capture_output=True, timeout=60)
    assert done.stdout.decode().strip() == str(rows[5].tolist()), done.stderr.decode()


def test_processes_share_the_cache_and_download_a_file_once(tmp_path: Path, s3: str, faulty: FaultyProxy) -> None:
    folder, url = make_remote(tmp_path, s3)
    expected = sum(batch.inputs.sum() for batch in collect(tm.load(folder, seq_len=16, batch_size=8), 20))
    program = (
        "import itertools, sys, tokenmill as tm\n"
        "loader = tm.load(sys.argv[1], seq_len=16, batch_size=8, rank=0, world_size=1)\n"
        "total = sum(int(batch.inputs.sum()) for batch in itertools.islice(loader, 20))\n"
        "tm.open(sys.argv[1]).split().table._fetch_indexes(range(7))\n"
        "print(total)"
    )
    paths: list[str] = []
    choose = faulty._choose
    faulty._choose = lambda line: (paths.append(line), choose(line))[1]  # type: ignore[method-assign]
    command = [sys.executable, "-c", program, url]
    processes = [Program(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=100)[0] for process in processes] == [f"{expected}\n"] * 4
    fetched = [line for line in paths if ".idx" in line and line.startswith("GET")]
    assert len(fetched) == len(set(fetched)) == 7


def test_faults_change_no_byte(tmp_path: Path, s3: str, faulty: FaultyProxy) -> None:
    folder, url = make_remote(tmp_path, s3)
    expected = collect(tm.load(folder, seq_len=16, batch_size=8, document_mask=True), 40)
    for seed, fetch in enumerate(("range", "shard")):
        faulty.rate = 0.3
        loader = tm.load(
            url, seq_len=16, batch_size=8, document_mask=True, fetch=fetch, cache_dir=tmp_path / f"cache-{seed}"
        )
        same(collect(loader, 40), expected)
        if fetch == "shard":
            store = tm.open(url, cache_dir=tmp_path / f"cache-{seed}")
            wait_until(lambda store=store: len(list(store.path.glob("train/*.bin"))) == 7, 60)
            for path in store.path.rglob("*.*"):
                assert path.read_bytes() == (folder / path.relative_to(store.path)).read_bytes()
    assert sum(faulty.counts[fault] for fault in faulty.faults) > 20


def test_requests_that_hang_are_retried(
    tmp_path: Path, s3: str, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = make_remote(tmp_path, s3)
    monkeypatch.setenv("AWS_TIMEOUT", "0.5s")
    faulty.rate, faulty.faults = 0.6, ("hang",)
    loader = tm.load(url, seq_len=16, batch_size=8, fetch="range")
    same(collect(loader, 5), collect(tm.load(folder, seq_len=16, batch_size=8), 5))
    assert faulty.counts["hang"] > 0


def test_damage_in_the_bucket_is_found_after_the_download(tmp_path: Path, s3: str) -> None:
    folder, url = make_own_remote(tmp_path, s3)
    bucket, prefix = split_url(url)
    path = next(iter(sorted(folder.glob("train/*.bin"))))
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    bucket.put(f"{prefix}/train/{path.name}", bytes(data))
    loader = tm.load(url, seq_len=16, batch_size=8)

    def train() -> None:
        for _ in range(200):
            collect(loader, 20)
            time.sleep(0.02)

    with pytest.raises(StoreError, match="is damaged: its checksum"):
        train()


def test_a_shard_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, s3: str) -> None:
    folder, url = make_own_remote(tmp_path, s3)
    bucket, prefix = split_url(url)
    store = tm.open(url, fetch="range")
    store.read(0, 10)
    path = next(iter(sorted(folder.glob("train/*.bin"))))
    bucket.put(f"{prefix}/train/{path.name}", bytes(len(path.read_bytes())))
    with pytest.raises(TokenmillError, match="was replaced while it was being read"):
        store.read(10, 20)
    bucket.put(f"{prefix}/train/{path.name}", b"short")
    with pytest.raises(TokenmillError, match="it was replaced or cut off"):
        tm.open(url, fetch="range").read(10, 20)


def test_a_killed_download_is_taken_over(tmp_path: Path, s3: str, faulty: FaultyProxy) -> None:
    folder, url = make_remote(tmp_path, s3)
    faulty.delay = 0.3
    program = (
        "import sys, time, tokenmill as tm\n"
        "loader = tm.load(sys.argv[1], seq_len=16, batch_size=8, cache_dir=sys.argv[2])\n"
        "next(iter(loader)); print('ready', flush=True); time.sleep(60)"
    )
    cache = tmp_path / "killed"
    process = Program([sys.executable, "-c", program, url, str(cache)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    wait_until(lambda: list(cache.rglob("*.tmp")))
    process.kill()
    process.wait()
    faulty.delay = 0
    left = list(cache.rglob("*.tmp"))
    assert left
    loader = tm.load(url, seq_len=16, batch_size=8, cache_dir=cache)
    same(collect(loader, 40), collect(tm.load(folder, seq_len=16, batch_size=8), 40))
    store = tm.open(url, cache_dir=cache)
    wait_until(lambda: len(list(store.path.glob("train/*.bin"))) == 7)  # type: ignore[attr-defined]
    wait_until(lambda: not list(cache.rglob("*.tmp")))


def test_wrong_arguments_are_one_sentence(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = make_remote(tmp_path, s3)
    for wrong, message in (
        (f"{s3}/nothing", "is not a finished store: it has no manifest.json"),
        ("s3://no-such-bucket-at-all/tok", "does not exist at"),
        ("s3://", "is not the URL of an object"),
        (f"{s3}/../x", "is not the URL of an object"),
    ):
        with pytest.raises(TokenmillError, match=message):
            tm.open(wrong)
    with pytest.raises(UsageError, match="has no effect: .* is on this machine"):
        tm.open(folder, fetch="range")
    with pytest.raises(UsageError, match="fetch 'all' is unknown"):
        tm.open(url, fetch="all")
    with pytest.raises(UsageError, match="cache_bytes 'much' is not a size"):
        tm.open(url, cache_bytes="much")
    with pytest.raises(UsageError, match="must be True, False or 'blocks'"):
        tm.load(url, 16, 8, shuffle="some")
    with pytest.raises(UsageError, match="a row belongs to none"):
        tm.load(url, 16, 8, shuffle="blocks", packing="best-fit")
    with pytest.raises(UsageError, match="has no effect: the store is open"):
        tm.load(tm.open(url), 16, 8, fetch="range")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TokenmillError, match=r"http://127.0.0.1:9 cannot be reached"):
        tm.open(url, cache_dir=tmp_path / "empty")


def test_a_cache_without_room_for_an_index_says_so(tmp_path: Path, s3: str) -> None:
    _, url = make_remote(tmp_path, s3)
    with pytest.raises(StoreError, match="has no room for .* more beside the files in use; pass a larger cache_bytes"):
        collect(tm.load(url, seq_len=16, batch_size=8, document_mask=True, cache_bytes=500), 1)


def test_mapped_files_are_not_evicted(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    other = upload(make_store(tmp_path / "other", make_documents(400, seed=4), num_shards=7), f"{s3}/other")
    size = sum(path.stat().st_size for path in folder.rglob("*.bin"))
    cache_bytes = size + 20 * 400 + 2000
    first = tm.load(url, seq_len=16, batch_size=8, cache_bytes=cache_bytes)
    store = tm.open(url, cache_bytes=cache_bytes)

    def all_mapped() -> bool:
        collect(first, 5)
        return bool((first.rows.leaves()[0].documents.table._token_addresses > 0).all())

    wait_until(all_mapped)
    second = tm.load(other, seq_len=16, batch_size=8, cache_bytes=cache_bytes)
    collect(second, 40)
    time.sleep(0.3)
    assert len(list(store.path.glob("train/*.bin"))) == 7  # type: ignore[attr-defined]
    assert size_of(tmp_path / "cache") <= cache_bytes


def test_a_program_ends_without_waiting_for_downloads(tmp_path: Path, s3: str, faulty: FaultyProxy) -> None:
    _, url = make_remote(tmp_path, s3)
    faulty.delay = 0.2
    program = "import sys, tokenmill as tm; next(iter(tm.load(sys.argv[1], seq_len=16, batch_size=8)))"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 20


def test_a_long_range_is_read_in_pieces(
    tmp_path: Path, s3: str, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = make_remote(tmp_path, s3)
    monkeypatch.setattr("tokenmill.store.remote_store.PIECE_BYTES", 100)
    monkeypatch.setattr("tokenmill.remote.ranges.MAX_JOINED_BYTES", 100)
    remote = tm.open(url, fetch="range")
    faulty.counts.clear()
    np.testing.assert_array_equal(remote.read(3, 3000), tm.open(folder).read(3, 3000))
    assert faulty.counts["GET"] > 40


def test_threads_may_share_a_store(tmp_path: Path, s3: str) -> None:
    folder, url = make_remote(tmp_path, s3)
    remote, local = tm.open(url, fetch="range"), tm.open(folder)
    wrong: list[int] = []

    def read(first: int) -> None:
        wrong.extend(n for n in range(first, 400, 4) if not np.array_equal(remote.document(n), local.document(n)))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.environ["AWS_ENDPOINT_URL"]


@pytest.mark.parametrize("num_short", [2, 3])
def test_a_manifest_that_the_bucket_gave_short_is_asked_for_again(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, num_short: int
) -> None:
    folder, url = make_remote(tmp_path, s3)
    asked = []
    read = Bucket.read

    def give_short(self: Bucket, key: str) -> bytes:
        asked.append(key)
        data = read(self, key)
        return data[: len(data) // 2] if len(asked) <= num_short else data

    monkeypatch.setattr(Bucket, "read", give_short)
    if num_short < 3:
        assert tm.open(url).num_tokens == tm.open(folder).num_tokens
    else:
        with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
            tm.open(url)
    assert len(asked) == 3
