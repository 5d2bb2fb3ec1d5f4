"""The source of every row and token: that of the store whose ids it has, through mixtures of any depth."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_store
from tokenmill.errors import UsageError
from tokenmill.filling import kernels
from tokenmill.tools.trace import trace_step

BASE = 10_000
"""Store n has ids from n * BASE on, so that every token says where it came from."""


def make_stores(folder: Path, lengths: list[list[int]]) -> list[Any]:
    return [
        tm.open(make_store(folder / str(n), [[1 + n * BASE + i for i in range(length)] for length in some]))
        for n, some in enumerate(lengths)
    ]


methods = st.sampled_from(["concat", "best-fit", "pad"])


def trees(num_stores: int) -> st.SearchStrategy[Any]:
    """Packings of stores, alone or opened as one, in shuffles, slices and mixtures of mixtures."""
    some = st.lists(st.integers(0, num_stores - 1), min_size=1, max_size=num_stores, unique=True)
    leaf = st.tuples(st.just("pack"), some, methods, st.integers(0, 3))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.just("shuffle"), inner, st.integers(0, 3)),
            st.tuples(st.just("mix"), st.lists(st.tuples(inner, st.integers(1, 5)), min_size=1, max_size=3)),
        ),
        max_leaves=4,
    )


def build(tree: Any, stores: list[Any]) -> tuple[tm.Rows, list[int]]:
    """The rows of a tree, and the store that each of its sources is."""
    if tree[0] == "pack":
        _, some, method, seed = tree
        chosen = tm.open([stores[n].path for n in some]) if len(some) > 1 else stores[some[0]]
        return tm.pack(chosen, seq_len=8, method=method, seed=seed), some
    if tree[0] == "shuffle":
        rows, sources = build(tree[1], stores)
        return tm.shuffle(rows, seed=tree[2]), sources
    parts = [(build(inner, stores), weight) for inner, weight in tree[1]]
    rows = tm.mix([(rows, weight) for (rows, _), weight in parts])
    return rows, [source for (_, sources), _ in parts for source in sources]


@pytest.mark.parametrize("in_c", [True, False])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_row_and_token_names_the_store_it_came_from(in_c: bool, data: Any) -> None:
    lengths = data.draw(st.lists(st.lists(st.integers(0, 20), min_size=8, max_size=15), min_size=1, max_size=3))
    lengths = [[*some, 30] for some in lengths]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(kernels, "compiled", None)
        stores = make_stores(Path(folder), lengths)
        rows, expected = build(data.draw(trees(len(stores))), stores)
        assert rows.sources == [f"{n}/train" for n in expected]
        wanted = np.array([*expected, -1])
        for batch in tm.Loader(rows, batch_size=3, epochs=1.3):
            held = np.where(batch.segment_ids > 0, (batch.inputs - 1) // BASE, -1)
            assert np.array_equal(wanted[batch.token_sources], held)
            assert batch.token_sources.dtype == np.int32
            for source, row in zip(batch.sources.tolist(), held, strict=True):
                inside = set(row[row >= 0].tolist())
                assert inside == {wanted[source]} if source >= 0 else len(inside) != 1


def test_a_packing_in_two_places_of_a_tree_is_one_source(tmp_path: Path) -> None:
    first, second = make_stores(tmp_path, [[20] * 9, [20] * 9])
    again = tm.pack(first, seq_len=8)
    rows = tm.mix([(tm.shuffle(again, seed=1), 1), (tm.pack(second, seq_len=8), 1), (tm.shuffle(again, seed=2), 1)])
    assert rows.sources == ["0/train", "1/train"]
    batch = next(iter(tm.Loader(rows, batch_size=100, epochs=1)))
    assert set(batch.sources.tolist()) == {0, 1, -1}
    assert np.array_equal(batch.sources == 1, batch.inputs[:, 0] > BASE)


def test_trace_names_the_same_sources(tmp_path: Path) -> None:
    stores = make_stores(tmp_path, [[5, 3] * 20, [2, 6] * 20, [7] * 20])
    joined = tm.open([store.path for store in stores[:2]])
    rows = tm.mix([(tm.pack(joined, seq_len=8, method="pad"), 1), (tm.shuffle(tm.pack(stores[2], seq_len=8)), 2)])
    for step, batch in zip(range(9), tm.Loader(rows, batch_size=4), strict=False):
        traced = trace_step(rows, step, batch_size=4)
        assert [row.documents[0].source for row in traced.rows] == [rows.sources[n] for n in batch.sources.tolist()]


@pytest.mark.parametrize("layout", ["hf", "hf-flat", "sft", "megatron", "torchtitan", "olmo", "maxtext"])
def test_layouts_have_further_fields_when_asked(tmp_path: Path, layout: Any) -> None:
    joined = tm.open([store.path for store in make_stores(tmp_path, [[5, 3] * 9, [2, 6] * 9])])
    rows = tm.shuffle(tm.pack(joined, seq_len=16, method="pad"))
    names = ["sources", "token_sources"]
    plain, laid_out = tm.Loader(rows, batch_size=4), tm.Loader(rows, batch_size=4, layout=layout, fields=names)
    for batch, parts, _ in zip(plain, laid_out, range(5), strict=False):
        found = parts[0] if isinstance(parts, tuple) else parts
        tokens = batch.token_sources
        if layout == "hf-flat":
            tokens = tokens[tokens >= 0][None]
            assert tokens.shape == found["input_ids"].shape
        assert np.array_equal(found["token_sources"], tokens)
        assert np.array_equal(found["sources"], batch.sources)


@pytest.mark.parametrize("fields", ["sources", ["source"], 7, [3]])
def test_unknown_fields_are_refused(tmp_path: Path, fields: Any) -> None:
    (store,) = make_stores(tmp_path, [[9] * 9])
    with pytest.raises(UsageError, match="field"):
        tm.load(store, seq_len=8, batch_size=2, fields=fields)
