"""Stores whose files are replaced, changed or cut while a loader has them open."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

import tokenmill as tm
from tests.support.stores import make_store
from tokenmill.errors import StoreError

OLD = [[1] * 50] * 40
NEW = [[2] * 50] * 40


def swap(folder: Path, documents: list[list[int]]) -> None:
    """Put another store with files of the same sizes at the path of a store."""
    make_store(folder.with_name("other"), documents, num_shards=8)
    folder.rename(folder.with_name("old"))
    folder.with_name("other").rename(folder)


def test_a_loader_of_a_replaced_store_never_mixes_the_two(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    batches = iter(tm.load(store, seq_len=10, batch_size=1, shuffle=False, epochs=1))
    assert set(next(batches).inputs.ravel().tolist()) == {1}
    swap(store, NEW)
    seen: set[int] = set()
    with pytest.raises(StoreError, match=r"shard-.* was replaced or changed while the store was open"):
        seen.update(id for batch in batches for id in batch.inputs.ravel().tolist())
    assert seen <= {1}


def test_a_loader_continues_when_its_files_are_replaced_by_equal_ones(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    loader = tm.load(store, seq_len=10, batch_size=1, epochs=1)
    batches = iter(loader)
    next(batches)
    swap(store, OLD)
    for path in store.glob("train/*"):
        os.utime(path)
    assert sum(1 for _ in batches) == len(loader) - 1


def test_a_mapped_file_that_is_overwritten_in_place_ends_the_loader(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    make_store(tmp_path / "other", NEW, num_shards=8)
    batches = iter(tm.load(store, seq_len=10, batch_size=1))
    for _ in range(1000):
        next(batches)
    for path in sorted(store.glob("train/*.bin")):
        shutil.copyfile(tmp_path / "other" / "train" / path.name, path)
    with pytest.raises(StoreError, match=r"shard-.* was replaced or changed while the store was open"):
        list(zip((time.sleep(0.005) for _ in range(1000)), batches, strict=False))


def test_a_mapped_file_with_other_times_and_the_same_bytes_disturbs_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    batches = iter(tm.load(store, seq_len=10, batch_size=1))
    for number in range(300):
        if number % 50 == 10:
            for path in store.glob("train/*"):
                os.utime(path)
                path.chmod(0o600)
        assert set(next(batches).inputs.ravel().tolist()) == {1}
        time.sleep(0.002)


def test_a_store_is_not_replaced_on_its_way_to_another_process(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    whole = pickle.dumps(tm.open(store).split())
    part = pickle.dumps(tm.open(store).split().slice(2, 9))
    assert pickle.loads(part).document(0).tolist() == [1] * 50
    swap(store, NEW)
    with pytest.raises(StoreError, match="was replaced by another store while it was in use; open it again"):
        pickle.loads(whole)
    with pytest.raises(StoreError, match="was replaced or changed while the store was open"):
        pickle.loads(part).document(0)


def test_a_shard_that_is_cut_before_it_is_mapped_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=8)
    batches = iter(tm.load(store, seq_len=10, batch_size=1, shuffle=False, epochs=1))
    next(batches)
    os.truncate(sorted(store.glob("train/*.bin"))[-1], 100)
    with pytest.raises(StoreError, match="has 100 bytes; the store says 500"):
        list(zip(range(1000), batches, strict=False))


def test_token_files_of_others_that_are_replaced_are_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tok", OLD, num_shards=1)
    shutil.copy(next(store.glob("train/*.bin")), tmp_path / "a.bin")
    opened = tm.open(tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(b"\2\0" * 2000)
    (tmp_path / "b.bin").replace(tmp_path / "a.bin")
    with pytest.raises(StoreError, match="a.bin was replaced or changed"):
        opened.read(0, 10)
