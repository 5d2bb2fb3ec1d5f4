"""`verify="background"`: a damaged file stops the loader, a sound one is read once per machine, loading goes on."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.remote import split_url
from tokenmill.store import background_check

DOCUMENTS = [[number % 250] * 50 for number in range(400)]
SECONDS = 30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a new thread, because the one of an earlier test uses another cache directory."""
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(background_check, "_checker", background_check._Checker())


def flip(path: Path, *, keep_time: bool = False) -> None:
    """Flip a bit near the end of a file, as a disk does."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def supervised(folder: Path) -> Path:
    """A store with a mask and weights."""
    rows = [{"prompt": f"ask {number}", "response": "say", "w": 0.5} for number in range(200)]
    folder.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {"prompt_key": "prompt", "response_key": "response", "weight_key": "w"}
    tm.tokenize(folder.with_suffix(".jsonl"), folder, tokenizer="bytes", workers=1, **flags)
    return folder


def step_for(loader: Any, seconds: float = SECONDS) -> None:
    """Take batches of an endless loader for some time."""
    deadline = time.monotonic() + seconds
    for _ in loader:
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)


def remembered(folder: Path) -> list[str]:
    return [line for path in folder.glob("cache/checked/*") for line in path.read_text().splitlines()]


def wait_until_remembered(folder: Path, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(remembered(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".mask", ".weight"])
def test_a_damaged_file_stops_the_loader_with_its_name(suffix: str, tmp_path: Path) -> None:
    store = supervised(tmp_path / "tok")
    (path,) = store.glob(f"train/*{suffix}")
    flip(path)
    with pytest.raises(StoreError, match=rf"{path} is damaged: its checksum is \w+, not \w+"):
        step_for(tm.load(store, seq_len=16, batch_size=2, document_mask=True, verify="background"))


def test_without_verify_the_same_damage_goes_unnoticed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS)
    flip(next(store.glob("train/*.bin")))
    step_for(tm.load(store, seq_len=16, batch_size=2), 0.2)


def test_sound_files_are_read_once_per_machine(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS, num_shards=3)
    for batch in tm.load(store, seq_len=16, batch_size=2, document_mask=True, epochs=1, verify="background"):
        assert batch.inputs.shape == (2, 16)
    wait_until_remembered(tmp_path, 6)
    flip(next(store.glob("train/*.bin")), keep_time=True)
    # Another process of the machine.
    background_check._forget_thread()
    step_for(tm.load(store, seq_len=16, batch_size=2, document_mask=True, verify="background"), 0.3)
    assert len(remembered(tmp_path)) == 6
    flip(next(store.glob("train/*.idx")))
    with pytest.raises(StoreError, match=r"\.idx is damaged"):
        step_for(tm.load(store, seq_len=16, batch_size=2, document_mask=True, verify="background"))


def test_files_that_were_mapped_before_are_checked(tmp_path: Path) -> None:
    make_store(tmp_path / "tok", DOCUMENTS)
    flip(next(tmp_path.glob("tok/train/*.bin")))
    store = tm.open(tmp_path / "tok")
    step_for(tm.load(store, seq_len=16, batch_size=2), 0.05)
    with pytest.raises(StoreError, match="is damaged"):
        step_for(tm.load(store, seq_len=16, batch_size=2, verify="background"))


@pytest.mark.parametrize(
    ("framework", "settings"), [("torch", {"num_workers": 2}), ("grain", {}), ("numpy", {"prefetch": 2})]
)
def test_every_way_to_load_notices(framework: str, settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip({"numpy": "numpy"}.get(framework, framework))
    store = make_store(tmp_path / "tok", DOCUMENTS)
    flip(next(store.glob("train/*.bin")))
    with pytest.raises(StoreError, match="is damaged"):
        step_for(tm.load(store, seq_len=16, batch_size=2, framework=framework, verify="background", **settings))


def test_a_cache_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "file" / "cache"))
    store = make_store(tmp_path / "tok", DOCUMENTS)
    step_for(tm.load(store, seq_len=16, batch_size=2, verify="background"), 0.2)
    flip(next(store.glob("train/*.bin")))
    with pytest.raises(StoreError, match="is damaged"):
        step_for(tm.load(store, seq_len=16, batch_size=2, verify="background"))


def test_an_iteration_that_ends_has_been_checked(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS, num_shards=9)
    loader = tm.load(store, seq_len=16, batch_size=2, epochs=1, verify="background")
    assert len(list(loader)) == len(loader)
    assert len(remembered(tmp_path)) == 9
    flip(next(store.glob("train/*.bin")))
    with pytest.raises(StoreError, match="is damaged"):
        list(tm.load(store, seq_len=16, batch_size=2, epochs=1, verify="background"))


def test_a_forked_process_checks_what_its_parent_had_opened(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS)
    flip(next(store.glob("train/*.bin")))
    folder = tmp_path / "cache" / background_check.CHECKED
    folder.mkdir(parents=True)
    with (folder / f"{platform.node()}.lock").open("wb") as lock:
        # The parent's own check has to wait, so that it can tell the child nothing.
        fcntl.flock(lock, fcntl.LOCK_EX)
        loader = tm.load(store, seq_len=16, batch_size=2, verify="background")
        next(iter(loader))

        def ends_with_an_error() -> None:
            try:
                step_for(loader)
            except StoreError:
                os._exit(77)

        child = multiprocessing.get_context("fork").Process(target=ends_with_an_error)
        child.start()
        fcntl.flock(lock, fcntl.LOCK_UN)
        child.join(SECONDS)
    assert child.exitcode == 77


def test_a_file_that_cannot_be_checked_is_not_sound_and_ends_no_thread() -> None:
    class Unreadable(NamedTuple):
        name: str

        def key(self) -> str | None:
            return None

        def find_damage(self, _look: Callable[[memoryview], None]) -> str | None:
            raise ValueError("no reader for it")

    for _ in range(2):
        check = background_check.BackgroundCheck()
        check.touch(Unreadable("the-file"))
        check.wait()
        assert check.damage == "the-file could not be compared with its checksum: ValueError no reader for it"


def upload(store: Path, url: str) -> None:
    bucket, prefix = split_url(url)
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        bucket.upload(f"{prefix}/{path.relative_to(store).as_posix()}", path)


@pytest.mark.parametrize("settings", [{"fetch": "range"}, {"cache_bytes": 30_000}, {"fetch": "range", "prefetch": 2}])
def test_a_damaged_object_of_which_ranges_are_read_is_noticed(
    settings: dict[str, Any], tmp_path: Path, s3: str
) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS, num_shards=3)
    upload(store, f"{s3}/sound")
    load = {"seq_len": 16, "batch_size": 2, "verify": "background", **settings}
    list(tm.load(f"{s3}/sound", epochs=1, **load))
    objects = [line for line in remembered(tmp_path) if line.endswith(".bin") and f"{s3}/sound/train/" in line]
    assert len(objects) == 3
    flip(sorted(store.glob("train/*.bin"))[1])
    upload(store, f"{s3}/tok")
    with pytest.raises(StoreError, match=rf"{s3}/tok/train/.*\.bin is damaged: its checksum is \w+, not \w+; upload"):
        step_for(tm.load(f"{s3}/tok", **load))


def test_a_damaged_copy_in_the_cache_of_a_bucket_is_noticed(tmp_path: Path, s3: str) -> None:
    store = make_store(tmp_path / "tok", DOCUMENTS)
    upload(store, f"{s3}/tok")
    step_for(tm.load(f"{s3}/tok", seq_len=16, batch_size=2), 0.3)
    deadline = time.monotonic() + SECONDS
    while not (copies := list(tmp_path.glob("cache/*/tok/train/*.bin"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    flip(copies[0], keep_time=True)
    with pytest.raises(StoreError, match=r"cache/.*\.bin is damaged: .*; remove this copy, and it is downloaded again"):
        step_for(tm.load(f"{s3}/tok", seq_len=16, batch_size=2, verify="background"))
    copies[0].unlink()
    step_for(tm.load(f"{s3}/tok", seq_len=16, batch_size=2, verify="background"), 0.3)


def test_checking_takes_a_bounded_share_of_a_core_and_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of 4 MiB that took 20 ms of a core, 100 ms of a disk, or no time at all."""
    clock, slept = {"monotonic": 0.0, "thread_time": 0.0}, []
    for name in clock:
        monkeypatch.setattr(background_check.time, name, lambda name=name: clock[name])
    monkeypatch.setattr(background_check.time, "sleep", slept.append)
    check, piece = background_check.BackgroundCheck(), memoryview(bytes(background_check.REST_BYTES))
    for seconds, cpu_seconds in ((0.02, 0.02), (0.1, 0.0001), (0, 0)):
        pace = background_check._Pace(check)
        clock["monotonic"] += seconds
        clock["thread_time"] += cpu_seconds
        pace.rest(piece)
    assert slept == pytest.approx([0.02 / 0.003 - 0.02, 0.3, len(piece) / 100e6])
    check.is_awaited = True
    pace.rest(piece)
    assert len(slept) == 3


def test_data_without_checksums_is_refused(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(UsageError, match="verify='background' needs checksums, and .* has none"):
        tm.load(tmp_path / "a.bin", seq_len=16, batch_size=2, verify="background")
    store = make_store(tmp_path / "tok", DOCUMENTS)
    with pytest.raises(UsageError, match="verify 'always'"):
        tm.load(store, seq_len=16, batch_size=2, verify="always")
    with pytest.raises(UsageError, match="verify='background' is for stores, and this is raw text"):
        tm.load("a.jsonl", seq_len=16, batch_size=2, tokenizer="bytes", verify="background")
