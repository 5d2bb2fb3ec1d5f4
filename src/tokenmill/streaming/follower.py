"""The shards of a run as soon as they are published, while it continues in this process or another one.

A shard is published when its task is in the journal, or when the manifest exists. A follower waits for the next shard
in plan order, not for whichever is published first.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task
from tokenmill.store.manifest import MANIFEST, ShardInfo, read_manifest

__all__ = ["Follower"]


class Follower:
    """The shards of one split in plan order, each as soon as it is published."""

    def __init__(self, store: Path, plan: Plan, split: str) -> None:
        self._journal = Journal(store)
        self._work: list[Task | Stream] = sorted([*plan.tasks, *plan.streams], key=plan.place)
        self._split = split
        self._at = self._number = 0
        self._finished: dict[str, ShardInfo] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all shards were taken."""
        return self._at == len(self._work)

    def take(self) -> ShardInfo | None:
        """Return the next shard; None while it is not published, and after the last one."""
        while not self.has_ended:
            work = self._work[self._at]
            number = self._number if isinstance(work, Task) else self._next_number(work)
            if number is None:
                self._next_work()
                continue
            self._number = number
            is_done, shard = self._look(work.name if isinstance(work, Task) else work.task_name(number))
            if not is_done:
                return None
            self._number += 1
            if isinstance(work, Task):
                self._next_work()
            if shard is not None:
                return shard
        return None

    def _next_work(self) -> None:
        self._at, self._number = self._at + 1, 0

    def _look(self, name: str) -> tuple[bool, ShardInfo | None]:
        """Return whether a task is done, and its shard of this split, if it has one."""
        if self._finished is None:
            record = self._journal.record(name)
            if record is not None:
                return True, record.shards.get(self._split)
            # The journal is removed after the manifest is written, so a task in neither is not done.
            if not (self._journal.store / MANIFEST).exists():
                return False, None
            shards = read_manifest(self._journal.store).splits[self._split].shards
            self._finished = {shard.name.rpartition("shard-")[2]: shard for shard in shards}
        return True, self._finished.get(name)

    def _next_number(self, stream: Stream) -> int | None:
        """Return the number of the next task of a stream; None at its end. A huge document may skip numbers."""
        if self._finished is None:
            numbers = self._journal.ended_stream(stream.input)
            if numbers is None:
                return self._number
        else:
            names = [name for name in self._finished if name.startswith(f"{stream.name}-")]
            numbers = sorted(int(name.partition("-")[2]) for name in names)
        return next((number for number in numbers if number >= self._number), None)
