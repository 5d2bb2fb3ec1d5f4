"""Files that other projects made: their tokens, their documents, and what is refused.

The bytes are written here from the projects' descriptions, or by torch, numpy, pyarrow and datasets themselves;
`tests/interop/foreign.py` lets the projects that are not installed here write them.
"""

from __future__ import annotations

import gc
import gzip
import io
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.stores import Ids, collect, make_documents, make_store
from tests.test_opening import write_pair
from tokenmill.errors import StoreError, UsageError

Documents = Sequence[Ids]
Writer = Callable[[Path, Documents, str], Path]


def flat(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def ends(documents: Documents) -> list[int]:
    return np.cumsum([len(document) for document in documents], dtype=np.int64).tolist()


def write_megatron(stem: Path, documents: Documents, kind: str) -> Path:
    codes = {"<u2": 8, "<i4": 4, "<i8": 5}
    return write_pair(stem, [list(some) for some in documents], list(range(len(documents) + 1)), codes[kind], kind)


def write_nanogpt(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".bin")
    np.array(flat(documents), kind).tofile(path)
    return path


def write_llmc(stem: Path, documents: Documents, kind: str) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = [20240520, 1, len(flat(documents))] if kind == "<u2" else [20240801, 7, len(flat(documents))]
    path = stem.with_suffix(".bin")
    path.write_bytes(header.tobytes() + np.array(flat(documents), kind).tobytes())
    return path


def write_datatrove(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".ds")
    np.array(flat(documents), kind).tofile(path)
    np.array(ends(documents), "<u8").tofile(f"{path}.index")
    count = len(flat(documents))
    Path(f"{path}.metadata").write_text(f"org/name|{kind[-1]}\n{count}\n{count} T")
    return path


def write_olmo(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".npy")
    np.array(flat(documents), kind).tofile(path)
    stops = ends(documents)
    rows = [f"{a},{b},id-{n},src.jsonl.gz,{n}\n" for n, (a, b) in enumerate(zip([0, *stops], stops, strict=False))]
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("".join(rows).encode()))
    return path


def write_npy(stem: Path, documents: Documents, kind: str) -> Path:
    np.save(stem.with_suffix(".npy"), np.array(flat(documents), kind))
    return stem.with_suffix(".npy")


def write_pt(stem: Path, documents: Documents, kind: str) -> Path:
    import torch

    path = stem.with_name(f"chunk_{stem.name}.pt")
    torch.save(torch.from_numpy(np.array(flat(documents), kind)), path)
    return path


def write_parquet(stem: Path, documents: Documents, kind: str) -> Path:
    path = stem.with_suffix(".parquet")
    column = pa.array([list(some) for some in documents], KINDS[kind])
    pq.write_table(pa.table({"text": ["x"] * len(documents), "input_ids": column}), path, row_group_size=7)
    return path


KINDS = {
    "list<u2>": pa.list_(pa.uint16()),
    "list<i4>": pa.list_(pa.int32()),
    "large_list<i8>": pa.large_list(pa.int64()),
}
CASES: list[tuple[Writer, str]] = [
    (write_megatron, "<u2"),
    (write_megatron, "<i4"),
    (write_megatron, "<i8"),
    (write_nanogpt, "<u2"),
    (write_llmc, "<u2"),
    (write_llmc, "<u4"),
    (write_datatrove, "<u2"),
    (write_datatrove, "<u4"),
    (write_olmo, "<u2"),
    (write_olmo, "<u4"),
    (write_npy, "<u2"),
    (write_npy, "<u4"),
    (write_npy, "<i8"),
    (write_pt, "<i8"),
    (write_pt, "<i4"),
    (write_parquet, "list<u2>"),
    (write_parquet, "list<i4>"),
    (write_parquet, "large_list<i8>"),
]
ONE_A_FILE = {write_nanogpt, write_llmc, write_npy, write_pt}
every_format = pytest.mark.parametrize(
    ("write", "kind"), CASES, ids=[f"{write.__name__[6:]} {kind}" for write, kind in CASES]
)


def wide(documents: Documents, kind: str) -> list[list[int]]:
    """The same documents with ids that need more than two bytes, where the type has them."""
    shift = 0 if "u2" in kind else 100_000
    return [[token + shift for token in document] for document in documents]


def expected(write: Writer, files: Sequence[Documents]) -> list[list[int]]:
    """The documents that files should have: those that were written, or one a file where nobody knows them."""
    if write in ONE_A_FILE:
        return [flat(documents) for documents in files]
    return [list(document) for documents in files for document in documents]


