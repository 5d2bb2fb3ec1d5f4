"""The bytes of exports, as the other projects describe them and as their readers read them, if installed here.

Megatron-core, datatrove, OLMo-core, mosaicml-streaming and litdata read them in `make test-interop`.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.support.exports import add_mask, documents_of, load_npy, read_llmc, rows_of, set_special_tokens
from tests.support.running import tokenize_here
from tests.support.stores import make_store
from tokenmill.errors import UsageError
from tokenmill.formats import datatrove, hf, litdata, llmc, mds, npy, parquet
from tokenmill.formats.export import export

EOS = 99

DOCUMENTS = [[100 + number, *range(number), EOS] for number in range(20)]


@pytest.fixture(scope="module", params=["uint16", "int32"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 documents that end with EOS, in three shards; one id is the largest of its type, or a large one."""
    documents = [list(ids) for ids in DOCUMENTS]
    documents[3][0] = 65_535 if request.param == "uint16" else 1_000_000
    made = make_store(tmp_path_factory.mktemp("store"), documents, dtype=request.param, val=DOCUMENTS[:4])
    return set_special_tokens(made, eos_id=EOS)


def is_wide(store: Path) -> bool:
    return tm.open(store).dtype == np.int32


def stream_of(store: Path, split: str = "train") -> list[int]:
    documents = tm.open(store).split(split)
    return documents.read(0, documents.num_tokens).tolist()


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
def test_rows_too_long_for_offsets_of_32_bits_are_refused(tmp_path: Path, to: str, files: str) -> None:
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


def test_llmc_has_the_end_of_text_token_in_front(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmc, "SHARD_TOKENS", 50)
    export(store, tmp_path / "out", to="llmc")
    shards, kind = read_llmc(tmp_path / "out")
    stream = stream_of(store)
    assert kind == (np.uint32 if is_wide(store) else np.uint16)
    assert [len(shard) for shard in shards] == [50] * (len(stream) // 50) + [len(stream) % 50]
    found = [token for shard in shards for token in shard]
    assert found == [EOS, *stream[:-1]]
    # Every document follows an end-of-text token, and none has lost a token.
    expected = [token for ids in documents_of(tm.open(store).split()) for token in (EOS, *ids[:-1])]
    assert found == expected


@pytest.mark.parametrize(("bos_id", "eos_id"), [(100, EOS), (None, None), (None, 8)])
def test_llmc_keeps_documents_that_have_nothing_to_move(bos_id: int | None, eos_id: int | None, tmp_path: Path) -> None:
    store = set_special_tokens(make_store(tmp_path / "store", DOCUMENTS), bos_id=bos_id, eos_id=eos_id)
    notes: list[str] = []
    export(store, tmp_path / "out", to="llmc", note=notes.append, eos_check=False)
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
            assert number.startswith(source[0]) and source in ("a.jsonl", "b.jsonl") and place.isdigit()


def test_olmo_leaves_out_the_lines_of_empty_documents(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [[1, 2], [], [3], []])
    export(store, tmp_path / "out", to="olmo", eos_check=False)
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
    monkeypatch.setattr(hf.HfDataset, "file_bytes", 8 * 4 * 10)
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
    from tokenmill.formats import pt

    never = property(lambda template: False, lambda template, value: None)
    monkeypatch.setattr(pt._Template, "is_good", never, raising=False)
    export(store, tmp_path / "out", to="pt", seq_len=9, split="train")
    assert torch.load(tmp_path / "out" / "chunk_000001.pt").tolist() == rows_of(tm.open(store).split(), 9)[1]


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
    monkeypatch.setattr(mds.MosaicShards, "file_bytes", 600)
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
    monkeypatch.setattr(litdata.LitChunks, "file_bytes", 300)
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
    from tokenmill.formats import arrayrecord

    monkeypatch.setattr(arrayrecord.ArrayRecords, "file_bytes", 8 * 4 * 10)
    export(store, tmp_path / "out", to="arrayrecord", seq_len=8)
    paths = sorted(str(path) for path in (tmp_path / "out").glob("train-*.array_record"))
    source = grain.sources.ArrayRecordDataSource(paths)
    rows = rows_of(tm.open(store).split(), 8)
    assert len(paths) > 1 and len(source) == len(rows)
    assert [np.frombuffer(source[number], "<i4").tolist() for number in range(len(source))] == rows


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    store = set_special_tokens(make_store(tmp_path_factory.mktemp("supervised"), DOCUMENTS), eos_id=EOS)
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
    # Masks of files without a manifest are copied, too.
    for to, name in (("datatrove", "train.ds.loss"), ("olmo", "train_labels_mask.npy")):
        export(tmp_path / "ds" / "train.ds", tmp_path / f"{to} again", to=to, note=notes.append)
        assert (tmp_path / f"{to} again" / name).read_bytes() == mask.tobytes()
    does_not_say = f"OLMo-core finds documents by the end-of-text token, and {tmp_path}/ds/train.ds does not say"
    assert notes == [f"{does_not_say} which one that is, so it is not checked"]


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
