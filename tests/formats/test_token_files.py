"""What each format of other projects says of its files, and which files are refused.

`tests/interop/other_writers.py` lets the projects that are not installed here write files.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.support.exports import documents_of
from tests.support.stores import collect, make_documents, make_store
from tests.support.token_files import (
    Writer,
    flat,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_npy,
    write_olmo,
    write_pair,
    write_parquet,
    write_pt,
)
from tokenmill.errors import StoreError, UsageError


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_a_megatron_pair_is_opened_with_its_documents(tmp_path: Path, code: int, kind: str) -> None:
    sequences = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    path = write_pair(tmp_path / "web", sequences, [0, 2, 3, 4], code, kind)
    for name in (path, path.with_suffix(".idx"), str(path)):
        store = tm.open(name)
        assert store.num_documents == 3
        assert documents_of(store) == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
        assert store.read(2, 8).tolist() == [3, 4, 5, 6, 7, 8]
    ((x, y),) = collect(tm.load(path, seq_len=3, batch_size=3, shuffle=False), 1)
    assert x.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert y.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10]]
    with pytest.raises(UsageError, match="has no tokenizer of its own"):
        store.decode(np.array([1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:20], "is not a Megatron index"),
        (lambda d: b"X" + d[1:], "is not a Megatron index"),
        (lambda d: d[:17] + b"\x63" + d[18:], "is not a Megatron index"),
        (lambda d: d[:-30], "is not a Megatron index"),
        (lambda d: d[:34] + b"\x09" + d[35:], "does not describe its .bin from front to back"),
    ],
)
def test_a_megatron_index_that_does_not_fit_its_tokens_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = write_pair(tmp_path / "web", [[1, 2, 3], [4], [5, 6]], [0, 1, 2, 3])
    index = path.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(StoreError, match=message):
        tm.open(path)


def test_shards_of_a_store_are_pairs_unless_they_have_a_mask(tmp_path: Path) -> None:
    documents = make_documents(40)
    folder = make_store(tmp_path, documents) / "train"
    assert tm.open(folder).num_documents == 40
    next(folder.glob("*.bin")).with_suffix(".mask").touch()
    with pytest.raises(UsageError, match="is a shard of supervised data, with a loss mask beside it; open its store"):
        tm.open(folder)


@pytest.mark.parametrize("name", ["pair", "pair.v1", "pair.v1.bin", "pair.v1.idx"])
def test_a_megatron_pair_is_known_by_either_file_and_by_its_prefix(tmp_path: Path, name: str) -> None:
    documents = [[1, 2, 3], [4, 5]]
    write_megatron(tmp_path / "pair", documents, "<u2")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair.v1{suffix}").write_bytes((tmp_path / f"pair{suffix}").read_bytes())
    store = tm.open(tmp_path / name)
    assert documents_of(store) == documents


def test_half_a_megatron_pair_is_no_prefix(tmp_path: Path) -> None:
    write_megatron(tmp_path / "pair", [[1, 2, 3]], "<u2")
    (tmp_path / "pair.idx").unlink()
    with pytest.raises(StoreError, match="pair does not exist"):
        tm.open(tmp_path / "pair")


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
    with pytest.raises(UsageError, match="dtype 'float32' is not a type of ids"):
        tm.open(tmp_path / "train.bin", dtype="float32")


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(StoreError, match="3 bytes, which is not a whole number of uint16 ids"):
        tm.open(tmp_path / "odd.bin")


def test_the_loss_of_datatrove_becomes_the_mask(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = make_documents(60)
    masks = [rng.integers(0, 2, len(document)).tolist() for document in documents]
    for number in range(2):
        path = write_datatrove(tmp_path / f"{number}", documents[number::2], "<u4")
        np.array(flat(masks[number::2]), "?").tofile(f"{path}.loss")
    store = pickle.loads(pickle.dumps(tm.open(tmp_path)))
    mask = store.split().mask
    order = [*range(0, 60, 2), *range(1, 60, 2)]
    assert [mask.document(n).tolist() for n in range(60)] == [masks[n] for n in order]
    batch = next(iter(tm.load(store, seq_len=8, batch_size=4, shuffle=False)))
    trained = np.array(flat([masks[n] for n in order])[1:33]).reshape(4, 8)
    assert (batch.loss_mask == trained).all()
    joined = tm.open([tmp_path / "0.ds", tmp_path / "1.ds"])
    assert joined.split().mask.document(31).tolist() == masks[order[31]]
    (tmp_path / "1.ds.loss").unlink()
    with pytest.raises(UsageError, match=r"1.ds has no .loss file, but others do"):
        tm.open(tmp_path)


def test_tokens_after_the_last_document_of_olmo_are_one_more(tmp_path: Path) -> None:
    path = write_olmo(tmp_path / "part", [[1, 2, 3], [4]], "<u2")
    np.array([1, 2, 3, 4, 5, 6], "<u2").tofile(path)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(b"0,3\n3,4\n"))
    store = tm.open(path, dtype="uint16")
    assert documents_of(store) == [[1, 2, 3], [4], [5, 6]]
    with pytest.raises(StoreError, match=r"ends at token 4, and part.npy has 12 bytes, .*; pass dtype"):
        tm.open(path)


def test_tokens_that_do_not_begin_at_a_whole_token_are_read_at_positions(tmp_path: Path) -> None:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (50,), }  \n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + np.arange(50, dtype="<i8").tobytes()
    assert (len(data) - 400) % 8
    (tmp_path / "odd.npy").write_bytes(data)
    store = tm.open(tmp_path / "odd.npy")
    ((x, y),) = collect(tm.load(store, seq_len=7, batch_size=7, shuffle=False), 1)
    assert x.reshape(-1).tolist() == list(range(49)) and y[-1, -1] == 49


def test_tensors_that_are_parts_of_others_and_tensors_that_cannot_be_mapped(tmp_path: Path) -> None:
    import torch

    torch.save(torch.arange(100)[10:20], tmp_path / "chunk_0.pt")
    assert tm.open(tmp_path).document(0).tolist() == list(range(10, 20))
    torch.save(torch.arange(5), tmp_path / "chunk_1.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.arange(7).to(torch.uint16), tmp_path / "chunk_2.pt")
    (tmp_path / "metadata.json").write_text("{}")
    torch.save({"model": torch.zeros(3)}, tmp_path / "model.pt")
    store = pickle.loads(pickle.dumps(tm.open(tmp_path)))
    assert documents_of(store) == [list(range(10, 20)), list(range(5)), list(range(7))]


def test_a_pickle_in_a_chunk_is_never_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "run"),)

    import torch

    for name, options in (("new", {}), ("old", {"_use_new_zipfile_serialization": False})):
        (tmp_path / name).mkdir()
        torch.save(Hostile(), tmp_path / name / "chunk_0.pt", **options)
        with pytest.raises(StoreError, match="cannot be loaded by torch without running code in it"):
            tm.open(tmp_path / name)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "chunk_0.pt").write_bytes(pickle.dumps(Hostile(), 2))
    with pytest.raises(StoreError, match="cannot be loaded by torch"):
        tm.open(tmp_path / "bare")
    assert not (tmp_path / "run").exists()


def rezip(data: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return out.getvalue()


def damage(write: Writer, kind: str, suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """A file of three documents of which one part is changed."""

    def make(folder: Path) -> Path:
        path = write(folder / "000000", [[1, 2, 3], [4], [5, 6]], kind)
        part = Path(f"{path}{suffix[3:]}") if suffix.startswith(".ds") else path.with_suffix(suffix or path.suffix)
        part.write_bytes(change(part.read_bytes()))
        return path

    return make


def csv(text: str) -> Callable[[bytes], bytes]:
    return lambda _: gzip.compress(text.encode())


HOSTILE: list[tuple[str, Callable[[Path], Path], str]] = [
    ("llmc short", damage(write_llmc, "<u2", "", lambda d: d[:-2]), "its header says 6 ids of 2 bytes"),
    ("llmc long", damage(write_llmc, "<u4", "", lambda d: d + b"1234"), "its header says 6 ids of 4 bytes"),
    ("llmc cut", damage(write_llmc, "<u2", "", lambda d: d[:4]), "version 0 of llm.c"),
    ("llmc count", damage(write_llmc, "<u2", "", lambda d: d[:8] + b"\xff" * 4 + d[12:]), "says -1 ids"),
    ("llmc version", damage(write_llmc, "<u2", "", lambda d: d[:4] + b"\x02" + d[5:]), "version 2 of llm.c's"),
    ("llmc questions", damage(write_llmc, "<u2", "", lambda d: b"\x8a" + d[1:]), "questions to evaluate with of llm.c"),
    ("ds shrink", damage(write_datatrove, "<u2", "", lambda d: d[:-2]), "does not describe the 10 bytes"),
    ("ds odd", damage(write_datatrove, "<u2", "", lambda d: d + b"1"), "not a whole number of uint16 ids"),
    ("ds index odd", damage(write_datatrove, "<u2", ".ds.index", lambda d: d[:-1]), "is not an index of datatrove"),
    (
        "ds index falls",
        damage(write_datatrove, "<u2", ".ds.index", lambda d: d[8:16] + d[:8] + d[16:]),
        "ends of documents must grow",
    ),
    (
        "ds index overflows",
        damage(write_datatrove, "<u2", ".ds.index", lambda d: d[:8] + b"\xff" * 8 + d[16:]),
        "ends of documents must grow",
    ),
    ("ds index huge", damage(write_datatrove, "<u2", ".ds.index", lambda d: d[:-1] + b"\x7f"), "does not describe"),
    ("ds index empty", damage(write_datatrove, "<u2", ".ds.index", lambda d: b""), "does not describe"),
    ("ds width", damage(write_datatrove, "<u2", ".ds.metadata", lambda d: b"gpt2|9\n6\n6"), "ids of 9 bytes"),
    ("ds count", damage(write_datatrove, "<u2", ".ds.metadata", lambda d: b"gpt2|2\n7\n7"), "says 7 tokens and"),
    ("olmo gap", damage(write_olmo, "<u2", ".csv.gz", csv("0,3\n4,6\n")), "does not describe documents"),
    ("olmo late", damage(write_olmo, "<u2", ".csv.gz", csv("1,6\n")), "does not describe documents"),
    ("olmo back", damage(write_olmo, "<u2", ".csv.gz", csv("0,6\n6,2\n")), "does not describe documents"),
    ("olmo far", damage(write_olmo, "<u2", ".csv.gz", csv("0,99\n")), "more documents or tokens than"),
    ("olmo huge", damage(write_olmo, "<u2", ".csv.gz", csv(f"0,{10**30}\n")), "is not a table of OLMo"),
    ("olmo words", damage(write_olmo, "<u2", ".csv.gz", csv("a,b\n")), "is not a table of OLMo"),
    ("olmo one column", damage(write_olmo, "<u2", ".csv.gz", csv("0\n6\n")), "is not a table of OLMo"),
    ("olmo no gzip", damage(write_olmo, "<u2", ".csv.gz", lambda d: b"0,6\n"), "is not a table of OLMo"),
    ("olmo half a gzip", damage(write_olmo, "<u2", ".csv.gz", lambda d: d[:20]), "is not a table of OLMo"),
    ("olmo no rows", damage(write_olmo, "<u2", ".csv.gz", csv("")), "is not a table of OLMo"),
    (
        "olmo endless",
        damage(write_olmo, "<u2", ".csv.gz", csv("0,0\n" * 1_100_000)),
        "more documents or tokens than a .npy of 12 bytes",
    ),
    ("npy short", damage(write_npy, "<i8", "", lambda d: d[:-8]), "its header says 6 ids of type int64"),
    ("npy header", damage(write_npy, "<i8", "", lambda d: d[:40]), "a header that is not NumPy's"),
    ("npy version", damage(write_npy, "<i8", "", lambda d: d[:6] + b"\x09" + d[7:]), "a header that is not NumPy's"),
    ("npy object", damage(write_npy, "<i8", "", lambda d: d.replace(b"<i8", b"|O8")), "is an array of object"),
    ("npy float", damage(write_npy, "<i8", "", lambda d: d.replace(b"<i8", b"<f8")), "is an array of float64"),
    ("npy two", damage(write_npy, "<i8", "", lambda d: d.replace(b"(6,), ", b"(2,3),")), r"with shape \(2, 3\)"),
    ("parquet cut", damage(write_parquet, "list<i4>", "", lambda d: d[:-9]), "damaged, or not a Parquet file"),
    ("parquet empty", damage(write_parquet, "list<i4>", "", lambda d: b""), "damaged, or not a Parquet file"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path)
    for place in (path, tmp_path):
        with pytest.raises(StoreError, match=message) as caught:
            tm.open(place)
        assert "\n" not in str(caught.value)


def test_archives_that_lie_about_their_tensor_are_refused(tmp_path: Path) -> None:
    good = write_pt(tmp_path / "0", [list(range(300, 400))], "<i8").read_bytes()
    path = tmp_path / "chunk_0.pt"

    def enlarge(name: str, data: bytes) -> bytes:
        return data.replace(b"Kd", b"K\xff") if name.endswith("data.pkl") else data

    path.write_bytes(rezip(good, enlarge))
    with pytest.raises(StoreError, match="its tensor is not inside the archive"):
        tm.open(path)
    path.write_bytes(rezip(good, lambda name, data: data[:80] if name.endswith("data/0") else data))
    with pytest.raises(StoreError, match="its tensor is not inside the archive"):
        tm.open(path)
    for number in range(0, len(good), 7):
        path.write_bytes(good[:number])
        with pytest.raises(StoreError, match="cannot be loaded by torch"):
            tm.open(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_with_other_alignment_or_compression_are_read(tmp_path: Path, method: int) -> None:
    good = write_pt(tmp_path / "0", [list(range(300, 400))], "<i8").read_bytes()
    (tmp_path / "chunk_0.pt").write_bytes(rezip(good, lambda _, data: data, method))
    assert tm.open(tmp_path).read(0, 100).tolist() == list(range(300, 400))


def test_fixed_lists_are_read_and_other_columns_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    fixed = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3))
    pq.write_table(pa.table({"input_ids": fixed, "labels": fixed}), path)
    assert documents_of(tm.open(path)) == [[1, 2, 3], [4, 5, 6]]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tokens": fixed}, "has no column 'input_ids' with ids; it has 'tokens'"),
        ({"input_ids": pa.array([1, 2])}, "column 'input_ids' of type int64; expected a list of integers"),
        ({"input_ids": pa.array([[1.5]])}, "expected a list of integers"),
        ({"input_ids": pa.array([[[1]]])}, "expected a list of integers"),
        ({"input_ids": pa.array([[1], None, [2]])}, "has a null in column 'input_ids', in row 1; leave it out"),
        ({"input_ids": pa.array([[1], [2], [3, None]])}, "has a null in column 'input_ids', in row 2"),
        ({"input_ids": pa.array([[1], [-100]])}, "has -100 in column 'input_ids', near row 0, which is not a token id"),
        ({"input_ids": pa.array([[1 << 31]])}, "has 2147483648 in column 'input_ids'"),
    ]
    for columns, message in refused:
        pq.write_table(pa.table(columns), path)
        with pytest.raises(StoreError, match=message):
            tm.open(path)


def test_parquet_of_hugging_face_datasets_with_splits(tmp_path: Path) -> None:
    import datasets

    documents = make_documents(50)
    rows = datasets.Dataset.from_dict(
        {"input_ids": documents, "attention_mask": [[1] * len(some) for some in documents]}
    )
    rows.select(range(30)).to_parquet(str(tmp_path / "train-00000-of-00002.parquet"))
    rows.select(range(30, 40)).to_parquet(str(tmp_path / "train-00001-of-00002.parquet"))
    rows.select(range(40, 50)).to_parquet(str(tmp_path / "validation-00000-of-00001.parquet"))
    store = tm.open(tmp_path)
    assert documents_of(store) == documents[:40]
    assert documents_of(store.split("val")) == documents[40:]
