"""Opening: other programs' files, and stores whose files do not fit their manifest."""

from __future__ import annotations

import json
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
    (store / "train").rename(tmp_path / "outside")
    (store / "train").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="train leads out of the store"):
        tm.open(store)


def test_an_index_that_does_not_begin_at_the_first_token_is_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(30), num_shards=1)
    path = next(folder.glob("train/*.idx"))
    data = bytearray(path.read_bytes())
    data[34 + 4 * 30 : 34 + 4 * 30 + 8] = struct.pack("<q", 2)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="its first document starts at byte 2; run tokenmill verify"):
        tm.open(folder).document(4)


def test_joined_stores_keep_the_splits_that_only_some_have(tmp_path: Path) -> None:
    documents = make_documents(60)
    make_store(tmp_path / "a", documents[:30], val=documents[50:])
    make_store(tmp_path / "b", documents[30:50])
    for order in ("ab", "ba"):
        joined = tm.open([tmp_path / name for name in order])
        assert list(joined.splits) == ["train", "val"]
        assert joined.split("train").num_documents == 50
        assert [joined.split("val").document(n).tolist() for n in range(10)] == documents[50:]


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
    row = ("inspect", tmp_path / "store", "--row", "1", "--seq-len", "16")
    shown = tokenmill(*row, "--no-shuffle")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("row 1 of pack concat, seq_len 16: ")
    assert "<|endoftext|>" in shown.stdout
    assert tokenmill(*row).stdout.startswith("row 1 of shuffle, seed 0 over pack concat, seq_len 16: ")
    padded = tokenmill("inspect", tmp_path / "store", "--row", "0", "--seq-len", "64", "--packing", "pad")
    assert "padding, tokens " in padded.stdout
    for more, message in ((["--row", "-1"], "row -1 does not exist"), (["--document", "3"], "either --row N or")):
        wrong = tokenmill(*row, *more)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert message in wrong.stderr
    ids = json.loads(tokenmill("inspect", tmp_path / "store", "--document", "1", "--json").stdout)
    assert ids["text"] == "every token<|endoftext|>"
    assert ids["ids"] == tm.open(tmp_path / "store").document(1).tolist()


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_a_traced_row_can_be_looked_at(tmp_path: Path, tiny_tokenizer: Path, packing: str) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "the mill grinds {n} tokens"}}\n' for n in range(60)))
    tm.tokenize(tmp_path / "in.jsonl", tmp_path / "store", tokenizer=str(tiny_tokenizer), workers=1)
    flags = ["--seq-len", "24", "--seed", "5", "--packing", packing, "--json"]
    # Step 40 is in a later epoch, whose order is another one.
    for step in ("2", "40"):
        trace = json.loads(tokenmill("trace", tmp_path / "store", "--step", step, "--batch-size", "2", *flags).stdout)
        traced = trace["rows"][1]
        shown = json.loads(tokenmill("inspect", tmp_path / "store", "--row", str(traced["row"]), *flags).stdout)
        found = [(part["document"], part["start"], part["tokens"]) for part in shown["documents"]]
        assert found == [(part["document"], part["start"], part["num_tokens"]) for part in traced["documents"]]
        assert len(shown["ids"]) == sum(part["tokens"] for part in shown["documents"])
    batch = collect(tm.load(tmp_path / "store", 24, 2, seed=5, packing=packing), 41)[40]
    assert shown["ids"] == batch.inputs[1, : len(shown["ids"])].tolist()
