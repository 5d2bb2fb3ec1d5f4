"""A call as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.pipeline.workers.messages import Order, Report, RunGate, RunTask

__all__ = ["NOTHING", "Item"]

NOTHING = Report()


@dataclass(eq=False)
class Item:
    """A call as the run sees it: what it is for, and how much of it has been counted."""

    name: str
    input: str
    order: Order
    disk_bytes: int = 0
    credit: int = 0
    """How many of its bytes count as done."""
    worker: str | None = None
    """The process that runs it."""
    report: Report = NOTHING
    num_tasks: int = 0
    """How many tasks its lost attempts have published since it was submitted."""

    @property
    def description(self) -> str:
        """What it does, for messages."""
        if isinstance(self.order, RunGate):
            return "taking the sample for the parity gate"
        verb = f"task {self.name} of" if isinstance(self.order, RunTask) else "reading"
        return f"{verb} {self.input}"
