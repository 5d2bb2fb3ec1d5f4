"""Shuffling in blocks: every row once per epoch, one block of shards at a time, with its quality in the tree."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import collect, make_documents, make_store
from tokenmill.dataset.block_shuffle import BlockShuffledRows
from tokenmill.errors import UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("blocks"), make_documents(900, seed=11), num_shards=20)


def blocks(store: Path, *, seed: int = 0, block_tokens: int = 3000, method: str = "concat") -> BlockShuffledRows:
    packed = tm.pack(tm.open(store), seq_len=16, method=method)  # type: ignore[arg-type]
    rows = tm.shuffle(packed, seed=seed, block_tokens=block_tokens)
    assert isinstance(rows, BlockShuffledRows)
    return rows


def numbers(rows: BlockShuffledRows, epoch: int = 0) -> np.ndarray:
    (choice,) = rows.resolve(np.arange(rows.num_rows) + epoch * rows.num_rows)
    return choice.numbers


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), block_tokens=st.integers(1, 50_000), epoch=st.integers(0, 3), pads=st.booleans())
def test_every_row_comes_up_once_an_epoch(store: Path, seed: int, block_tokens: int, epoch: int, pads: bool) -> None:
    rows = blocks(store, seed=seed, block_tokens=block_tokens, method="pad" if pads else "concat")
    found = numbers(rows, epoch)
    assert np.array_equal(np.sort(found), np.arange(rows.num_rows) + epoch * rows.num_rows)


def test_a_block_has_the_rows_of_few_shards_and_epochs_differ(store: Path) -> None:
    rows = blocks(store, block_tokens=1500)
    (shards, _, tokens) = rows.leaves()[0].documents.runs()
    assert rows.num_blocks > 3
    found = numbers(rows)
    home = np.searchsorted(tokens, found * 16, "right") - 1
    order = rows._order(0)
    edges = order.starts.tolist()
    seen: set[int] = set()
    for start, stop in itertools.pairwise(edges):
        here = set(home[start:stop].tolist())
        assert not here & seen, "a shard is needed in one block only"
        seen |= here
        assert not np.array_equal(found[start:stop], np.sort(found[start:stop]))
    assert seen == set(range(len(shards)))
    assert not np.array_equal(found % rows.num_rows, numbers(rows, 1) % rows.num_rows)


def test_rows_in_a_block_are_well_shuffled(tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(5000, seed=1), num_shards=10)
    rows = blocks(folder, block_tokens=25_000)
    found = numbers(rows).astype(float)
    stop = int(rows._order(0).starts[1])
    lag = np.corrcoef(found[: stop - 1], found[1:stop])[0, 1]
    assert abs(lag) < 4 / np.sqrt(stop)


def test_where_is_the_inverse(store: Path) -> None:
    rows = blocks(store, seed=5)
    leaf = rows.leaves()[0]
    everything = np.concatenate([numbers(rows, epoch) for epoch in range(3)])
    for row in (0, 1, 17, rows.num_rows - 1):
        expected = np.flatnonzero(everything % rows.num_rows == row).tolist()
        assert rows.where(leaf, row, 3 * rows.num_rows) == expected


def test_the_tree_says_how_well_rows_are_shuffled(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = blocks(store)
    assert f"each row among {rows.shuffled_among:,} tokens" in repr(rows)
    assert blocks(store, block_tokens=10**9).title().startswith("shuffle in 1 block, seed 0: ")
    loader = tm.load(store, 16, 4, shuffle="blocks", block_tokens=3000)
    assert "tokenmill: shuffle in" in capsys.readouterr().err
    tm.load(store, 16, 4, shuffle="blocks", block_tokens=3000, rank=1, world_size=2)
    assert capsys.readouterr().err == ""
    assert loader.rows.fingerprint != tm.load(store, 16, 4, shuffle="blocks", block_tokens=9000).rows.fingerprint


def test_ranks_share_blocks_and_a_state_resumes(store: Path) -> None:
    whole = collect(tm.load(store, 16, 8, shuffle="blocks", block_tokens=3000), 12)
    halves = [
        collect(tm.load(store, 16, 4, shuffle="blocks", block_tokens=3000, rank=r, world_size=2), 12) for r in range(2)
    ]
    for step, batch in enumerate(whole):
        np.testing.assert_array_equal(batch.inputs, np.concatenate([half[step].inputs for half in halves]))
    first = tm.load(store, 16, 8, shuffle="blocks", block_tokens=3000)
    collect(first, 5)
    second = tm.load(store, 16, 8, shuffle="blocks", block_tokens=3000)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(collect(second, 1)[0].inputs, whole[5].inputs)
    other = tm.load(store, 16, 8, shuffle="blocks", block_tokens=9000)
    with pytest.raises(UsageError, match="block_tokens is 3000 in the state and 9000 here"):
        other.load_state_dict(first.state_dict())


def test_what_cannot_be_shuffled_in_blocks_is_refused(store: Path) -> None:
    packed = tm.pack(tm.open(store), seq_len=16)
    with pytest.raises(UsageError, match="needs rows as pack makes them"):
        tm.shuffle(tm.take(packed, 10), block_tokens=100)
    with pytest.raises(UsageError, match="a row belongs to none"):
        tm.shuffle(tm.pack(tm.open(store), seq_len=16, method="best-fit"), block_tokens=100)
    with pytest.raises(UsageError, match="block_tokens 0 must be a whole number, at least 1"):
        tm.shuffle(packed, block_tokens=0)
    with pytest.raises(UsageError, match="block_tokens 0 must be a whole number, at least 1"):
        tm.load(store, 16, 4, shuffle="blocks", block_tokens=0)
    with pytest.raises(UsageError, match="has no effect without shuffle='blocks'"):
        tm.load(store, 16, 4, block_tokens=100)
