"""Order: a true permutation of any size, without correlation, another one per epoch, the same in every release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.dataset.shuffle import make_key, permute
from tokenmill.errors import UsageError


def test_it_is_a_permutation_for_every_size_up_to_4096() -> None:
    for size in range(1, 4097):
        seen = np.zeros(size, bool)
        seen[permute(np.arange(size), size, make_key(5, size))] = True
        assert seen.all(), size


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_large_sizes_stay_inside_and_do_not_collide(size: int, key: int, start: int) -> None:
    first = start % size
    index = np.arange(first, min(first + 2000, size))
    places = permute(index, size, key)
    assert ((places >= 0) & (places < size)).all()
    assert len(np.unique(places)) == len(index)


def test_one_by_one_is_the_same_as_all_at_once() -> None:
    whole = permute(np.arange(1000), 1000, 7)
    assert [int(permute(np.array([i]), 1000, 7)[0]) for i in range(1000)] == whole.tolist()


@pytest.mark.parametrize("size", [12_207, 100_000, 1_000_003])
@pytest.mark.parametrize("key", [0, 1, make_key(3, 9)])
def test_neighbours_are_not_correlated(size: int, key: int) -> None:
    places = permute(np.arange(size), size, key).astype(float)
    for lag in (1, 2, 7):
        correlation = np.corrcoef(places[:-lag], places[lag:])[0, 1]
        assert abs(correlation) < 4 / size**0.5


def test_places_are_spread_evenly() -> None:
    """Chi-squared over 100 x 100 cells of (index, place): 9,801 degrees of freedom, standard deviation 140."""
    size = 1_000_000
    places = permute(np.arange(size), size, make_key(1, 2))
    cells = np.bincount(np.arange(size) * 100 // size * 100 + places * 100 // size, minlength=10_000)
    statistic = ((cells - 100) ** 2 / 100).sum()
    assert 9801 - 6 * 140 < statistic < 9801 + 6 * 140


def test_the_order_never_changes_between_releases() -> None:
    """Golden hashes: a changed order would break every checkpoint without an error."""
    expected = {
        (1000, make_key(0, 0)): GOLDEN[0],
        (123_457, make_key(42, 3)): GOLDEN[1],
        (10**12 + 39, make_key(7, 1)): GOLDEN[2],
    }
    for (size, key), digest in expected.items():
        places = permute(np.arange(min(size, 50_000)), size, key)
        assert xxhash.xxh3_64_hexdigest(places.astype("<i8").tobytes()) == digest


GOLDEN = ["f948d9e781ff0ba9", "dc818ced743b2e20", "b9aa21ba84b5a53c"]


def test_every_epoch_has_all_rows_in_another_order(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(300))), seq_len=16)
    shuffled = tm.shuffle(rows, seed=4)
    epochs = [shuffled.resolve(np.arange(len(rows)) + e * len(rows))[0].numbers for e in range(3)]
    assert all(sorted((epoch % len(rows)).tolist()) == list(range(len(rows))) for epoch in epochs)
    assert len({tuple((epoch % len(rows)).tolist()) for epoch in epochs}) == 3
    assert tm.shuffle(rows, seed=5)[0].tolist() != shuffled[0].tolist()


def test_stages_under_a_shuffle_are_refused(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(300))), seq_len=16)
    staged = tm.mix([(rows, 1), (rows, 1)], stages={50: [1, 3]})
    with pytest.raises(UsageError, match="shuffle the sources"):
        tm.shuffle(staged)
    with pytest.raises(UsageError, match="shuffle the sources"):
        tm.shuffle(tm.take(staged, 20))
    assert len(tm.shuffle(tm.mix([(rows, 1), (rows, 1)]))) == 2 * len(rows)


def test_a_slice_has_the_same_rows_in_every_epoch(tmp_path: Path) -> None:
    rows = tm.shuffle(tm.pack(tm.open(make_store(tmp_path, make_documents(300))), seq_len=16), seed=1)
    held_out, rest = tm.take(rows, 10), tm.skip(rows, 10)
    assert len(held_out) + len(rest) == len(rows)
    for epoch in range(3):
        ours = {rows_of(held_out, epoch * 10 + i) for i in range(10)}
        theirs = {rows_of(rest, epoch * len(rest) + i) for i in range(len(rest))}
        assert len(ours) == 10
        assert not ours & theirs
        assert ours | theirs == {rows_of(rows, i) for i in range(len(rows))}
    with pytest.raises(UsageError, match="are not a part of"):
        tm.slice(rows, 5, len(rows) + 1)


def rows_of(rows: tm.Rows, number: int) -> tuple[int, ...]:
    return tuple(rows[number].tolist())


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_the_order_can_be_inverted(size: int, key: int, start: int) -> None:
    first = start % size
    index = np.arange(first, min(first + 100, size))
    assert permute(permute(index, size, key), size, key, inverse=True).tolist() == index.tolist()
