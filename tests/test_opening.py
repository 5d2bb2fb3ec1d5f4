"""Opening: other programs' files, and stores whose files do not fit their manifest."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tokenmill as tm
from tests.running import tokenmill
from tests.stores import collect, make_documents, make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.store.manifest import Manifest, encode_sealed


def write_pair(stem: Path, sequences: list[list[int]], edges: list[int], code: int = 8, kind: str = "<u2") -> Path:
    """A Megatron pair, written from the description of the format."""
    lengths = np.array([len(some) for some in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(kind).itemsize
    np.array([token for some in sequences for token in some], kind).tofile(f"{stem}.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(edges))
    index = header + lengths.tobytes() + pointers.astype("<i8").tobytes() + np.array(edges, "<i8").tobytes()
    Path(f"{stem}.idx").write_bytes(index)
    return Path(f"{stem}.bin")


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_a_megatron_pair_is_opened_with_its_documents(tmp_path: Path, code: int, kind: str) -> None:
    sequences = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    path = write_pair(tmp_path / "web", sequences, [0, 2, 3, 4], code, kind)
    for name in (path, path.with_suffix(".idx"), str(path)):
        store = tm.open(name)
        assert store.num_documents == 3
        assert [store.document(n).tolist() for n in range(3)] == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
        assert store.read(2, 8).tolist() == [3, 4, 5, 6, 7, 8]
    ((x, y),) = collect(tm.load(path, seq_len=3, batch_size=3, shuffle=False), 1)
    assert x.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert y.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10]]
    with pytest.raises(UsageError, match="has no tokenizer of its own"):
        store.decode(np.array([1]))


def test_a_nanogpt_file_is_one_document(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    store = tm.open(tmp_path / "train.bin")
    assert (store.num_documents, store.num_tokens) == (1, 100)
    assert store.document(0).tolist() == list(range(100))
    np.arange(100, dtype="<u4").tofile(tmp_path / "wide.bin")
    assert tm.open(tmp_path / "wide.bin", dtype="uint32").read(98, 100).tolist() == [98, 99]
    ours = collect(tm.load(tmp_path / "train.bin", seq_len=10, batch_size=2), 3)
    assert all((y == x + 1).all() for x, y in ours)
    for name, kind in (("train.bin", "uint16"), ("wide.bin", "uint32")):
        for packing in ("best-fit", "pad"):
            opened = tm.open(tmp_path / name, dtype=kind)
            batches = list(tm.load(opened, seq_len=30, batch_size=2, packing=packing, epochs=1))
            assert sorted(t for x, _ in batches for t in x.reshape(-1).tolist() if t) == list(range(1, 100))
    with pytest.raises(UsageError, match="dtype 'float32' is not one of ids"):
        tm.open(tmp_path / "train.bin", dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:20], "is not a Megatron index"),
        (lambda d: b"X" + d[1:], "is not a Megatron index"),
        (lambda d: d[:17] + b"\x63" + d[18:], "is not a Megatron index"),
        (lambda d: d[:-30], "is not a Megatron index"),
        (lambda d: d[:34] + b"\x09" + d[35:], "does not describe its .bin front to back"),
    ],
)
def test_a_foreign_index_that_makes_no_sense_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = write_pair(tmp_path / "web", [[1, 2, 3], [4], [5, 6]], [0, 1, 2, 3])
    index = path.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(StoreError, match=message):
        tm.open(path)


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(StoreError, match="3 bytes, which is no whole number of uint16 ids"):
        tm.open(tmp_path / "odd.bin")


def rewrite(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    (folder / "manifest.json").write_bytes(encode_sealed(msgspec.structs.replace(manifest, **changes)))


def change_shard(folder: Path, **changes: Any) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    split = manifest.splits["train"]
    shard = msgspec.structs.replace(split.shards[0], **changes)
    rewrite(folder, splits={"train": msgspec.structs.replace(split, shards=[shard, *split.shards[1:]])})


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
    ]
    for number, (damage, message) in enumerate(cases):
        folder = make_store(tmp_path / str(number), make_documents(30))
        damage(folder)
        with pytest.raises(StoreError, match=message):
            tm.open(folder)


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


def test_a_row_is_shown_with_its_documents(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the mill grinds"}\n{"text": "every token"}\n' * 20)
    tm.tokenize(tmp_path / "in.jsonl", tmp_path / "store", tokenizer=str(tiny_tokenizer), workers=1)
    shown = tokenmill("inspect", tmp_path / "store", "--row", "1", "--seq-len", "16")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("row 1 of pack concat, seq_len 16: ")
    assert "<|endoftext|>" in shown.stdout
    padded = tokenmill("inspect", tmp_path / "store", "--row", "0", "--seq-len", "64", "--packing", "pad")
    assert "padding, tokens " in padded.stdout
    wrong = tokenmill("inspect", tmp_path / "store", "--row", "10000")
    assert wrong.returncode == 2
