"""Best-fit decreasing: which items share a bin, so that little of any bin stays empty.

The textbook places one item at a time and searches the open bins for each. Here all bins with equal room move
together and nothing is searched, because lengths only decrease: see `_place`. A second pass finds out which bins
those were: see `_name_bins`. A window of 65,536 items, log-normal with mean 700, takes 5 to 8 ms for capacities
of 2,048 to 32,768; one item at a time takes 34 to 87 ms.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Fit", "count_bins", "fit"]

Ints = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer[Any]]


class Fit(NamedTuple):
    """Bin b holds the items `order[ends[b - 1]:ends[b]]`, longest first; bin 0 starts at 0."""

    order: npt.NDArray[np.int32]
    ends: Ints
    num_bounded: int
    """Bins that have room left, but as many items as they may."""


def fit(lengths: Lengths, capacity: int, most: int = 0) -> Fit:
    """Pack items into bins, each item into the fullest open bin that still holds it.

    Items are placed by descending length, equal ones by number. Among bins with equal room, the item goes to the
    one that has had this room for longest. Bins are numbered in the order in which they are opened. The result
    depends on the arguments alone.

    With `most`, a bin holds at most that many items; among bins with equal room, the item goes to the one that takes
    the fewest more.
    """
    order, descending = _sort_descending(lengths, capacity)
    sizes, room, base = _with_counts(descending, capacity, most)
    steps = _place(sizes, room, base)
    bins = _name_bins(steps, sizes, room)
    ends = np.cumsum(np.bincount(bins), dtype=np.int64)
    return Fit(order[_argsort(bins)].astype(np.int32), ends, _count_bounded(steps, sizes, base))


def count_bins(lengths: Lengths, capacity: int, most: int = 0) -> tuple[int, int]:
    """Count the bins that `fit` uses, and the bounded ones, without finding out which item is in which."""
    _, descending = _sort_descending(lengths, capacity)
    sizes, room, base = _with_counts(descending, capacity, most)
    steps = _place(sizes, room, base)
    return _count_opened(steps, room), _count_bounded(steps, sizes, base)


def _with_counts(descending: Ints, capacity: int, most: int) -> tuple[Ints, int, int]:
    """Return sizes of items and the room of a bin as two-digit numbers: what is left, and how many items it may take.

    The base of these numbers is `most + 1`, so an item of length 5 has the size 51 where `most` is 9. Without a bound
    there is only one digit, and the base is 1.
    """
    if not most:
        return descending, capacity, 1
    return descending * (most + 1) + 1, capacity * (most + 1) + most, most + 1


def _sort_descending(lengths: Lengths, capacity: int) -> tuple[Ints, Ints]:
    """Return item numbers by descending length, equal lengths by number, and the lengths in that order."""
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths are {lengths.min()} to {lengths.max()}; expected 1 to the capacity, {capacity}")
    keys = capacity - lengths.astype(np.int64)
    order = _argsort(keys)
    return order, capacity - keys[order]


def _argsort(keys: Ints) -> Ints:
    """Sort keys (none negative) stably, 16 bits at a time.

    numpy has a radix sort only for 16-bit integers: 65,536 of them take 0.5 ms, wider ones 4.4 ms.
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order


def _find_runs(values: Ints) -> tuple[Ints, Ints]:
    """Find where each run of equal values (none negative) starts, and how long it is."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return starts, np.diff(starts, append=len(values))


def _place(descending: Ints, capacity: int, base: int) -> Ints:
    """Return the steps of the packing, a row for each: room, number of bins, number of items in each.

    A step takes that many bins with that much room, and puts that many items of one length
    into each, from left to right in `descending`. Five items of length 4 in bins of 10 are
    two steps: (10, 2, 2), and (10, 1, 1) for the one that is left.

    The rooms that fit the current length are a stack with the smallest on top. A room that is
    too small waits in a heap; when lengths have come down to it, it is smaller than all that
    fitted before, so it goes on top. A step takes bins from the top and leaves less room than
    they had, so that goes on top as well, or waits. At the bottom are the bins not yet opened,
    more of them than items. A bin that may take no more items is neither.
    """
    starts, counts = _find_runs(descending)
    shortest = int(descending.min(initial=capacity))
    num_bins = {capacity: len(descending) + 1}
    fitting = [capacity]
    waiting = [0]  # negated: the largest comes first; the 0 stays, because lengths end at 1
    steps: list[int] = []  # flat, because tuples take numpy four times as long to convert
    record = steps.append
    for length, count in zip(descending[starts].tolist(), counts.tolist(), strict=True):
        while waiting[0] <= -length:
            fitting.append(-heappop(waiting))
        while count:
            room = fitting[-1]
            available = num_bins[room]
            each = room // length
            if base > 1 and each > room % base:
                each = room % base
            if each > count:
                each = count
            taken = count // each if each * available > count else available
            if taken == available:
                del num_bins[room], fitting[-1]
            else:
                num_bins[room] = available - taken
            record(room)
            record(taken)
            record(each)
            count -= taken * each
            left = room - each * length
            if base > 1 and left % base == 0:
                continue
            if left in num_bins:
                num_bins[left] += taken
            elif left >= shortest:
                num_bins[left] = taken
                if left >= length:
                    fitting.append(left)
                else:
                    heappush(waiting, -left)
    return np.fromiter(steps, np.int64, len(steps)).reshape(-1, 3)


def _count_opened(steps: Ints, capacity: int) -> int:
    """Count the bins that are taken with all their room, which a bin has only until it is opened."""
    return int(steps[steps[:, 0] == capacity, 1].sum())


def _count_bounded(steps: Ints, descending: Ints, base: int) -> int:
    """Count the bins that are left with some room and may take no more items."""
    if base == 1:
        return 0
    taken, each = steps[:, 1], steps[:, 2]
    lengths = descending[np.cumsum(taken * each) - taken * each]
    left = steps[:, 0] - each * lengths
    return int(taken[(left % base == 0) & (left > 0)].sum())


def _name_bins(steps: Ints, descending: Ints, capacity: int) -> Ints:
    """Return the bin of each item of `descending`.

    A visit is one bin in one step. Bins queue for each room, so the j-th visit to find a room
    gets the bin of the j-th visit to leave that room: its source. From source to source every
    visit leads back to the opening of its bin. All go at once and each pass doubles the jump,
    so a bin with 1,000 visits takes 10 passes.
    """
    num_opened = _count_opened(steps, capacity)
    rooms, each = np.repeat(steps[:, ::2], steps[:, 1], axis=0).T
    left = rooms - each * descending[np.cumsum(each) - each]
    # In front of the visits is one entry per bin: its opening, which leaves it with all its room.
    left = np.concatenate([np.full(num_opened, capacity), left])
    source = np.arange(len(left))
    source[num_opened:] = _match(rooms, left)
    while (source >= num_opened).any():
        source = source[source]
    return np.repeat(source[num_opened:], each)


def _match(wanted: Ints, offered: Ints) -> Ints:
    """Return the index in `offered` of each wanted value: the first one for the first, and so on."""
    by_wanted, by_offered = _argsort(wanted), _argsort(offered)
    values = wanted[by_wanted]
    starts, sizes = _find_runs(values)
    shifts = np.searchsorted(offered[by_offered], values[starts]) - starts
    index = np.empty_like(by_wanted)
    index[by_wanted] = by_offered[np.arange(len(values)) + np.repeat(shifts, sizes)]
    return index