@every_format
def test_a_file_and_a_folder_of_files_give_their_tokens_and_documents(tmp_path: Path, write: Writer, kind: str) -> None:
    documents = wide(make_documents(90), kind)
    parts = [documents[:30], documents[30:31], documents[31:]]
    paths = [write(tmp_path / f"{number:06d}", part, kind) for number, part in enumerate(parts)]
    one = tm.open(paths[0])
    assert [one.document(n).tolist() for n in range(one.num_documents)] == expected(write, parts[:1])
    for place in (tmp_path, tmp_path / f"*{paths[0].suffix}", paths):
        store = tm.open(place)
        assert store.vocab_size is None
        assert list(store.splits) == ["train"]
        assert store.read(0, store.num_tokens).tolist() == flat(documents)
        assert [store.document(n).tolist() for n in range(store.num_documents)] == expected(write, parts)


@every_format
def test_rows_batches_and_copies_are_those_of_a_store_with_the_same_documents(
    tmp_path: Path, write: Writer, kind: str
) -> None:
    documents = wide(make_documents(200), kind)
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs" / "000001", documents[:120], kind)
    write(tmp_path / "theirs" / "000002", documents[120:], kind)
    known = expected(write, [documents[:120], documents[120:]])
    dtype = "uint16" if "u2" in kind else "int32"
    ours = tm.open(make_store(tmp_path / "ours", known, num_shards=2, dtype=dtype))
    theirs = pickle.loads(pickle.dumps(tm.open(tmp_path / "theirs")))
    for packing in ("concat", "best-fit", "pad"):
        settings = {"seq_len": 24, "batch_size": 4, "packing": packing, "document_mask": True}
        for a, b in zip(collect(tm.load(ours, **settings), 60), collect(tm.load(theirs, **settings), 60), strict=True):
            assert (a.inputs == b.inputs).all() and (a.targets == b.targets).all()
            assert (a.segment_ids == b.segment_ids).all()
    state = tm.load(theirs, seq_len=24, batch_size=4).state_dict()
    tm.load(tmp_path / "theirs", seq_len=24, batch_size=4).load_state_dict(state)
    both = tm.open([tmp_path / "theirs", tmp_path / "theirs"])
    assert both.read(0, both.num_tokens).tolist() == flat(documents) * 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    case=st.sampled_from(CASES),
    documents=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=30),
)
def test_any_documents_come_back(data: st.DataObject, case: tuple[Writer, str], documents: list[list[int]]) -> None:
    write, kind = case
    cut = data.draw(st.integers(0, len(documents)))
    parts = [part for part in (documents[:cut], documents[cut:]) if part]
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            write(Path(folder) / f"{number:06d}", part, kind)
        if "olmo" in write.__name__ and not flat(documents):
            return
        store = tm.open(folder, dtype="uint32" if (write, kind) == (write_olmo, "<u4") else None)
        known = expected(write, parts)
        if write is write_olmo:  # a file without tokens has one empty document, whatever its table says
            known = [some for part in parts for some in (part if flat(part) else [[]])]
        assert [store.document(n).tolist() for n in range(store.num_documents)] == known
        assert store.read(0, store.num_tokens).tolist() == flat(documents)


def test_files_of_all_formats_are_opened_as_one(tmp_path: Path) -> None:
    documents = make_documents(40)
    paths = [write_datatrove(tmp_path / "a", documents, "<u2"), write_npy(tmp_path / "b", documents, "<u2")]
    paths += [write_llmc(tmp_path / "c", documents, "<u2"), write_parquet(tmp_path / "d", documents, "list<u2>")]
    paths += [write_megatron(tmp_path / "e", documents, "<u2"), make_store(tmp_path / "f", documents)]
    store = tm.open(paths)
    assert store.read(0, store.num_tokens).tolist() == flat(documents) * 6
    assert store.num_documents == 4 * 40 + 2
    with pytest.raises(UsageError, match=r"has uint16 ids and .* int64; join equal ones"):
        tm.open([paths[0], write_pt(tmp_path / "g", documents, "<i8")])


