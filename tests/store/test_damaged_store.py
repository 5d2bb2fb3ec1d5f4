"""Stores whose files do not fit their manifest, and reads of tokens that are not there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.store.manifest import Manifest, encode_sealed


def rewrite(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    (folder / "manifest.json").write_bytes(encode_sealed(msgspec.structs.replace(manifest, **changes)))


def change_shard(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    split = manifest.splits["train"]
    shard = msgspec.structs.replace(split.shards[0], **changes)
    rewrite(folder, splits={"train": msgspec.structs.replace(split, shards=[shard, *split.shards[1:]])})


def change_split(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    rewrite(folder, splits={"train": msgspec.structs.replace(manifest.splits["train"], **changes)})


def change_tokenizer(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    rewrite(folder, tokenizer=msgspec.structs.replace(manifest.tokenizer, **changes))


def change_index(folder: Path, num_documents: int) -> None:
    """A first index as long as one of so many documents, in the file and in the manifest."""
    size = 34 + 20 * num_documents + 8
    sorted(folder.glob("train/*.idx"))[0].write_bytes(bytes(size))
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    files = manifest.splits["train"].shards[0].files
    files = {**files, ".idx": msgspec.structs.replace(files[".idx"], bytes=size)}
    change_shard(folder, num_documents=num_documents, files=files)


def make_negative(folder: Path) -> None:
    change_index(folder, -1)


def make_ownerless(folder: Path) -> None:
    change_index(folder, 0)


def test_stores_whose_files_disagree_with_the_manifest_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda f: next(f.glob("train/*.bin")).write_bytes(b"ab"), "has 2 bytes and the manifest says"),
        (lambda f: next(f.glob("train/*.idx")).unlink(), "is missing"),
        (lambda f: change_shard(f, name="../outside"), "names a shard outside the store"),
        (lambda f: change_shard(f, name="/etc/passwd"), "names a shard outside the store"),
        (lambda f: change_shard(f, num_tokens=10**9), "1000000000 tokens"),
        (lambda f: change_shard(f, num_documents=7), "is not the index of 7 documents"),
        (lambda f: change_shard(f, files={}), "lists no .bin file"),
        (lambda f: rewrite(f, dtype="float64"), "ids of type 'float64'; expected uint16 or int32"),
        (lambda f: rewrite(f, splits={}), "has no splits"),
        (lambda f: change_shard(f, name="train/a\0b"), "names a shard outside the store"),
        (lambda f: change_shard(f, name="train/./shard-00000-0001"), "names a shard outside the store"),
        (lambda f: change_shard(f, name="train/shard-00000-0001"), "lists the shard 'train/shard-00000-0001' twice"),
        (lambda f: change_split(f, num_documents=31), "says that train has 31 documents .* its shards have 30"),
        (lambda f: change_split(f, num_tokens=5), "says that train has 30 documents of 5 tokens"),
        (lambda f: change_split(f, num_tokens=-5), "documents of -5 tokens"),
        (make_negative, "is not the index of -1 documents"),
        (make_ownerless, "tokens of no document"),
        (lambda f: change_tokenizer(f, vocab_size=-1), "has a vocabulary of -1 tokens"),
    ]
    for number, (damage, message) in enumerate(cases):
        folder = make_store(tmp_path / str(number), make_documents(30))
        damage(folder)
        with pytest.raises(StoreError, match=message):
            tm.open(folder)


def test_files_that_lead_out_of_the_store_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_documents(30))
    expected = tm.open(store).read(0, 50).tolist()
    (tmp_path / "link").symlink_to(store)
    assert tm.open(tmp_path / "link").read(0, 50).tolist() == expected, "the store itself may be a link"
    path = sorted(store.glob("train/*.bin"))[0]
    path.rename(store / "elsewhere.bin")
    path.symlink_to("../elsewhere.bin")
    for name in ("store", "link"):
        assert tm.open(tmp_path / name).read(0, 50).tolist() == expected, "a link may lead to another place of it"
    (store / "elsewhere.bin").rename(tmp_path / "outside.bin")
    path.unlink()
    path.symlink_to("../../outside.bin")
    with pytest.raises(StoreError, match="is a link that leads out of the store"):
        tm.open(store)
    path.unlink()
    (tmp_path / "outside.bin").rename(path)
    assert tm.open(store).read(0, 50).tolist() == expected
    for name in ("train", "manifest.json"):
        (store / name).rename(tmp_path / "outside")
        (store / name).symlink_to(tmp_path / "outside")
        with pytest.raises(StoreError, match=f"{name} is a link that leads out of the store"):
            tm.open(store)
        (store / name).unlink()
        (tmp_path / "outside").rename(store / name)
    assert tm.open(store).read(0, 50).tolist() == expected


def test_an_index_that_does_not_begin_at_the_first_token_is_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(30), num_shards=1)
    path = next(folder.glob("train/*.idx"))
    data = bytearray(path.read_bytes())
    data[34 + 4 * 30 : 34 + 4 * 30 + 8] = struct.pack("<q", 2)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="its first document starts at byte 2; run tokenmill verify"):
        tm.open(folder).document(4)


def test_an_index_that_points_outside_its_shard_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(30), num_shards=1)
    path = next(folder.glob("train/*.idx"))
    data = bytearray(path.read_bytes())
    data[34 + 4 * 30 + 8 * 4 : 34 + 4 * 30 + 8 * 5] = struct.pack("<q", 1 << 40)
    path.write_bytes(data)
    store = tm.open(folder)
    with pytest.raises(StoreError, match="is damaged: a document starts outside the shard"):
        store.document(4)
    with pytest.raises(StoreError, match="is damaged"):
        tm.pack(store, seq_len=8, method="best-fit")
    data[:9] = b"NOTINDEX!"
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is not the index of a uint16 shard"):
        tm.open(folder).document(4)


def test_a_shard_that_shrinks_after_opening_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(30), num_shards=1)
    store = tm.open(folder)
    next(folder.glob("train/*.bin")).write_bytes(b"ab")
    with pytest.raises(StoreError, match="has 2 bytes; the store says"):
        store.document(4)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 10**6)])
def test_tokens_that_are_not_there_are_refused(tmp_path: Path, start: int, stop: int) -> None:
    store = tm.open(make_store(tmp_path, make_documents(30)))
    with pytest.raises(UsageError, match=f"tokens {start} to {stop} are not in"):
        store.read(start, stop)
