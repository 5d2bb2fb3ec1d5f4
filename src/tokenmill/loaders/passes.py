"""Passes: what one iteration over a loader hands over, one epoch or several, and where the next iteration goes on."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from tokenmill.arguments import MOST_ROWS, positive
from tokenmill.dataset.rows import Rows
from tokenmill.errors import UsageError

__all__ = ["Pass", "count_rows"]

UNENDING = 1 << 40
"""More batches than anyone takes."""
MOST_PASSES = 100_000


class Pass(msgspec.Struct, frozen=True):
    """The rows from `start` up to `stop`, counted over all epochs; without a `stop` if rows never end.

    With `drop_last`, rows that do not fill a batch of all ranks are left out, and the next pass begins after them.
    """

    rows: Rows
    epochs: float | None
    size: int
    """Rows of a batch of all ranks; what counts batches may ask for every n-th one instead."""
    drop_last: bool
    start: int = 0
    number: int = 0
    num_steps_before: int = 0
    stop: int | None = None
    end: int | None = None
    """The first row at which no batch of this pass begins."""

    @classmethod
    def first(cls, rows: Rows, epochs: float | None, size: int, *, drop_last: bool) -> Pass:
        """Return the first pass; it has no end while text is being tokenized."""
        stop = count_rows(rows, epochs)
        if drop_last and stop is not None and stop < size:
            raise UsageError(f"drop_last leaves no batch: there are {stop} rows, and a batch of all ranks has {size}")
        end = stop - size + 1 if drop_last and stop is not None else stop
        return cls(rows, epochs, size, drop_last, stop=stop, end=end)

    @property
    def is_last(self) -> bool:
        """Whether there are no rows after this pass."""
        return self.stop is not None and self.stop == self.rows.limit

    def count_left(self, row: int, size: int) -> int:
        """Count the batches that begin from a row on, at a distance of `size`."""
        return UNENDING if self.end is None else max(0, -((row - self.end) // size))

    def count_steps(self, row: int, size: int) -> int:
        """Count the batches before a row of this pass, those of earlier passes included."""
        return self.num_steps_before - (self.start - row) // size

    def following(self) -> Pass:
        """Return the pass after this one, or the first one after the last."""
        if self.is_last or self.stop is None:
            return self.first(self.rows, self.epochs, self.size, drop_last=self.drop_last)
        stop = count_rows(self.rows, self.epochs, self.number + 2)
        assert stop is not None
        return msgspec.structs.replace(
            self,
            start=self.stop,
            number=self.number + 1,
            num_steps_before=self.num_steps_before + self.count_left(self.start, self.size),
            stop=stop,
            end=max(self.stop, stop - self.size + 1) if self.drop_last else stop,
        )

    def find(self, row: int) -> Pass:
        """Return the pass with a row; a row between two passes is the end of the first one."""
        found = self
        if 0 < self.start >= row:
            found = self.first(self.rows, self.epochs, self.size, drop_last=self.drop_last)
        while found.stop is not None and row > found.stop:
            if found.is_last:
                raise UsageError(
                    f"row {row} is past the end of these rows, of which there are {found.stop}; use the rows that the "
                    "state was made with"
                )
            if row > MOST_PASSES * (found.stop - found.start):
                raise UsageError(
                    f"row {row} is more than {MOST_PASSES} iterations of about {found.stop - found.start} rows away; "
                    "pass more epochs"
                )
            found = found.following()
        return found


def count_rows(rows: Rows, epochs: float | None, num_passes: int = 1) -> int | None:
    """Count the rows of some passes of all epochs; None if there is no end, or if it is not known yet."""
    if epochs is None:
        return rows.limit
    epochs = positive(epochs, "epochs", MOST_ROWS // (rows.num_rows if rows.is_known else 1))
    if not rows.is_known:
        return None
    asked = max(num_passes, rows.rows_of_epochs(num_passes * Fraction(str(epochs))))
    return asked if rows.limit is None else min(asked, rows.limit)
