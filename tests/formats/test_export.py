"""`tokenmill.export`: any documents, its destination, syncs and kills, and the command line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.exports import add_mask, documents_of, load_npy, read_llmc
from tests.support.in_process import tokenmill_here
from tests.support.running import sentence, start, tokenmill, wait_for
from tests.support.stores import make_store, sparse_store
from tokenmill.errors import MissingDependencyError, StoreError, UsageError
from tokenmill.formats import _destination, _row_files, _token_blocks, hf
from tokenmill.formats.export import export

DOCUMENTS = [[100 + number, *range(number), 7] for number in range(20)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), DOCUMENTS)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_store(tmp_path_factory.mktemp("supervised"), DOCUMENTS)
    return add_mask(folder, np.ones(sum(map(len, DOCUMENTS)), np.uint8))


@pytest.mark.parametrize("to", ["megatron", "nanogpt", "llmc", "parquet", "hf", "pt", "mds", "litdata", "arrayrecord"])
def test_a_loss_mask_is_left_out_only_when_asked(to: str, supervised: Path, store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"to": to, "seq_len": 4, "eos_check": False}
    is_table = to in ("parquet", "hf")
    said = (
        "--columns seq_lengths has no place for the loss mask"
        if is_table
        else f"--to {to} has no place for a loss mask"
    )
    with pytest.raises(UsageError, match=rf"{said}, and without it every token .* trained on; .*or pass --drop-mask"):
        export(supervised, tmp_path / "out", **settings, **({"columns": "seq_lengths"} if is_table else {}))
    assert not (tmp_path / "out").exists()
    export(supervised, tmp_path / "out", drop_mask=True, **settings)
    export(store, tmp_path / "plain", **settings)
    assert _files_of(tmp_path / "out") == _files_of(tmp_path / "plain")


def _files_of(folder: Path) -> dict[str, bytes]:
    # Arrow files of datasets name the fingerprint of the store.
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "state.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=12).filter(any),
    num_shards=st.integers(1, 5),
    dtype=st.sampled_from(["uint16", "int32"]),
    seq_len=st.integers(1, 5),
    block=st.integers(1, 20),
)
def test_any_documents_come_back(
    documents: list[list[int]], num_shards: int, dtype: str, seq_len: int, block: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for module in (_token_blocks, _row_files, hf):
            patch.setattr(module, "BLOCK_TOKENS", block)
        patch.setattr(os, "fsync", lambda descriptor: None)
        store = make_store(folder / "store", documents, num_shards=num_shards, dtype=dtype)
        stream = [token for ids in documents for token in ids]
        for links in (False, True):
            export(store, folder / f"megatron-{links}", to="megatron", links=links)
            pairs = sorted((folder / f"megatron-{links}").rglob("*.bin"))
            found = [ids for path in pairs for ids in documents_of(tm.open(path).split())]
            assert found == documents
        export(store, folder / "ds", to="datatrove")
        ends = np.cumsum([len(ids) for ids in documents]).tolist()
        assert np.fromfile(folder / "ds" / "train.ds.index", "<u8").tolist() == ends
        export(store, folder / "llmc", to="llmc", eos_check=False)
        assert read_llmc(folder / "llmc")[0] == [stream]
        num_rows = len(stream) // seq_len
        if not num_rows:
            return
        rows = np.array(stream[: num_rows * seq_len]).reshape(-1, seq_len).tolist()
        done = export(store, folder / "parquet", to="parquet", seq_len=seq_len)
        assert pq.read_table(folder / "parquet")["input_ids"].to_pylist() == rows
        assert done.splits["train"].num_left_out == len(stream) - num_rows * seq_len
        export(store, folder / "npy", to="npy", seq_len=seq_len)
        arrays = load_npy(folder / "npy")
        assert arrays["input_ids"][arrays["attention_mask"] == 1].tolist() == stream


def test_files_of_others_are_exported_too(tmp_path: Path) -> None:
    np.array([3, 1, 4, 1, 5, 9, 2, 6], np.uint16).tofile(tmp_path / "train.bin")
    export(tmp_path / "train.bin", tmp_path / "out", to="parquet", seq_len=4)
    rows = pq.read_table(tmp_path / "out")["input_ids"].to_pylist()
    assert rows == [[3, 1, 4, 1], [5, 9, 2, 6]]
    with pytest.raises(UsageError, match="--links needs a store of tokenmill"):
        export(tmp_path / "train.bin", tmp_path / "links", to="megatron", links=True)


def test_an_id_that_does_not_fit_is_never_cut(tmp_path: Path) -> None:
    np.array([3, 70_000], np.int64).tofile(tmp_path / "train.bin")
    source = tm.open(tmp_path / "train.bin", dtype="int64")
    with pytest.raises(StoreError, match="id 70000 does not fit into uint16"):
        export(source, tmp_path / "out", to="nanogpt")
    export(source, tmp_path / "out", to="megatron")
    assert tm.open(tmp_path / "out" / "train.bin").dtype == np.int32


def test_a_missing_package_names_its_extra(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for to, package, extra in (("pt", "torch", "torch"), ("arrayrecord", "array_record.python", "arrayrecord")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=rf"--to {to} needs .* pip install 'tokenmill\[{extra}\]'"):
            export(store, tmp_path / "out", to=to, seq_len=8)


def test_a_destination_in_or_around_the_store_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "data" / "store", DOCUMENTS)
    before = sorted(store.rglob("*"))
    (tmp_path / "link").symlink_to(store / "train")
    for dest in (store, store / "out", store / "train", tmp_path / "data", tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(UsageError, match="lie in each other; export to a folder beside it"):
            export(store, dest, to="nanogpt", overwrite=True)
    assert sorted(store.rglob("*")) == before


def test_a_folder_that_is_no_export_is_never_overwritten(store: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("home", "file"):
        with pytest.raises(UsageError, match="exists and was not made by tokenmill export; use another name"):
            export(store, tmp_path / name, to="nanogpt", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_replaced(store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(store, tmp_path / "out", to="nanogpt")
    assert (tmp_path / "out" / "train.bin").exists()


def test_two_exports_to_one_place_do_not_mix(store: Path, tmp_path: Path) -> None:
    with _destination.new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("one")
        with pytest.raises(UsageError, match="another export to .*out is running"):
            export(store, tmp_path / "out", to="nanogpt")
    assert (tmp_path / "out" / "x").read_text() == "one"


def test_every_file_is_synced_before_the_folder_gets_its_name(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(_destination, "sync_directory", synced.append)
    export(store, tmp_path / "out", to="megatron")
    files = {tmp_path / ".out.export.tmp" / path.name for path in (tmp_path / "out").iterdir()}
    assert files | {tmp_path / ".out.export.tmp"} == set(synced[:-1])
    assert synced[-1] == tmp_path


def test_many_files_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_destination, "MOST_SYNCS", 3)
    monkeypatch.setattr(_destination, "sync_directory", lambda path: pytest.fail(f"{path} was synced by itself"))
    for number in range(5):
        (tmp_path / str(number)).write_text("")
    _destination.sync_tree(tmp_path)


def test_a_killed_export_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    store = sparse_store(tmp_path / "store", 20, 10_000_000)
    arguments = ("export", store, tmp_path / "out", "--to", "mds", "--seq-len", "1000")
    process = start(*arguments)
    wait_for(lambda: list(tmp_path.glob(".out.export.tmp/shard.00001.mds")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    shutil.rmtree(store)
    sparse_store(store, 1, 10_000)
    done = tokenmill(*arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        _destination.RECEIPT,
        "index.json",
        "shard.00000.mds",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_the_command_prints_one_line_and_notes_on_stderr(store: Path, tmp_path: Path) -> None:
    done = tokenmill("export", store, tmp_path / "out", "--to", "megatron", "--seq-len", "64")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1 and "20 documents, xxh3 " in done.stdout
    assert done.stdout.endswith("tokens read back and equal to the store's\n")
    assert done.stderr == "note: --to megatron stores whole documents; --seq-len 64 is not used\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--to mds", "--to mds needs --seq-len, the number of tokens per row"),
        (
            "--to mds --seq-len 8 --columns labels",
            "--columns is for --to hf and --to parquet, not for --to mds; leave it",
        ),
        ("--to hf --packing pad", "--packing needs --seq-len; without it, --to hf has one row per document"),
        ("--to hf --seq-len 8 --packing best", "--packing 'best' is unknown; expected concat, best-fit, pad"),
        ("--to hf --seq-len 8 --long-documents drop", "--long-documents has no effect with --packing concat; use"),
        (
            "--to parquet --columns labels,mask",
            "--columns 'mask' is unknown; expected input_ids, labels, completion_mask",
        ),
        ("--to hf --seq-len 1 --packing best-fit --long-documents drop", "has no document that fits a row of 1 tokens"),
        ("--to tfrecord", "--to tfrecord is not a format; expected megatron, llmc, nanogpt"),
        ("--to nanogpt --split test", "has no split 'test'; it has train"),
        ("--to mds --seq-len 100000", "which fill no row of 100,000; use a smaller --seq-len"),
        ("--to hf --seq-len -3", "--seq-len -3 must be a whole number, at least 1"),
    ],
)
def test_mistakes_are_sentences(arguments: str, said: str, store: Path, tmp_path: Path) -> None:
    done = tokenmill_here("export", store, tmp_path / "out", *arguments.split())
    assert done.returncode == 2 and said in sentence(done)
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    done = tokenmill_here("export", tmp_path / "none", tmp_path / "out", "--to", "nanogpt")
    assert "none" in sentence(done)
