"""Rows of preference pairs, compared with plain Python: cuts, pairs that are left out, batches, resuming, ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import Pair, make_pair_store, make_store
from tokenmill.errors import UsageError

IDS = st.integers(1, 3)
ANSWERS = st.lists(IDS, min_size=1, max_size=8)
PAIRS = st.lists(
    st.tuples(st.lists(IDS, max_size=8), ANSWERS, ANSWERS).filter(lambda pair: pair[1] != pair[2]),
    min_size=1,
    max_size=12,
)
MODES = ("keep_start", "keep_end")


def cut(ids: list[Any], most: int, mode: str) -> list[Any]:
    return ids[:most] if mode == "keep_start" else ids[-most:]


def expected_rows(pairs: list[Pair], most: int, mode: str) -> list[int]:
    """The pairs that still differ once both of their texts are cut."""
    return [number for number, (p, a, b) in enumerate(pairs) if cut(p + a, most, mode) != cut(p + b, most, mode)]


def read_rows(rows: tm.Rows, **given: Any) -> dict[int, dict[str, Any]]:
    """Every row of an epoch by the number of its pair."""
    found = {}
    for batch in tm.Loader(rows, batch_size=1, epochs=1, **given):
        found[int(batch["fields"]["number"][0])] = {name: value[0] for name, value in batch.items() if name != "fields"}
    return found


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.integers(1, 12), st.sampled_from(MODES), st.integers(1, 3))
def test_rows_are_the_pairs_that_differ_once_cut(pairs: list[Pair], most: int, mode: str, num_shards: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = tm.open(make_pair_store(Path(folder), pairs, num_shards=num_shards))
        kept = expected_rows(pairs, most, mode)
        if not kept:
            with pytest.raises(UsageError, match="no pair of"):
                tm.pairs(store, max_length=most, long_documents=mode)
            return
        rows = tm.pairs(store, max_length=most, long_documents=mode)
        assert len(rows) == len(kept) and sum(rows.report.left_out.values()) == len(pairs) - len(kept)
        found = read_rows(tm.shuffle(rows, seed=3))
        assert sorted(found) == kept
        for number, row in found.items():
            prompt, *answers = pairs[number]
            left = 0
            for side, answer in zip(("chosen", "rejected"), answers, strict=True):
                ids = cut(prompt + answer, most, mode)
                labels = cut([-100] * len(prompt) + answer, most, mode)
                blank = most - len(ids)
                assert row[f"input_ids_{side}"].tolist() == ids + [0] * blank
                assert row[f"labels_{side}"].tolist() == labels + [-100] * blank
                assert row[f"attention_mask_{side}"].tolist() == [1] * len(ids) + [0] * blank
                assert row[f"{side}_ids"] == [label for label in labels if label != -100]
                left = max(left, labels.count(-100))
            assert row["prompt_ids"] == (cut(prompt, left, mode) if left else [])


@settings(deadline=None, max_examples=30)
@given(PAIRS, st.integers(1, 3), st.integers(1, 4), st.data())
def test_any_number_of_ranks_resumes_the_same_batches(
    pairs: list[Pair], batch_size: int, world_size: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = tm.shuffle(tm.pairs(tm.open(make_pair_store(Path(folder), pairs))), seed=1)
        whole = tm.Loader(rows, batch_size=batch_size * world_size, epochs=2)
        batches = list(whole)
        step = data.draw(st.integers(0, len(batches) - 1))
        first = tm.Loader(rows, batch_size=batch_size * world_size, epochs=2)
        for _ in zip(range(step), first, strict=False):
            pass
        ranks = [
            tm.Loader(rows, batch_size=batch_size, rank=r, world_size=world_size, epochs=2) for r in range(world_size)
        ]
        for loader in ranks:
            loader.load_state_dict(first.state_dict())
        for expected, *parts in zip(batches[step:], *ranks, strict=True):
            for name, value in expected.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))
                elif isinstance(value, list):
                    assert value == [one for part in parts for one in part[name]]


def test_dropping_counts_pairs_with_a_long_answer(tmp_path: Path) -> None:
    pairs: list[Pair] = [([1], [2], [3]), ([1], [2] * 9, [3]), ([1], [2], [3] * 9), ([1] * 3, [4], [5])]
    rows = tm.pairs(tm.open(make_pair_store(tmp_path, pairs)), max_length=4, long_documents="drop")
    assert len(rows) == 2 and rows.report.left_out == {"an answer is longer than 4 tokens": 2}
    assert sorted(read_rows(rows)) == [0, 3]
    assert "2 pairs left out: an answer is longer than 4 tokens" in str(rows)


def test_reasons_tell_a_prompt_that_fills_the_length_from_equal_answers(tmp_path: Path) -> None:
    pairs: list[Pair] = [([1] * 9, [2], [3]), ([1], [2, 2, 2, 2, 2], [2, 2, 2, 2, 3]), ([1], [2], [3])]
    rows = tm.pairs(tm.open(make_pair_store(tmp_path, pairs)), max_length=4)
    assert rows.report.left_out == {"the prompt fills the length": 1, "equal once cut": 1}


def test_a_document_is_traced_to_the_row_of_its_pair(tmp_path: Path) -> None:
    pairs: list[Pair] = [([1] * 9, [2], [3]), ([1], [2], [3]), ([1] * 9, [2], [3]), ([4], [5], [6])]
    rows = tm.pairs(tm.open(make_pair_store(tmp_path, pairs)), max_length=4)
    assert [rows.rows_of(document) for document in range(8)] == [[], [], [0], [0], [], [], [1], [1]]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_batches_of_frameworks_equal_those_of_numpy(tmp_path: Path, framework: str) -> None:
    pairs: list[Pair] = [([1, 2], [number + 3], [number + 4, 9]) for number in range(10)]
    store = make_pair_store(tmp_path, pairs)
    settings: Any = {"seq_len": 6, "batch_size": 4, "packing": "pairs", "epochs": 1}
    ours, theirs = tm.load(store, **settings), tm.load(store, framework=framework, **settings)
    for batch, other in zip(ours, theirs, strict=True):
        assert list(batch) == list(other)
        for name, value in batch.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, np.asarray(other[name]))
            else:
                assert value == other[name]


def test_torch_workers_make_the_same_batches(tmp_path: Path) -> None:
    pairs: list[Pair] = [([1, 2], [number + 3], [number + 4, 9]) for number in range(10)]
    settings: Any = {"seq_len": 6, "batch_size": 3, "packing": "pairs", "epochs": 1, "framework": "torch"}
    store = make_pair_store(tmp_path, pairs)
    for batch, other in zip(tm.load(store, **settings), tm.load(store, num_workers=2, **settings), strict=True):
        assert batch["prompt_ids"] == other["prompt_ids"] and batch["fields"] == other["fields"]
        assert (batch["labels_rejected"] == other["labels_rejected"]).all()


def test_slices_and_mixtures_of_pairs_keep_pairs_whole(tmp_path: Path) -> None:
    pairs: list[Pair] = [([1], [number + 2], [number + 3]) for number in range(6)]
    store = tm.open(make_pair_store(tmp_path, pairs))
    assert sorted(read_rows(tm.pairs(tm.slice(store, 2, 8)))) == [1, 2, 3]
    assert sorted(read_rows(tm.pairs(tm.deny(store, [4, 5])))) == [0, 1, 3, 4, 5]
    assert sorted(read_rows(tm.mix([(tm.pairs(store, max_length=9), 1.0)]))) == list(range(6))
    with pytest.raises(UsageError, match="take or leave out both of a pair"):
        tm.deny(store, [4])


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    pairs = tm.open(make_pair_store(tmp_path / "pairs", [([1], [2], [3])]))
    plain = tm.open(make_store(tmp_path / "plain", [[1, 2, 3], [4, 5, 6]]))
    rows = tm.pairs(pairs, max_length=2)
    refused: list[tuple[Any, str]] = [
        (lambda: tm.pack(pairs, seq_len=2), "use packing='pairs', or tm.pairs in place of tm.pack"),
        (lambda: tm.load(pairs, 2, 1), "would learn the rejected answers too"),
        (lambda: tm.export(pairs, tmp_path / "out", to="npy", seq_len=2), "holds pairs, and an export would"),
        (lambda: tm.pairs(plain), "holds ordinary documents, not pairs"),
        (lambda: tm.prompts(pairs), "holds pairs, not prompts"),
        (lambda: tm.open([pairs.path, plain.path]), "have a loss mask|hold different things"),
        (lambda: tm.mix([(rows, 1.0), (tm.pack(plain, seq_len=4), 1.0)]), "pairs, prompts and packed documents"),
        (lambda: tm.Loader(rows, batch_size=1, layout="hf"), "these rows are pairs"),
        (lambda: tm.pairs(pairs, long_documents="split"), "expected keep_start, keep_end, drop"),  # type: ignore[arg-type]
    ]
    for call, message in refused:
        with pytest.raises(UsageError, match=message):
            call()
