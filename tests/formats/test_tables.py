"""Parquet files and Arrow folders of supervised stores: every column by its definition, in every kind of row."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.exports import add_mask, add_weights, documents_of, load_npy
from tests.support.running import tokenize_here
from tests.support.stores import make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import _arrow_tables, _table_blocks, _token_blocks, hf, parquet
from tokenmill.formats._table_blocks import COLUMNS
from tokenmill.formats.export import export

Documents = list[list[int]]
Segment = tuple[int, int, int]
"""The document, the first of its tokens and the one past its last that a row has."""


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def rows_of_documents(documents: Documents) -> list[list[Segment]]:
    return [[(number, 0, len(ids))] for number, ids in enumerate(documents) if ids]


def rows_of_stream(documents: Documents, seq_len: int) -> list[list[Segment]]:
    places = [(number, place) for number, ids in enumerate(documents) for place in range(len(ids))]
    rows = []
    for first in range(0, len(places) // seq_len * seq_len, seq_len):
        row: list[Segment] = []
        for number, place in places[first : first + seq_len]:
            if row and row[-1][0] == number:
                row[-1] = (number, row[-1][1], place + 1)
            else:
                row.append((number, place, place + 1))
        rows.append(row)
    return rows


def rows_of_packing(store: Path, **packing: Any) -> list[list[Segment]]:
    """The segments of the rows that the loader gives, in order."""
    rows = tm.pack(tm.open(store), **packing)
    found, firsts = rows.segments(np.arange(len(rows))), rows.spans(np.arange(len(rows)))
    starts = tm.open(store).split().bounds(found.documents)[0]
    segments = [
        (document, first - start, first - start + length)
        for document, first, start, length in zip(
            found.documents.tolist(), firsts.starts.tolist(), starts.tolist(), found.lengths.tolist(), strict=True
        )
    ]
    edges = [0, *found.ends.tolist()]
    return [segments[a:b] for a, b in itertools.pairwise(edges)]


def expected(rows: list[list[Segment]], documents: Documents, mask: Documents, weights: Any) -> dict[str, Any]:
    """All columns of some rows, token by token."""
    made: dict[str, list[Any]] = {name: [] for name in ("input_ids", *COLUMNS)}
    for row in rows:
        one: dict[str, list[Any]] = {name: [] for name in made}
        for number, start, stop in row:
            one["seq_lengths"].append(stop - start)
            for place in range(start, stop):
                has_loss = place > start and mask[number][place] == 1
                one["input_ids"].append(documents[number][place])
                one["labels"].append(documents[number][place] if has_loss else -100)
                for name in ("completion_mask", "assistant_masks", "loss_mask"):
                    one[name].append(int(has_loss))
                one["loss_weights"].append(weights[number][place] if has_loss else 0.0)
                one["attention_mask"].append(1)
                one["position_ids"].append(place - start)
        for name, values in one.items():
            made[name].append(values)
    return made


def read(folder: Path, to: str) -> dict[str, Any]:
    if to == "parquet":
        return pq.read_table(folder).to_pydict()
    tables = [pa.ipc.open_stream(path).read_all() for path in sorted(folder.glob("data-*.arrow"))]
    return pa.concat_tables(tables).to_pydict()


def divide(values: Any, documents: Documents) -> list[list[Any]]:
    ends = np.cumsum([len(ids) for ids in documents]).tolist()
    return [values[end - len(ids) : end].tolist() for end, ids in zip(ends, documents, strict=True)]


@settings(max_examples=120, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=14).filter(
        lambda some: sum(map(len, some)) > 5
    ),
    num_shards=st.integers(1, 4),
    seq_len=st.integers(1, 6),
    packing=st.sampled_from(["documents", "concat", "best-fit", "pad"]),
    long_documents=st.sampled_from(["split", "truncate"]),
    to=st.sampled_from(["hf", "parquet"]),
    block=st.integers(1, 12),
    has_mask=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_every_column_of_every_kind_of_row(
    documents: Documents,
    num_shards: int,
    seq_len: int,
    packing: str,
    long_documents: str,
    to: str,
    block: int,
    has_mask: bool,
    seed: int,
) -> None:
    rng, count = np.random.default_rng(seed), sum(map(len, documents))
    mask, weights = rng.integers(0, 2, count), rng.integers(1, 9, count) / 4
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_token_blocks, "BLOCK_TOKENS", block)
        patch.setattr(_table_blocks, "BLOCK_TOKENS", block)
        patch.setattr(hf, "BLOCK_TOKENS", 3 * block)
        patch.setattr(hf, "BATCH_ROWS", 3)
        patch.setattr(hf.HfDataset, "file_bytes", 20 * block)
        patch.setattr(parquet, "GROUP_ROWS", 3)
        patch.setattr(parquet, "GROUP_BYTES", 30 * block)
        store = make_store(Path(name) / "store", documents, num_shards=num_shards)
        if has_mask:
            add_weights(add_mask(store, mask), weights)
        flags: dict[str, Any] = {"columns": ",".join(COLUMNS)}
        rows = rows_of_documents(documents)
        if packing == "concat":
            flags |= {"seq_len": seq_len, "packing": packing}
            rows = rows_of_stream(documents, seq_len)
        elif packing != "documents":
            flags |= {"seq_len": seq_len, "packing": packing, "long_documents": long_documents}
            rows = rows_of_packing(store, seq_len=seq_len, method=packing, long_documents=long_documents)
        done = export(store, Path(name) / "out", to=to, **flags)
        ones = [np.ones(count, int), np.ones(count)]
        made = expected(
            rows, documents, *(divide(values, documents) for values in ([mask, weights] if has_mask else ones))
        )
        assert read(Path(name) / "out", to) == made
        split = done.splits["train"]
        assert (split.num_rows, split.num_tokens) == (len(rows), sum(map(len, made["input_ids"])))
        assert split.num_tokens + split.num_left_out == count


DOCUMENTS = [[100 + number, *range(number)] for number in range(20)]
COUNT = sum(map(len, DOCUMENTS))


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make_store(tmp_path_factory.mktemp("supervised"), DOCUMENTS, num_shards=3)
    return add_mask(store, np.arange(COUNT) % 3 == 0)


@pytest.fixture(scope="module")
def weighted(supervised: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make_store(tmp_path_factory.mktemp("weighted"), DOCUMENTS, num_shards=3)
    return add_weights(add_mask(store, np.arange(COUNT) % 3 == 0), np.arange(COUNT) / 8)


@pytest.mark.parametrize("to", ["hf", "parquet"])
@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        ({}, ["labels"]),
        ({"seq_len": 16}, ["labels", "seq_lengths"]),
        ({"seq_len": 16, "packing": "concat"}, ["labels", "seq_lengths"]),
        ({"seq_len": 16, "packing": "pad"}, ["labels"]),
        ({"columns": "input_ids,loss_mask"}, ["loss_mask"]),
        ({"columns": ["labels", "attention_mask"]}, ["labels", "attention_mask"]),
        ({"drop_mask": True}, []),
        ({"drop_mask": True, "seq_len": 16}, []),
        ({"drop_mask": True, "seq_len": 16, "packing": "best-fit"}, ["seq_lengths"]),
    ],
)
def test_a_table_has_the_columns_without_which_something_would_be_lost(
    to: str, flags: dict[str, Any], columns: list[str], supervised: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    done = export(supervised, tmp_path / "out", to=to, note=notes.append, **flags)
    assert list(read(tmp_path / "out", to)) == ["input_ids", *columns]
    assert done.columns == columns
    assert notes == []
    if flags.get("seq_len") and not flags.get("drop_mask"):
        assert done.packing == flags.get("packing", "best-fit")


def test_weights_are_exported_where_there_is_a_place_for_them(weighted: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    export(weighted, tmp_path / "hf", to="hf", note=notes.append)
    assert list(read(tmp_path / "hf", "hf")) == ["input_ids", "labels", "loss_weights"]
    export(weighted, tmp_path / "npy", to="npy", seq_len=8, note=notes.append)
    assert notes == []
    export(weighted, tmp_path / "ds", to="datatrove", note=notes.append)
    export(weighted, tmp_path / "labels", to="hf", columns="labels", note=notes.append)
    assert notes == [
        "--to datatrove has no place for weights of tokens; they are left out",
        "--columns has no loss_weights; the weights of tokens are left out",
    ]
    found = load_npy(tmp_path / "npy")
    weights = np.load(tmp_path / "npy" / "train_loss_weights.npy", mmap_mode="r")
    (batch,) = tm.load(weighted, seq_len=8, batch_size=len(weights), packing="pad", shuffle=False, epochs=1)
    assert weights.dtype == np.float32 and weights.max() > 1
    assert (weights == batch.loss_weights).all()
    assert ((weights > 0) <= (found["loss_mask"] == 1)).all()


def test_bytes_do_not_depend_on_shards(tmp_path: Path) -> None:
    for num_shards in (1, 5):
        store = make_store(tmp_path / f"store{num_shards}", DOCUMENTS, num_shards=num_shards)
        add_mask(store, np.arange(COUNT) % 2)
        for to, flags in (("hf", {}), ("parquet", {}), ("parquet", {"seq_len": 8}), ("hf", {"seq_len": 8})):
            export(store, tmp_path / f"{to}{len(flags)}-{num_shards}", to=to, **flags)
    for name in ("hf0", "hf1", "parquet0", "parquet1"):
        one, five = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{name}-{count}").iterdir()} for count in (1, 5)
        )
        assert one.keys() == five.keys()
        assert [path for path in one if one[path] != five[path] and path != "state.json"] == []


def test_the_hash_of_documents_as_rows_is_that_of_whole_documents(supervised: Path, tmp_path: Path) -> None:
    hashes = {export(supervised, tmp_path / to, to=to).splits["train"].xxh3 for to in ("hf", "parquet", "datatrove")}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["labels", "seq_lengths"])
def test_a_damaged_column_is_never_published(
    name: str, supervised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _arrow_tables.record_batch

    def damage(block: Any, schema: Any) -> Any:
        batch = whole(block, schema)
        place = batch.schema.get_field_index(name)
        column = batch.column(place)
        values = column.flatten().to_numpy().copy()
        values[len(values) // 2] += 1
        changed = pa.ListArray.from_arrays(column.offsets, pa.array(values))
        return batch.set_column(place, batch.schema.field(place), changed)

    monkeypatch.setattr(_arrow_tables, "record_batch", damage)
    with pytest.raises(StoreError, match=rf"reads back as 210 tokens with hash \w+ of column {name}, and"):
        export(supervised, tmp_path / "out", to="hf", seq_len=32)
    assert not (tmp_path / "out").exists()


def test_truncated_documents_are_counted_in_the_line(supervised: Path, tmp_path: Path) -> None:
    done = export(supervised, tmp_path / "out", to="hf", seq_len=16, packing="best-fit", long_documents="truncate")
    kept = sum(min(16, len(ids)) for ids in DOCUMENTS)
    assert done.splits["train"].num_left_out == COUNT - kept
    assert f"rows of 16 (best-fit), {kept} tokens ({COUNT - kept} of long documents left out), xxh3" in done.line("out")


def test_datasets_reads_both(supervised: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for to in ("hf", "parquet"):
        export(supervised, tmp_path / to, to=to, columns=list(COLUMNS))
    loaded = datasets.load_from_disk(str(tmp_path / "hf"))
    other = datasets.load_dataset(str(tmp_path / "parquet"), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.column_names == other.column_names == ["input_ids", *COLUMNS]
    assert loaded["input_ids"][:] == other["input_ids"][:] == documents_of(tm.open(supervised))
    for name in COLUMNS:
        assert loaded[name][:] == other[name][:]
        assert loaded.features[name].feature == other.features[name].feature


def test_conversations_of_a_real_run_become_rows(tmp_path: Path) -> None:
    lines = ['{"prompt": "2 + 2", "response": "4"}', '{"prompt": "one", "response": "two", "weight": 0.5}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    store = tokenize_here(
        tmp_path / "in.jsonl",
        tmp_path / "store",
        tokenizer="bytes",
        prompt_key="prompt",
        response_key="response",
        weight_key="weight",
    )
    export(store.path, tmp_path / "out", to="parquet")
    table = pq.read_table(tmp_path / "out").to_pydict()
    eos = store.manifest.special_tokens.eos_id
    assert table["input_ids"] == [[*b"2 + 2\n4", eos], [*b"one\ntwo", eos]]
    assert table["labels"] == [[-100] * 6 + [ord("4"), eos], [-100] * 4 + [*b"two", eos]]
    assert table["loss_weights"] == [[0] * 6 + [1, 1], [0] * 4 + [0.5] * 4]


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "loss_mask", "loss_weights"])
def test_tokens_without_a_loss_are_not_opened_as_plain_ones(name: str, supervised: Path, tmp_path: Path) -> None:
    export(supervised, tmp_path / "out", to="parquet", columns=name)
    # The first document is one token. Of the second, 101 and 0, the mask has 0 for both.
    with pytest.raises(
        StoreError, match=rf"column '{name}' that leaves tokens of row 1 out of the loss.*; open the store"
    ):
        tm.open(tmp_path / "out")
    export(supervised, tmp_path / "plain", to="parquet", columns=name, drop_mask=True)
    assert documents_of(tm.open(tmp_path / "plain")) == DOCUMENTS


def test_unknown_settings_are_sentences(supervised: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("'seqlen' is no setting of export; there are seq_len, packing")):
        tm.export(supervised, tmp_path / "out", to="hf", seqlen=8)
    with pytest.raises(UsageError, match=re.escape("--columns 3 is not a list of names, such as labels,seq_lengths")):
        tm.export(supervised, tmp_path / "out", to="hf", columns=3)
    with pytest.raises(UsageError, match="drop_mask 1 must be True or False"):
        tm.export(supervised, tmp_path / "out", to="hf", drop_mask=1)