def test_names_of_files_tell_splits_apart(tmp_path: Path) -> None:
    names = [
        "fineweb_train_000001",
        "fineweb_val_000000",
        "fineweb_train_000002",
        "more-validation",
        "x_test_y",
        "other",
    ]
    for number, name in enumerate(names):
        write_llmc(tmp_path / name, [[number] * 5], "<u2")
    store = tm.open(tmp_path)
    tokens = {
        name: sorted(set(store.split(name).read(0, store.split(name).num_tokens).tolist())) for name in store.splits
    }
    assert tokens == {"train": [0, 2, 5], "val": [1, 3], "test": [4]}
    assert store.num_tokens == 15
    assert tm.open(tmp_path / "fineweb_val_000000.bin").read(0, 5).tolist() == [1] * 5
    assert tm.open(str(tmp_path / "fineweb_train_*.bin")).num_tokens == 10
    np.zeros(8, "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UsageError, match=r"several formats, llm.c \(.*\) and nanoGPT \(train.bin\); name the files"):
        tm.open(tmp_path)


def test_shards_of_a_store_are_pairs_unless_they_have_a_mask(tmp_path: Path) -> None:
    documents = make_documents(40)
    folder = make_store(tmp_path, documents) / "train"
    assert tm.open(folder).num_documents == 40
    next(folder.glob("*.bin")).with_suffix(".mask").touch()
    with pytest.raises(UsageError, match="is a shard of supervised data, with a loss mask beside it; open its store"):
        tm.open(folder)


def test_folders_of_splits_are_splits_and_sources_without_a_common_one_are_not_joined(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        write_llmc(tmp_path / name / f"x_{name}_0", [[1, 2]], "<u2")
    assert list(tm.open(tmp_path / "val").splits) == ["val"]
    for name in ("train", "val"):
        (tmp_path / "both" / name).mkdir(parents=True)
        write_datatrove(tmp_path / "both" / name / "part", [[3, 4]] if name == "val" else [[1, 2]], "<u2")
    both = tm.open(tmp_path / "both")
    assert [both.split(name).read(0, 2).tolist() for name in both.splits] == [[1, 2], [3, 4]]
    with pytest.raises(UsageError, match="has train, which others have not; join equal splits"):
        tm.open([tmp_path / "train", tmp_path / "val"])


def test_what_is_no_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match=r"notes.txt is neither a store nor tokens of a format .* Megatron, llm.c"):
        tm.open(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"has no manifest.json"):
        tm.open(tmp_path)
    with pytest.raises(UsageError, match="no file matches"):
        tm.open(tmp_path / "*.bin")
    with pytest.raises(UsageError, match=r"matches notes.txt, which has no tokens"):
        tm.open(tmp_path / "*.txt")
    make_store(tmp_path / "store", [[1, 2]])
    (tmp_path / "store" / "tokenizer").mkdir()
    (tmp_path / "store" / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"has no manifest.json"):
        tm.open(tmp_path / "store")
    (tmp_path / ".tasks").mkdir()
    write_llmc(tmp_path / "a", [[1]], "<u2")
    with pytest.raises(StoreError, match="is an unfinished run"):
        tm.open(tmp_path)


def test_the_width_of_ids_is_found_or_told(tmp_path: Path) -> None:
    documents = wide(make_documents(20), "<u4")
    path = write_olmo(tmp_path / "part", documents, "<u4")
    assert tm.open(path).dtype == np.dtype("<u4")
    with pytest.raises(StoreError, match=r"has a document that ends at token \d+, and part.npy has \d+ int64 ids"):
        tm.open(path, dtype="int64")
    path.with_suffix(".csv.gz").unlink()
    assert tm.open(path, dtype="uint32").document(0).tolist() == flat(documents)
    path = write_datatrove(tmp_path / "part", documents, "<u4")
    for name in ("part.ds.metadata", "part.ds.index"):
        (tmp_path / name).unlink()
        opened = tm.open(path, dtype=None if name == "part.ds.metadata" else "uint32")
        assert opened.read(0, opened.num_tokens).tolist() == flat(documents)


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
    with pytest.raises(UsageError, match=r"1.ds has no .loss file, and others have"):
        tm.open(tmp_path)


def test_the_tail_behind_olmos_last_document_is_one_more(tmp_path: Path) -> None:
    path = write_olmo(tmp_path / "part", [[1, 2, 3], [4]], "<u2")
    np.array([1, 2, 3, 4, 5, 6], "<u2").tofile(path)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(b"0,3\n3,4\n"))
    store = tm.open(path, dtype="uint16")
    assert [store.document(n).tolist() for n in range(store.num_documents)] == [[1, 2, 3], [4], [5, 6]]
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
    assert [store.document(n).tolist() for n in range(3)] == [list(range(10, 20)), list(range(5)), list(range(7))]


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
    (tmp_path / "bare" / "chunk_0.pt").write_bytes(pickle.dumps(Hostile()))
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
    ("ds odd", damage(write_datatrove, "<u2", "", lambda d: d + b"1"), "no whole number of uint16 ids"),
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
    assert [tm.open(path).document(n).tolist() for n in range(2)] == [[1, 2, 3], [4, 5, 6]]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tokens": fixed}, "has no column 'input_ids' with ids; it has 'tokens'"),
        ({"input_ids": pa.array([1, 2])}, "column 'input_ids' of type int64; expected a list of integers"),
        ({"input_ids": pa.array([[1.5]])}, "expected a list of integers"),
        ({"input_ids": pa.array([[[1]]])}, "expected a list of integers"),
        ({"input_ids": pa.array([[1], None, [2]])}, "has a null in column 'input_ids', in row 1; leave it out"),
        ({"input_ids": pa.array([[1], [2], [3, None]])}, "has a null in column 'input_ids', in row 2"),
        ({"input_ids": pa.array([[1], [-100]])}, "has -100 in column 'input_ids', near row 0, which is no token id"),
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
    assert [store.document(n).tolist() for n in range(store.num_documents)] == documents[:40]
    assert [store.split("val").document(n).tolist() for n in range(10)] == documents[40:]


