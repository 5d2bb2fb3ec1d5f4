"""`tokenmill.open` of files of other projects: every format, splits, lists and globs, joined sources, and refusals."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.exports import documents_of
from tests.support.stores import collect, make_documents, make_store
from tests.support.token_files import (
    CASES,
    Writer,
    every_format,
    expected,
    flat,
    wide,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_npy,
    write_olmo,
    write_parquet,
    write_pt,
)
from tokenmill.errors import StoreError, UsageError


@every_format
def test_a_file_and_a_folder_of_files_give_their_tokens_and_documents(tmp_path: Path, write: Writer, kind: str) -> None:
    documents = wide(make_documents(90), kind)
    parts = [documents[:30], documents[30:31], documents[31:]]
    paths = [write(tmp_path / f"{number:06d}", part, kind) for number, part in enumerate(parts)]
    one = tm.open(paths[0])
    assert documents_of(one) == expected(write, parts[:1])
    for place in (tmp_path, tmp_path / f"*{paths[0].suffix}", paths):
        store = tm.open(place)
        assert store.vocab_size is None
        assert list(store.splits) == ["train"]
        assert store.read(0, store.num_tokens).tolist() == flat(documents)
        assert documents_of(store) == expected(write, parts)


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
        assert documents_of(store) == known
        assert store.read(0, store.num_tokens).tolist() == flat(documents)


def test_files_of_all_formats_are_opened_as_one(tmp_path: Path) -> None:
    documents = make_documents(40)
    paths = [write_datatrove(tmp_path / "a", documents, "<u2"), write_npy(tmp_path / "b", documents, "<u2")]
    paths += [write_llmc(tmp_path / "c", documents, "<u2"), write_parquet(tmp_path / "d", documents, "list<u2>")]
    paths += [write_megatron(tmp_path / "e", documents, "<u2"), make_store(tmp_path / "f", documents)]
    store = tm.open(paths)
    assert store.read(0, store.num_tokens).tolist() == flat(documents) * 6
    assert store.num_documents == 4 * 40 + 2
    with pytest.raises(UsageError, match=r"has uint16 ids and .* has int64; join sources of one type"):
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
    with pytest.raises(UsageError, match=r"no split of .* \(train\) is in all sources; join equal splits"):
        tm.open([tmp_path / "train", tmp_path / "val"])


def test_joined_stores_keep_the_splits_that_only_some_have(tmp_path: Path) -> None:
    documents = make_documents(60)
    make_store(tmp_path / "a", documents[:30], val=documents[50:])
    make_store(tmp_path / "b", documents[30:50])
    for order in ("ab", "ba"):
        joined = tm.open([tmp_path / name for name in order])
        assert list(joined.splits) == ["train", "val"]
        assert joined.split("train").num_documents == 50
        assert documents_of(joined.split("val")) == documents[50:]


def test_files_of_no_known_format_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(
        StoreError, match=r"notes.txt is neither a store nor a file of tokens in a format .* Megatron, llm.c"
    ):
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
