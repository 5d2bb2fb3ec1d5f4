"""Which interval contains a position: the table of first guesses against a binary search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.store.documents import MANY_POSITIONS, MAX_STEPS, IntervalLookup

SIZES = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    st.lists(st.sampled_from([0, 1, 10**12]), min_size=1, max_size=20),
).filter(any)


@given(SIZES, st.integers(0, 2**32))
def test_every_position_is_found_as_by_a_binary_search(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes)
    edges = np.concatenate([ends - 1, ends, [0]])
    drawn = np.random.default_rng(seed).integers(0, ends[-1], MANY_POSITIONS)
    positions = np.concatenate([drawn, edges[(edges >= 0) & (edges < ends[-1])]])
    assert IntervalLookup(ends).find(positions).tolist() == np.searchsorted(ends, positions, "right").tolist()


@pytest.mark.parametrize(("sizes", "has_table"), [([5_000_000] * 64, True), ([1] * 1000 + [10**9], False)])
def test_the_table_is_used_where_it_helps(sizes: list[int], has_table: bool) -> None:
    lookup = IntervalLookup(np.cumsum(sizes))
    assert (lookup.num_steps <= MAX_STEPS) == has_table
