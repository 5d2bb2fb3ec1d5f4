"""Targets that have no loss because of what the tokens are: a filter of repetitions, and the goldfish mask.

Both are functions of the tokens of a row, so they are the same on any rank, in any epoch and after any resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import name_kind, whole_number
from tokenmill.dataset.rows import Integers
from tokenmill.errors import UsageError
from tokenmill.filling import kernels

__all__ = ["Goldfish", "RepetitionFilter", "TokenMask", "check_masks"]

Array = npt.NDArray[Any]

TABLE_SIZE, TABLE_SEED = 1_000_003, 2_971_215_073
"""The table of the published implementation: random numbers of the Mersenne Twister, looked up by a remainder."""
MOST_CONTEXT = 64
MOST_PERIOD = 1 << 12


class TokenMask(Protocol):
    """A rule that leaves targets out of the loss; `name` is that of its count."""

    name: str

    def apply(self, inputs: Array, targets: Array, lengths: Integers, ignored: int) -> Integers:
        """Ignore targets of rows that have `lengths` tokens, and return what is counted for each row."""


@dataclass(frozen=True)
class RepetitionFilter:
    """Ignore all targets of a row in which some tokens come again and again.

    That is `max_count` times or more in immediate succession, for any group of `min_period` to `max_period` tokens. The
    defaults are those of OLMo-core's `InstanceFilterConfig`, and so is what is found. Rows are counted.
    """

    max_period: int = 13
    min_period: int = 1
    max_count: int = 32
    name = "repetition_rows"

    def __post_init__(self) -> None:
        whole_number(self.min_period, "min_period", 1, MOST_PERIOD)
        whole_number(self.max_period, "max_period", self.min_period, MOST_PERIOD)
        whole_number(self.max_count, "max_count", 3, 1 << 30)

    def apply(self, inputs: Array, targets: Array, lengths: Integers, ignored: int) -> Integers:
        """Ignore the targets of rows with a repetition; 1 for each such row."""
        found = np.zeros(len(inputs), np.int64)
        if kernels.compiled is not None:
            kernels.compiled.find_repetitions(inputs, lengths, self.min_period, self.max_period, self.max_count, found)
        else:
            found[:] = [self._repeats(row[:length]) for row, length in zip(inputs, lengths.tolist(), strict=True)]
        rows = np.flatnonzero(found)
        if len(rows):
            targets[rows] = ignored
        return found

    def _repeats(self, row: Array) -> bool:
        """Find a group of tokens that repeats, by the longest stretch in which tokens equal those a period before."""
        for period in range(self.min_period, min(self.max_period, len(row) // self.max_count) + 1):
            differs = np.flatnonzero(row[period:] != row[:-period])
            stretches = np.diff(differs, prepend=-1, append=len(row) - period) - 1
            if stretches.max() >= period * (self.max_count - 1):
                return True
        return False


@dataclass(frozen=True)
class Goldfish:
    """Ignore one target in `k`, chosen by a hash of it and the tokens before it, `context` tokens together.

    A passage that recurs loses the same tokens each time, so a model cannot learn it by heart. The hash is that of the
    published implementation, whose strategy is called `hash-table`. The first `context - 1` targets of a row stay, as
    there. Targets are counted.
    """

    k: int = 4
    context: int = 4
    name = "goldfish_targets"

    def __post_init__(self) -> None:
        whole_number(self.k, "k", 2, TABLE_SIZE)
        whole_number(self.context, "context", 1, MOST_CONTEXT)

    def apply(self, inputs: Array, targets: Array, lengths: Integers, ignored: int) -> Integers:
        """Ignore the chosen targets, and count for each row those that had a loss."""
        found = np.zeros(len(inputs), np.int64)
        if kernels.compiled is not None:
            bits = _dropped_bits(self.k)
            kernels.compiled.drop_targets(inputs, targets, bits, TABLE_SIZE, self.context, ignored, found)
            return found
        step = max(1, kernels.TOKENS_AT_ONCE // inputs.shape[1])
        for first in range(0, len(inputs), step):
            some = slice(first, first + step)
            found[some] = self._drop(inputs[some], targets[some], ignored)
        return found

    def _drop(self, inputs: Array, targets: Array, ignored: int) -> Integers:
        keys = targets[:, self.context - 1 :].astype(np.int64)
        for before in range(self.context - 1):
            # Target j is input j + 1, so the tokens before it are inputs.
            keys *= inputs[:, 1 + before : 1 + before + keys.shape[1]]
        chosen = _dropped(self.k)[keys % TABLE_SIZE].astype(bool)
        chosen &= targets[:, self.context - 1 :] != ignored
        targets[:, self.context - 1 :][chosen] = ignored
        counts: Integers = chosen.sum(axis=1)
        return counts


@cache
def _dropped(k: int) -> npt.NDArray[np.uint8]:
    """Return 1 for the remainders whose targets are ignored: those with a random number below 1 / k.

    The numbers are those of `torch.rand` on a CPU, the 24 low bits of each output of the generator.
    """
    raw = np.random.RandomState(TABLE_SEED).randint(0, 1 << 32, TABLE_SIZE, np.uint32)
    numbers = (raw & np.uint32((1 << 24) - 1)).astype(np.float32) / np.float32(1 << 24)
    return (numbers < np.float32(1 / k)).astype(np.uint8)


@cache
def _dropped_bits(k: int) -> npt.NDArray[np.uint32]:
    """Return the same as bits, which fit a CPU cache."""
    bits = np.packbits(_dropped(k), bitorder="little")
    return np.append(bits, np.zeros(-len(bits) % 4, np.uint8)).view(np.uint32)


def check_masks(masks: Any) -> tuple[TokenMask, ...]:
    """Check a list of masks."""
    if masks is None:
        return ()
    if not isinstance(masks, Sequence) or isinstance(masks, str):
        masks = [masks]
    for mask in masks:
        if not isinstance(mask, (Goldfish, RepetitionFilter)):
            raise UsageError(f"token_masks are tm.Goldfish() and tm.RepetitionFilter(), not {name_kind(mask)}")
    names = [mask.name for mask in masks]
    if len(set(names)) < len(names):
        raise UsageError("token_masks has two masks of one kind; leave one out")
    return tuple(masks)
