"""Whether rows come from the disk or from memory, as seen from the page faults of this process."""

from __future__ import annotations

import resource

__all__ = ["FIRST_ROWS", "Disk"]

FIRST_ROWS = 64
SLOW_ROWS = 16_384
"""After a page fault that waited for the disk, read ahead for this many rows."""


class Disk:
    """Detects by major page faults that rows come from the disk and not from memory.

    Reading ahead costs half a microsecond a row, in vain if everything is in memory already. So it is on at the start
    and for a while after such a fault.
    """

    def __init__(self) -> None:
        self.rows_left = FIRST_ROWS
        """Read ahead until this many more rows are filled."""
        self._rows_unseen = 0
        self._num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._has_faulted = False

    @property
    def is_slow(self) -> bool:
        """Whether the next rows should be read ahead."""
        return self.rows_left > 0

    @property
    def has_waited(self) -> bool:
        """Whether recent rows came from the disk."""
        return self._has_faulted and self.is_slow

    def observe(self, num_rows: int) -> None:
        """Look for page faults while this many rows were filled; another thread may have caused them, too.

        While there are none, check only now and then.
        """
        self.rows_left -= num_rows
        self._rows_unseen += num_rows
        if self.rows_left <= 0 and self._rows_unseen < FIRST_ROWS:
            return
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if num_faults - self._num_faults > self._rows_unseen // 8:
            self.rows_left, self._has_faulted = SLOW_ROWS, True
        self._num_faults, self._rows_unseen = num_faults, 0
