"""Best-fit decreasing by classes of bins packs exactly as the textbook does, one item at a time."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.dataset._bin_packing import Fit, count_bins, fit

WINDOW = 65_536
Ints = npt.NDArray[np.int64]


def pack_one_by_one(lengths: list[int], capacity: int, most: int = 0) -> list[list[int]]:
    """The textbook: the open bin with the least room that fits, of equal ones the one that has had it longest.

    With a bound on items, of bins with equal room the one that takes the fewest more comes first.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    since: list[int] = []
    for clock, item in enumerate(sorted(range(len(lengths)), key=lambda item: -lengths[item])):
        fitting = [n for n, room in enumerate(rooms) if room >= lengths[item] and len(bins[n]) < (most or 1 << 60)]
        if fitting:
            best = min(fitting, key=lambda n: (rooms[n], -len(bins[n]) if most else 0, since[n]))
        else:
            best = len(bins)
            bins.append([])
            rooms.append(capacity)
            since.append(clock)
        bins[best].append(item)
        rooms[best] -= lengths[item]
        since[best] = clock
    return bins


def as_lists(result: Fit) -> list[list[int]]:
    return [items.tolist() for items in np.split(result.order, result.ends[:-1])] if len(result.ends) else []


def log_normal(capacity: int) -> Ints:
    """Documents of a web corpus: mean about 700 tokens before they are cut to the capacity."""
    drawn = np.random.default_rng(0).lognormal(np.log(700) - 1.1**2 / 2, 1.1, WINDOW)
    return np.clip(drawn.astype(np.int64), 1, capacity)


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int]:
    """Few different lengths make many equal rooms; large capacities need more than one pass of the sort."""
    capacity = draw(st.one_of(st.integers(1, 30), st.integers(1, 2**40)))
    some = st.one_of(
        st.integers(1, capacity), st.integers(1, min(capacity, 5)), st.integers(max(1, capacity // 3), capacity)
    )
    pool = draw(st.lists(some, min_size=1, max_size=12))
    return draw(st.lists(st.one_of(st.sampled_from(pool), some), max_size=120)), capacity


@settings(deadline=None, max_examples=400)
@given(windows())
def test_bins_and_their_items_are_those_of_the_textbook(window: tuple[list[int], int]) -> None:
    lengths, capacity = window
    expected = pack_one_by_one(lengths, capacity)
    assert as_lists(fit(np.array(lengths, np.int64), capacity)) == expected
    assert count_bins(np.array(lengths, np.int64), capacity) == (len(expected), 0)


@settings(deadline=None, max_examples=400)
@given(windows(), st.integers(1, 12))
def test_bounded_bins_are_those_of_the_textbook_too(window: tuple[list[int], int], most: int) -> None:
    lengths, capacity = window
    expected = pack_one_by_one(lengths, capacity, most)
    found = fit(np.array(lengths, np.int64), capacity, most)
    bounded = sum(len(items) == most and sum(lengths[item] for item in items) < capacity for items in expected)
    assert as_lists(found) == expected
    assert found.num_bounded == bounded
    assert count_bins(np.array(lengths, np.int64), capacity, most) == (len(expected), bounded)


@pytest.mark.parametrize("capacity", [100, 1000, 100_000])
def test_a_thousand_items_are_packed_as_in_the_textbook(capacity: int) -> None:
    drawn = np.random.default_rng(capacity).lognormal(np.log(capacity / 8), 1.0, 1000)
    lengths = np.clip(drawn.astype(np.int64), 1, capacity)
    assert as_lists(fit(lengths, capacity)) == pack_one_by_one(lengths.tolist(), capacity)


@pytest.mark.parametrize("capacity", [2048, 8192, 32_768, 1_048_576])
def test_a_full_window_holds_every_item_once_and_no_bin_overflows(capacity: int) -> None:
    lengths = log_normal(capacity)
    order, ends, _ = fit(lengths, capacity)
    assert np.array_equal(np.sort(order), np.arange(WINDOW))
    starts = np.append(0, ends[:-1])
    assert (starts < ends).all() and ends[-1] == WINDOW
    assert np.add.reduceat(lengths[order], starts).max() <= capacity
    assert count_bins(lengths, capacity) == (len(ends), 0)


def test_padding_of_a_full_window_is_below_one_part_in_two_thousand() -> None:
    lengths = log_normal(8192)
    assert 650 < lengths.mean() < 750
    assert 1 - lengths.sum() / (8192 * count_bins(lengths, 8192)[0]) < 0.0005


def test_the_result_never_changes() -> None:
    spread = np.arange(WINDOW, dtype=np.int64) * 40_503 % WINDOW
    order, ends, _ = fit(1 + (spread**3 >> 35), 8192)
    packed = order.astype("<i4").tobytes() + ends.astype("<i8").tobytes()
    assert hashlib.sha256(packed).hexdigest() == "35595bda451bdf7851d4514a99219394d3c385692515674d569c1f834cca1b3b"


@pytest.mark.parametrize("dtype", ["u2", "i4", "u4", "u8"])
def test_the_type_of_the_lengths_makes_no_difference(dtype: str) -> None:
    lengths = log_normal(8192)[:2000]
    result, expected = fit(lengths.astype(dtype), 8192), fit(lengths, 8192)
    assert as_lists(result) == as_lists(expected)
    assert result.order.dtype == np.int32 and result.ends.dtype == np.int64
    assert count_bins(lengths.astype(dtype), 8192) == count_bins(lengths, 8192)


def test_no_items_need_no_bins() -> None:
    order, ends, _ = fit(np.array([], np.int64), 8)
    assert (len(order), len(ends)) == (0, 0)
    assert count_bins(np.array([], np.int64), 8, 3) == (0, 0)


@pytest.mark.parametrize("lengths", [[0], [9], [3, 0, 8], [3, 9, 8], [-1]])
def test_lengths_that_no_bin_can_hold_are_refused(lengths: list[int]) -> None:
    for function in (fit, count_bins):
        with pytest.raises(ValueError, match="expected 1 to the capacity, 8"):
            function(np.array(lengths), 8)


ITEMS = np.arange(WINDOW, dtype=np.int64)
NASTY = {
    "all equal": np.full(WINDOW, 333_333),
    "all 1": np.ones(WINDOW, np.int64),
    "all distinct": ITEMS + 1,
    "distinct, two to a bin": 333_334 + 2 * ITEMS,
    "uniform": np.random.default_rng(0).integers(1, 1_000_001, WINDOW),
    "1 and the capacity in turn": np.where(ITEMS % 2, 1, 1_000_000),
    "one room, then all distinct": np.where(ITEMS % 2, 500_001, ITEMS + 1),
    "geometric": 1 + (999_999 * 0.9998**ITEMS).astype(np.int64),
}


@pytest.mark.parametrize("lengths", NASTY.values(), ids=NASTY.keys())
def test_nasty_lengths_take_no_longer_than_half_a_second_each(lengths: Ints) -> None:
    """A tenth of that on 2 Xeon cores; of processor time, so that a busy machine changes little."""
    started = time.process_time()
    order, ends, _ = fit(lengths, 1_000_000)
    fit(lengths, 1_000_000, 8)
    assert time.process_time() - started < 1
    assert np.add.reduceat(lengths[order], np.append(0, ends[:-1])).max() <= 1_000_000
    assert count_bins(lengths, 1_000_000) == (len(ends), 0)
