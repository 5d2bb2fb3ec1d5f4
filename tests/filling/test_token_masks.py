"""Masks that follow from the tokens: rows with repetitions, and the goldfish mask, against plain Python and torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.errors import UsageError
from tokenmill.filling import kernels
from tokenmill.filling.fill import IGNORED

dtypes = st.sampled_from([np.int64, np.int32])


def times(row: list[int], period: int) -> int:
    """How often some group of `period` tokens comes in immediate succession."""
    most = 0
    for start in range(len(row)):
        end = start + period
        while end < len(row) and row[end] == row[end - period]:
            end += 1
        most = max(most, (min(end, len(row)) - start) // period)
    return most


@pytest.mark.parametrize("in_c", [True, False])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_filter_finds_rows_that_repeat(in_c: bool, data: Any) -> None:
    count, low, more = (data.draw(st.integers(*some)) for some in ((3, 6), (1, 4), (0, 4)))
    rule = tm.RepetitionFilter(max_period=low + more, min_period=low, max_count=count)
    rows, lengths = [], []
    for _ in range(3):
        block = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        tail = block[: data.draw(st.integers(0, len(block)))]
        around = st.lists(st.integers(0, 3), max_size=10)
        row = [*data.draw(around), *block * data.draw(st.integers(1, count + 1)), *tail, *data.draw(around)][:60]
        lengths.append(data.draw(st.integers(len(row) // 2, len(row))))
        rows.append([*row, *[0] * (60 - len(row))])
    inputs = np.array(rows, data.draw(dtypes))
    targets = np.ones_like(inputs)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(kernels, "compiled", None)
        found = rule.apply(inputs, targets, np.array(lengths), IGNORED)
    expected = [
        any(times(row[:length], period) >= count for period in range(low, low + more + 1))
        for row, length in zip(rows, lengths, strict=True)
    ]
    assert found.tolist() == expected
    assert np.array_equal(targets, np.where(np.array(expected)[:, None], IGNORED, np.ones_like(targets)))


def reference(targets: Any, k: int, context: int) -> Any:
    """The strategy `hash-table` of the paper, in torch, by its definition."""
    torch = pytest.importorskip("torch")
    size, generator = 1_000_003, torch.Generator().manual_seed(2971215073)
    table = torch.rand(size, generator=generator)
    ids = torch.tensor(targets)
    drop = table[ids.unfold(1, context, 1).prod(dim=-1) % size] < 1 / k
    ids[:, context - 1 :][drop] = IGNORED
    return ids.numpy()


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("vocab_size", [7, 50_257, 1 << 31])
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 200), st.integers(1, 14), st.integers(1, 700), st.integers(0, 99), dtypes)
def test_the_goldfish_mask_is_that_of_the_paper(
    in_c: bool, vocab_size: int, k: int, context: int, seq_len: int, seed: int, dtype: Any
) -> None:
    stream = np.random.default_rng(seed).integers(0, vocab_size, (3, seq_len + 1))
    targets = stream[:, 1:].astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(kernels, "compiled", None)
        count = tm.Goldfish(k, context).apply(stream[:, :-1].astype(dtype), targets, np.full(3, seq_len), IGNORED)
    expected = reference(stream[:, 1:].copy(), k, context) if seq_len >= context else stream[:, 1:]
    assert np.array_equal(targets, expected)
    assert count.tolist() == (targets == IGNORED).sum(axis=1).tolist()


def repeating_store(folder: Path) -> Any:
    documents = make_documents(300, longest=40)
    for number in range(0, 300, 7):
        documents[number] = [5, 6] * 12
    return tm.open(make_store(folder, documents))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["concat", "best-fit", "pad"]), st.booleans(), st.integers(1, 3), st.integers(1, 5), st.booleans()
)
def test_batches_have_these_masks_on_any_rank(
    method: Any, document_mask: bool, world_size: int, batch_size: int, is_mixed: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        packed = tm.pack(repeating_store(Path(folder)), seq_len=50, method=method)
        rows = tm.mix([(packed, 1), (tm.shuffle(packed), 2)]) if is_mixed else tm.shuffle(packed)
        masks = [tm.RepetitionFilter(max_count=8), tm.Goldfish(k=3)]
        plain: dict[str, Any] = {"document_mask": document_mask, "epochs": 1.5}
        world = {"batch_size": batch_size, "rank": world_size - 1, "world_size": world_size}
        total = 0
        for a, b in zip(
            tm.Loader(rows, **world, **plain), tm.Loader(rows, **world, **plain, token_masks=masks), strict=True
        ):
            assert np.array_equal(a.inputs, b.inputs)
            lengths = np.asarray(a.attention_mask.sum(axis=1))
            expected = a.targets.copy()
            num_rows = masks[0].apply(a.inputs, expected, lengths, IGNORED).sum()
            num_targets = masks[1].apply(a.inputs, expected, lengths, IGNORED).sum()
            assert np.array_equal(b.targets, expected)
            assert np.array_equal(b.loss_mask, expected != IGNORED)
            assert b.num_masked == {"repetition_rows": num_rows, "goldfish_targets": num_targets}
            total += num_rows
        assert total
        assert a.num_masked == {}


def test_frameworks_get_the_same_masks(tmp_path: Path) -> None:
    store = repeating_store(tmp_path)
    settings: dict[str, Any] = {"batch_size": 4, "token_masks": [tm.Goldfish(), tm.RepetitionFilter(max_count=6)]}
    expected = [y for _, (_, y) in zip(range(9), tm.load(store, seq_len=32, **settings), strict=False)]
    assert any((y == IGNORED).all(axis=1).any() for y in expected)
    for framework, package in (("torch", "torch"), ("jax", "jax")):
        pytest.importorskip(package)
        for y, (_, theirs) in zip(expected, tm.load(store, seq_len=32, framework=framework, **settings), strict=False):
            assert np.array_equal(y, theirs)


def test_worker_processes_mask_and_count_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = repeating_store(tmp_path)
    masks = [tm.Goldfish(), tm.RepetitionFilter(max_count=6)]
    rows = tm.mix([(tm.shuffle(tm.pack(store, seq_len=32)), 1), (tm.pack(store, seq_len=32, method="best-fit"), 1)])
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 1, "token_masks": masks, "ignore_index": -7}
    here = tm.load(rows, **settings)
    there = tm.load(rows, framework="torch", num_workers=1, **settings)
    for ours, theirs in zip(here, there, strict=True):
        assert np.array_equal(ours.targets, theirs.targets)
        assert ours.num_masked == theirs.num_masked
        for name in ("loss_mask", "sources", "token_sources", "ignore_index"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_padding_is_no_repetition(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(50, longest=20))), seq_len=200, method="pad")
    for batch in tm.Loader(rows, batch_size=7, epochs=1, token_masks=[tm.RepetitionFilter()]):
        assert batch.num_masked == {"repetition_rows": 0}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tm.Goldfish(k=1), "k 1"),
        (lambda: tm.Goldfish(context=0), "context 0"),
        (lambda: tm.RepetitionFilter(max_period=0), "max_period 0"),
        (lambda: tm.RepetitionFilter(min_period=3, max_period=2), "max_period 2"),
        (lambda: tm.RepetitionFilter(max_count=2), "max_count 2"),
    ],
)
def test_masks_that_make_no_sense_are_refused(make: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


@pytest.mark.parametrize("masks", [["goldfish"], "goldfish", [3], [tm.Goldfish(), tm.Goldfish(k=3)]])
def test_other_masks_are_refused(tmp_path: Path, masks: Any) -> None:
    with pytest.raises(UsageError, match="token_masks"):
        tm.load(tm.open(make_store(tmp_path, make_documents(30))), seq_len=8, batch_size=2, token_masks=masks)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["concat", "best-fit", "pad"]),
    st.booleans(),
    st.sampled_from(["xy", "hf", "hf-flat", "sft", "megatron", "torchtitan", "olmo", "maxtext"]),
    st.booleans(),
)
def test_the_ignored_label_is_a_choice(method: Any, document_mask: bool, layout: str, in_c: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(kernels, "compiled", None)
        rows = tm.shuffle(tm.pack(repeating_store(Path(folder)), seq_len=50, method=method))
        loading: dict[str, Any] = {"batch_size": 4, "epochs": 1.2, "document_mask": document_mask, "layout": layout}
        loading["token_masks"] = [tm.Goldfish(k=9)]
        for usual, other in zip(tm.Loader(rows, **loading), tm.Loader(rows, **loading, ignore_index=-1), strict=True):
            for a, b in zip(leaves_of(usual), leaves_of(other), strict=True):
                assert np.array_equal(np.where(a == IGNORED, -1, a), b)
                assert not (b == IGNORED).any()
            if layout == "xy":
                assert (usual.ignore_index, other.ignore_index) == (IGNORED, -1)
                assert np.array_equal(usual.loss_mask, other.loss_mask)
                assert np.array_equal(usual.loss_weights, other.loss_weights)


def leaves_of(batch: Any) -> list[Any]:
    """The arrays and numbers of a batch, in a fixed order."""
    if isinstance(batch, dict):
        return [leaf for name in sorted(batch) for leaf in leaves_of(batch[name])]
    if isinstance(batch, (tuple, tm.Batch)):
        return [leaf for part in batch for leaf in leaves_of(part)]
    return [np.asarray(batch)]


@pytest.mark.parametrize("ignore_index", [0, 5, -(1 << 40), "none", None, 1.5])
def test_an_ignored_label_that_is_an_id_is_refused(tmp_path: Path, ignore_index: Any) -> None:
    with pytest.raises(UsageError, match="ignore_index"):
        tm.load(repeating_store(tmp_path), seq_len=8, batch_size=2, ignore_index=ignore_index)