def read_all(store: Any) -> list[int]:
    ids: list[int] = store.read(0, store.num_tokens).tolist()
    return ids


def num_open(inode: int) -> int:
    gc.collect()
    paths = [path for path in Path("/proc/self/fd").iterdir() if os.path.exists(path)]
    return sum(os.stat(path).st_ino == inode for path in paths if os.path.exists(path))


def test_a_copy_of_spooled_ids_works_in_other_processes_and_nothing_is_left(tmp_path: Path) -> None:
    documents = make_documents(40)
    path = write_parquet(tmp_path / "x", documents, "list<i4>")
    store = tm.open(path)
    inode = os.stat(store.split().table.stems[0]).st_ino
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(read_all, [store, store]) == [flat(documents)] * 2
    ours = collect(tm.load(path, seq_len=8, batch_size=2), 9)
    loader = tm.load(store, seq_len=8, batch_size=2, framework="torch", num_workers=2)
    assert all((x.numpy() == a).all() for (x, _), (a, _) in zip(collect(loader, 9), ours, strict=True))
    copy = pickle.dumps(store)
    assert num_open(inode) == 1
    del store, loader
    assert num_open(inode) == 0
    assert read_all(pickle.loads(copy)) == flat(documents)


OPEN_LARGE = textwrap.dedent(
    """
    import resource, sys
    import pyarrow.parquet, pyarrow.compute
    import tokenmill as tm
    tm.open(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = tm.open(sys.argv[2])
    print(store.num_tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
)


def test_parquet_is_copied_in_little_memory(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 12_000_000)
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids), 2000).cast(pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=len(table))
    pq.write_table(table.slice(0, 200), tmp_path / "small.parquet")
    command = [sys.executable, "-c", OPEN_LARGE, str(tmp_path / "small.parquet"), str(tmp_path / "large.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    num_tokens, kilobytes = map(int, done.stdout.split())
    assert num_tokens == 12_000_000
    assert kilobytes < 40_000, "96 MB of ids"


@pytest.mark.parametrize("name", ["pair", "pair.v1", "pair.v1.bin", "pair.v1.idx"])
def test_a_megatron_pair_is_known_by_either_file_and_by_its_prefix(tmp_path: Path, name: str) -> None:
    documents = [[1, 2, 3], [4, 5]]
    write_megatron(tmp_path / "pair", documents, "<u2")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair.v1{suffix}").write_bytes((tmp_path / f"pair{suffix}").read_bytes())
    store = tm.open(tmp_path / name)
    assert [store.document(number).tolist() for number in range(store.num_documents)] == documents


def test_half_a_megatron_pair_is_no_prefix(tmp_path: Path) -> None:
    write_megatron(tmp_path / "pair", [[1, 2, 3]], "<u2")
    (tmp_path / "pair.idx").unlink()
    with pytest.raises(StoreError, match="pair does not exist"):
        tm.open(tmp_path / "pair")
