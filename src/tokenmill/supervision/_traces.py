"""Keep the traces of the shapes that occur most, within bounds of memory and of wasted recordings."""

from __future__ import annotations

from typing import Any

from tokenmill.supervision._recorder import Trace

__all__ = ["Traces"]

MOST_TRACES = 8
"""The traces of one shape. A template with more branches is rendered each time."""
MOST_LEAVES = 50_000
"""The leaves of all traces, which need about 1 kB each. Shapes that were not seen for longest go."""
MOST_SHAPES, MOST_SEEN = 5_000, 100_000
MOST_FAILURES, RETRY = 20, 100
"""After so many shapes in a row that cannot be recorded, it is tried with one in a hundred."""

Shape = tuple[Any, ...]


class Traces:
    """Traces by shape, those that were used last at the end."""

    def __init__(self) -> None:
        self._known: dict[Shape, list[Trace] | None] = {}
        self._seen: set[int] = set()
        self._num_leaves = self._num_failures = self._num_waiting = 0

    def __len__(self) -> int:
        return sum(len(traces or ()) for traces in self._known.values())

    def find(self, shape: Shape, leaves: list[Any]) -> Trace | None:
        """Return the trace that is valid for a conversation."""
        if shape not in self._known:
            return None
        traces = self._known[shape] = self._known.pop(shape)
        return next((trace for trace in traces or () if trace.fits(leaves)), None)

    def wants(self, shape: Shape) -> bool:
        """Whether a conversation of this shape, which has no trace, should be recorded.

        A recording takes longer than a rendering, so it is made for the second conversation of a shape.
        """
        if hash(shape) not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            self._seen.add(hash(shape))
            return False
        traces = self._known.get(shape, [])
        if traces is None or len(traces) == MOST_TRACES:
            return False
        self._num_waiting += 1
        return self._num_failures < MOST_FAILURES or self._num_waiting % RETRY == 0

    def add(self, shape: Shape, trace: Trace | None) -> None:
        """Keep a trace; None says that conversations of this shape cannot be recorded."""
        if trace is None:
            self._known[shape] = None
            self._num_failures += 1
        else:
            self._known[shape] = [*(self._known.pop(shape, None) or ()), trace]
            self._num_failures = 0
            self._num_leaves += trace.num_leaves
        while self._num_leaves > MOST_LEAVES or len(self._known) > MOST_SHAPES:
            dropped = self._known.pop(next(iter(self._known))) or ()
            self._num_leaves -= sum(one.num_leaves for one in dropped)
