"""Exports as other programs read them: byte layouts, the readers that are installed here, and mistakes as sentences.

Megatron-core, datatrove, OLMo-core, mosaicml-streaming and litdata read them in `make test-interop`.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
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
from tests.exports import add_mask, documents_of, rows_of, set_special_tokens
from tests.running import sentence, start, tokenize_here, tokenmill, wait_for
from tests.stores import make_documents, make_store, sparse_store
from tokenmill.errors import MissingDependencyError, StoreError, UsageError
from tokenmill.exporters import datatrove, export, hf, litdata, llmc, mds, npy, parquet, publishing, writing

EOS = 7
DOCUMENTS = [[100 + number, *range(number), EOS] for number in range(20)]


@pytest.fixture(params=["uint16", "int32"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """20 documents that end with EOS, in three shards, of each type; one id is large where it may be."""
    documents = [list(ids) for ids in DOCUMENTS]
    documents[3][0] = 65_535 if request.param == "uint16" else 1_000_000
    made = make_store(tmp_path / "store", documents, dtype=request.param, val=DOCUMENTS[:4])
    return set_special_tokens(made, eos_id=EOS)


def is_wide(store: Path) -> bool:
    return tm.open(store).dtype == np.int32


def stream_of(store: Path, split: str = "train") -> list[int]:
    documents = tm.open(store).split(split)
    return documents.read(0, documents.num_tokens).tolist()


# Whole documents


def test_a_merged_megatron_pair_is_one_shard_of_all_documents(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", to="megatron")
    for split in ("train", "val"):
        merged = tm.open(tmp_path / "out" / f"{split}.bin")
        assert documents_of(merged.split()) == documents_of(tm.open(store).split(split))
        data = (tmp_path / "out" / f"{split}.idx").read_bytes()
        assert data[:9] == b"MMIDIDX\x00\x00" and data[17] == (4 if is_wide(store) else 8)
        assert len(data) == 42 + 20 * merged.num_documents


def test_a_single_shard_is_linked_and_not_copied(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", to="megatron")
    (shard,) = (store / "val").glob("*.bin")
    assert (tmp_path / "out" / "val.bin").stat().st_ino == shard.stat().st_ino


def test_nanogpt_reads_bare_uint16(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS, val=DOCUMENTS[:4])
    export(store, tmp_path / "out", to="nanogpt")
    for split in ("train", "val"):
        # As in nanoGPT's get_batch.
        data = np.memmap(tmp_path / "out" / f"{split}.bin", dtype=np.uint16, mode="r")
        assert data.tolist() == stream_of(store, split)


@pytest.mark.parametrize(("to", "files"), [("litdata", "chunks"), ("mds", "shards")])
def test_rows_that_offsets_of_32_bits_cannot_pass_are_refused(tmp_path: Path, to: str, files: str) -> None:
    tokens = tmp_path / "tokens.bin"
    with tokens.open("wb") as file:
        file.truncate(2 * ((1 << 28) + 8))
    with pytest.raises(UsageError, match=f"268,435,457 is too much for --to {to}, whose {files} are below 4 GB"):
        tm.export(tokens, tmp_path / "out", to=to, seq_len=(1 << 28) + 1)
    assert not (tmp_path / "out").exists()


def test_nanogpt_refuses_a_large_vocabulary(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS, dtype="int32")
    with pytest.raises(UsageError, match=r"ids up to 65,535, and .*store has a vocabulary of 1,048,576 tokens; use"):
        export(store, tmp_path / "out", to="nanogpt")
    assert not (tmp_path / "out").exists()


def read_llmc(folder: Path, split: str = "train") -> tuple[list[list[int]], Any]:
    """As llm.c and modded-nanogpt read a shard: header, exact file size, tokens."""
    shards = []
    for path in sorted(folder.glob(f"{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        kind = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}[tuple(header[:2].tolist())]
        tokens = np.fromfile(path, kind, offset=1024)
        assert len(tokens) == header[2] and path.stat().st_size == 1024 + kind.itemsize * header[2]
        assert not header[3:].any()
        shards.append(tokens.tolist())
    return shards, kind


def test_llmc_has_the_end_of_text_token_in_front(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmc, "SHARD_TOKENS", 50)
    export(store, tmp_path / "out", to="llmc")
    shards, kind = read_llmc(tmp_path / "out")
    stream = stream_of(store)
    assert kind == (np.uint32 if is_wide(store) else np.uint16)
    assert [len(shard) for shard in shards] == [50] * (len(stream) // 50) + [len(stream) % 50]
    found = [token for shard in shards for token in shard]
    assert found == [EOS, *stream[:-1]]
    # Every document comes behind an end-of-text token, and none has lost a token.
    expected = [token for ids in documents_of(tm.open(store).split()) for token in (EOS, *ids[:-1])]
    assert found == expected


@pytest.mark.parametrize(("bos_id", "eos_id"), [(100, EOS), (None, None), (None, 8)])
def test_llmc_keeps_documents_that_have_nothing_to_move(bos_id: int | None, eos_id: int | None, tmp_path: Path) -> None:
    store = set_special_tokens(make_store(tmp_path / "store", DOCUMENTS), bos_id=bos_id, eos_id=eos_id)
    notes: list[str] = []
    export(store, tmp_path / "out", to="llmc", note=notes.append)
    shards, _ = read_llmc(tmp_path / "out")
    assert shards == [stream_of(store)]
    assert len(notes) == (bos_id is None)


def test_datatrove_has_ends_and_metadata_in_a_folder_per_split(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", to="datatrove")
    for split in ("train", "val"):
        documents = documents_of(tm.open(store).split(split))
        path = tmp_path / "out" / split / f"{split}.ds"
        assert np.fromfile(path, "<u4" if is_wide(store) else "<u2").tolist() == stream_of(store, split)
        assert np.fromfile(f"{path}.index", "<u8").tolist() == np.cumsum([len(ids) for ids in documents]).tolist()
        size, count = 4 if is_wide(store) else 2, len(stream_of(store, split))
        assert Path(f"{path}.metadata").read_text() == f"numbers|{size}\n{count}\n{datatrove.format_metric(count)}"
        assert not Path(f"{path}.loss").exists()


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0.00 T"), (7, "7.00 T"), (999, "999 T"), (1500, "1.50 kT"), (379_847_414, "380 MT")]
)
def test_counts_are_written_as_humanize_does(count: int, said: str) -> None:
    assert datatrove.format_metric(count) == said


def test_olmo_names_the_source_of_every_document(tiny_store: Path, tmp_path: Path) -> None:
    export(tiny_store, tmp_path / "out", to="olmo")
    opened = tm.open(tiny_store)
    for split in ("train", "val"):
        tokens = np.fromfile(tmp_path / "out" / f"{split}.npy", "<u2")
        with gzip.open(tmp_path / "out" / f"{split}.csv.gz", "rt") as file:
            lines = list(csv.reader(file))
        found = [tokens[int(start) : int(end)].tolist() for start, end, *_ in lines]
        assert found == documents_of(opened.split(split))
        for _, _, number, source, place in lines:
            text = (tiny_store.parent / "unused", source, int(place))
            assert number.startswith(source[0]) and source in ("a.jsonl", "b.jsonl"), text


def test_olmo_leaves_out_the_lines_of_empty_documents(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [[1, 2], [], [3], []])
    export(store, tmp_path / "out", to="olmo")
    lines = gzip.decompress((tmp_path / "out" / "train.csv.gz").read_bytes()).decode().splitlines()
    assert lines == ["0,2,0,in.jsonl,0", "2,3,2,in.jsonl,0"]


def test_olmo_survives_ids_that_look_like_tables(tmp_path: Path) -> None:
    ids = ["plain", 'a "b", c', "two\nlines", None]
    lines = [json.dumps({"text": "x", "id": one}) for one in ids]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    store = tokenize_here(tmp_path / "in.jsonl", tmp_path / "store", tokenizer="bytes", keep_keys=["id"])
    export(store.path, tmp_path / "out", to="olmo")
    text = gzip.decompress((tmp_path / "out" / "train.csv.gz").read_bytes()).decode()
    assert [line[2] for line in csv.reader(text.splitlines())] == ["plain", 'a "b", c', "two lines", ""]
    assert [line.split(",")[:2] for line in text.splitlines()] == [[str(2 * n), str(2 * n + 2)] for n in range(4)]


# Rows


def test_parquet_is_read_by_pyarrow_and_datasets(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(parquet, "GROUP_ROWS", 3)
    done = export(store, tmp_path / "out", to="parquet", seq_len=8)
    rows = rows_of(tm.open(store).split(), 8)
    paths = sorted((tmp_path / "out").glob("train-*.parquet"))
    assert [path.name for path in paths] == [f"train-{n:05d}-of-{len(paths):05d}.parquet" for n in range(len(paths))]
    assert len(paths) == -(-len(rows) // 12) > 1
    assert [row for path in paths for row in pq.read_table(path)["input_ids"].to_pylist()] == rows
    schema = pq.read_schema(paths[0])
    assert str(schema.field("input_ids").type).startswith("list<") and "int32" in str(schema)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"]["input_ids"][:] == rows
    assert sum(split.num_rows for split in loaded.values()) == sum(split.num_rows for split in done.splits.values())


def test_parquet_row_groups_have_25_000_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [list(range(60_001))])
    export(store, tmp_path / "out", to="parquet", seq_len=1)
    data = pq.ParquetFile(tmp_path / "out" / "train-00000-of-00001.parquet").metadata
    assert [data.row_group(number).num_rows for number in range(data.num_row_groups)] == [25_000, 25_000, 10_001]


def test_hf_folders_are_opened_by_load_from_disk(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hf, "FILE_BYTES", 8 * 4 * 10)
    monkeypatch.setattr(hf, "BATCH_ROWS", 4)
    export(store, tmp_path / "both", to="hf", seq_len=8)
    loaded = datasets.load_from_disk(str(tmp_path / "both"))
    assert list(loaded) == ["train", "val"]
    for split in loaded:
        assert loaded[split]["input_ids"][:] == rows_of(tm.open(store).split(split), 8)
    assert loaded["train"].features["input_ids"].feature == datasets.Value("int32")
    assert len(list((tmp_path / "both" / "train").glob("data-*.arrow"))) > 1
    export(store, tmp_path / "one", to="hf", seq_len=8, split="val")
    assert isinstance(datasets.load_from_disk(str(tmp_path / "one")), datasets.Dataset)


def test_pt_files_are_loaded_without_pickle(store: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    export(store, tmp_path / "out", to="pt", seq_len=9, split="train")
    rows = rows_of(tm.open(store).split(), 9)
    paths = sorted((tmp_path / "out").glob("chunk_*.pt"))
    assert [path.name for path in paths] == [f"chunk_{number:06d}.pt" for number in range(len(rows))]
    for path, row in zip(paths, rows, strict=True):
        for mmap in (True, False):
            tensor = torch.load(path, weights_only=True, mmap=mmap)
            assert tensor.dtype == torch.int64 and tensor.tolist() == row
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["num_chunks"] == len(rows) and metadata["seq_len"] == 9


def test_pt_falls_back_to_torch_where_its_files_look_different(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tokenmill.exporters import pt

    monkeypatch.setattr(pt, "_find_all", lambda data, part: [])
    export(store, tmp_path / "out", to="pt", seq_len=9, split="train")
    assert torch.load(tmp_path / "out" / "chunk_000001.pt").tolist() == rows_of(tm.open(store).split(), 9)[1]


def load_npy(folder: Path, split: str = "train") -> dict[str, Any]:
    names = ("input_ids", "target_ids", "attention_mask", "loss_mask")
    return {name: np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in names}


def test_npy_rows_are_those_of_the_padded_loader(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "BLOCK_TOKENS", 64)
    export(store, tmp_path / "out", to="npy", seq_len=12)
    found = load_npy(tmp_path / "out")
    num_rows = len(found["input_ids"])
    assert all(array.shape == (num_rows, 12) for array in found.values())
    loader = tm.load(store, seq_len=12, batch_size=num_rows, packing="pad", shuffle=False, epochs=1)
    (batch,) = loader
    assert np.array_equal(found["input_ids"], batch.inputs)
    assert np.array_equal(found["target_ids"], batch.targets)
    assert np.array_equal(found["attention_mask"], batch.segment_ids > 0)
    assert np.array_equal(found["loss_mask"], batch.loss_mask)


def test_mds_shards_have_the_published_layout(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds, "SHARD_BYTES", 600)
    export(store, tmp_path / "out", to="mds", seq_len=8, split="train")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    rows: list[list[int]] = []
    for shard in index["shards"]:
        data = (tmp_path / "out" / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"] <= 600
        offsets = np.frombuffer(data, "<u4", shard["samples"] + 1, 4)
        assert np.frombuffer(data, "<u4", 1)[0] == shard["samples"] and offsets[-1] == len(data)
        rows += [np.frombuffer(data[a:b], "<i4").tolist() for a, b in itertools.pairwise(offsets)]
    assert index["version"] == 2 and len(index["shards"]) > 1
    assert shard["column_encodings"] == ["ndarray:int32:8"] and shard["column_sizes"] == [32]
    assert rows == rows_of(tm.open(store).split(), 8)


def test_litdata_chunks_have_the_published_layout(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litdata, "CHUNK_BYTES", 300)
    export(store, tmp_path / "out", to="litdata", seq_len=8, split="train")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    rows: list[list[int]] = []
    for number, chunk in enumerate(index["chunks"]):
        assert chunk["filename"] == f"chunk-0-{number}.bin" and chunk["dim"] == 8 * chunk["chunk_size"]
        data = (tmp_path / "out" / chunk["filename"]).read_bytes()
        offsets = np.frombuffer(data, "<u4", chunk["chunk_size"] + 1, 4)
        assert offsets[0] == 4 * (chunk["chunk_size"] + 2) and offsets[-1] == len(data) == chunk["chunk_bytes"]
        rows += np.frombuffer(data, "<i4", offset=int(offsets[0])).reshape(-1, 8).tolist()
    assert len(index["chunks"]) > 1 and index["config"]["data_format"] == ["no_header_tensor:15"]
    assert rows == rows_of(tm.open(store).split(), 8)


def test_arrayrecord_is_a_data_source_of_grain(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grain = pytest.importorskip("grain")
    from tokenmill.exporters import arrayrecord

    monkeypatch.setattr(arrayrecord, "FILE_BYTES", 8 * 4 * 10)
    export(store, tmp_path / "out", to="arrayrecord", seq_len=8)
    paths = sorted(str(path) for path in (tmp_path / "out").glob("train-*.array_record"))
    source = grain.sources.ArrayRecordDataSource(paths)
    rows = rows_of(tm.open(store).split(), 8)
    assert len(paths) > 1 and len(source) == len(rows)
    assert [np.frombuffer(source[number], "<i4").tolist() for number in range(len(source))] == rows


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS)
    for to, package, extra in (("pt", "torch", "torch"), ("arrayrecord", "array_record.python", "arrayrecord")):
        monkeypatch.delitem(sys.modules, f"tokenmill.exporters.{to}", raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=rf"--to {to} needs .* pip install 'tokenmill\[{extra}\]'"):
            export(store, tmp_path / "out", to=to, seq_len=8)


# Supervised data


@pytest.fixture
def supervised(tmp_path: Path) -> tuple[Path, Any]:
    store = make_store(tmp_path / "supervised", DOCUMENTS)
    mask = np.random.default_rng(1).integers(0, 2, sum(map(len, DOCUMENTS)), np.uint8)
    return add_mask(store, mask), mask


def test_datatrove_and_olmo_carry_the_mask(supervised: tuple[Path, Any], tmp_path: Path) -> None:
    store, mask = supervised
    notes: list[str] = []
    export(store, tmp_path / "ds", to="datatrove", note=notes.append)
    export(store, tmp_path / "olmo", to="olmo", note=notes.append)
    assert (tmp_path / "ds" / "train.ds.loss").read_bytes() == mask.tobytes()
    assert (tmp_path / "olmo" / "train_labels_mask.npy").read_bytes() == mask.tobytes()
    export(store, tmp_path / "links", to="datatrove", links=True)
    losses = sorted((tmp_path / "links").glob("*.ds.loss"))
    assert len(losses) == 3 and b"".join(path.read_bytes() for path in losses) == mask.tobytes()
    assert notes == []


def test_npy_trains_on_targets_that_the_mask_names(supervised: tuple[Path, Any], tmp_path: Path) -> None:
    store, mask = supervised
    export(store, tmp_path / "out", to="npy", seq_len=32)
    found = load_npy(tmp_path / "out")
    starts = np.cumsum([0, *map(len, DOCUMENTS)])
    for row, ids in enumerate(DOCUMENTS):
        trained = mask[starts[row] : starts[row + 1]]
        loss = [*trained[1:].tolist(), 0]
        targets = [token if counts else -100 for token, counts in zip([*ids[1:], 0], loss, strict=True)]
        padding = 32 - len(ids)
        assert found["input_ids"][row].tolist() == ids + [0] * padding
        assert found["target_ids"][row].tolist() == targets + [-100] * padding
        assert found["loss_mask"][row].tolist() == loss + [0] * padding
        assert found["attention_mask"][row].tolist() == [1] * len(ids) + [0] * padding


@pytest.mark.parametrize("to", ["megatron", "nanogpt", "llmc", "parquet", "hf", "pt", "mds", "litdata", "arrayrecord"])
def test_other_formats_say_that_the_mask_is_left_out(to: str, supervised: tuple[Path, Any], tmp_path: Path) -> None:
    notes: list[str] = []
    export(supervised[0], tmp_path / "out", to=to, seq_len=4, note=notes.append)
    assert f"--to {to} has no place for a loss mask; it is left out, and every token counts as trained" in notes


# Any documents


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
        patch.setattr(writing, "BLOCK_TOKENS", block)
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
        export(store, folder / "llmc", to="llmc")
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
    with pytest.raises(StoreError, match="there is an id 70000, which does not fit uint16"):
        export(source, tmp_path / "out", to="nanogpt")
    export(source, tmp_path / "out", to="megatron")
    assert tm.open(tmp_path / "out" / "train.bin").dtype == np.int32


# Where it is written


def test_a_destination_in_or_around_the_store_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "data" / "store", DOCUMENTS)
    before = sorted(store.rglob("*"))
    (tmp_path / "link").symlink_to(store / "train")
    for dest in (store, store / "out", store / "train", tmp_path / "data", tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(UsageError, match="lie in each other; export to a folder beside it"):
            export(store, dest, to="nanogpt", overwrite=True)
    assert sorted(store.rglob("*")) == before


def test_a_folder_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("home", "file"):
        with pytest.raises(UsageError, match="exists and was not made by tokenmill export; use another name"):
            export(store, tmp_path / name, to="nanogpt", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS)
    (tmp_path / "out").mkdir()
    export(store, tmp_path / "out", to="nanogpt")
    assert (tmp_path / "out" / "train.bin").exists()


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", DOCUMENTS)
    with publishing.new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("one")
        with pytest.raises(UsageError, match="another export to .*out is running"):
            export(store, tmp_path / "out", to="nanogpt")
    assert (tmp_path / "out" / "x").read_text() == "one"


def test_many_files_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MOST_SYNCS", 3)
    monkeypatch.setattr(publishing, "sync_directory", lambda path: pytest.fail(f"{path} was synced by itself"))
    for number in range(5):
        (tmp_path / str(number)).write_text("")
    publishing.sync_tree(tmp_path)


def test_a_killed_export_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    store = sparse_store(tmp_path / "store", 20, 10_000_000)
    arguments = ("export", store, tmp_path / "out", "--to", "mds", "--seq-len", "1000")
    process = start(*arguments)
    wait_for(lambda: list(tmp_path.glob(".out.export.tmp/shard.00001.mds")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    shutil.rmtree(store)
    sparse_store(store, 1, 10_000)
    done = tokenmill(*arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        publishing.RECEIPT,
        "index.json",
        "shard.00000.mds",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


# The command line


def test_the_command_prints_one_line_and_notes_on_stderr(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_documents(50))
    done = tokenmill("export", store, tmp_path / "out", "--to", "megatron", "--seq-len", "64")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1 and "50 documents, xxh3 " in done.stdout
    assert done.stdout.endswith("tokens read back and equal to the store's\n")
    assert done.stderr == "note: --to megatron stores whole documents; --seq-len 64 is not used\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--to parquet", "--to parquet needs --seq-len, the number of tokens per row"),
        ("--to tfrecord", "--to tfrecord is not a format; expected megatron, nanogpt, llmc"),
        ("--to nanogpt --split test", "has no split 'test'; it has train"),
        ("--to mds --seq-len 100000", "which fill no row of 100,000; use a smaller --seq-len"),
        ("--to hf --seq-len -3", "--seq-len -3 must be a whole number, at least 1"),
    ],
)
def test_mistakes_are_sentences(arguments: str, said: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_documents(50))
    done = tokenmill("export", store, tmp_path / "out", *arguments.split())
    assert done.returncode == 2 and said in sentence(done)
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    done = tokenmill("export", tmp_path / "none", tmp_path / "out", "--to", "nanogpt")
    assert "none" in sentence(done)
