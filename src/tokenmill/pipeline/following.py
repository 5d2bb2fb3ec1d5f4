"""Following a run while it goes on, from this process or another: its shards, as soon as they are published.

A shard is there when its task is in the journal, or when the manifest is. The order is that of the plan and
never that in which tasks happen to end; who follows waits for the next one, not for any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.pipeline.journal import Journal
from tokenmill.pipeline.plan import Plan, Stream, Task
from tokenmill.store.manifest import MANIFEST, ShardInfo, read_manifest

__all__ = ["Follower"]


class Follower:
    """The shards of one split in the order of a plan, each when it is there."""

    def __init__(self, store: Path, plan: Plan, split: str) -> None:
        self._journal = Journal(store)
        self._work: list[Task | Stream] = sorted([*plan.tasks, *plan.streams], key=plan.place)
        self._split = split
        self._at = self._number = 0
        self._finished: dict[str, ShardInfo] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process follows from the start.
        return _follow, (self._journal.store, self._work, self._split)

    @property
    def has_ended(self) -> bool:
        """Whether all shards were given."""
        return self._at == len(self._work)

    def take(self) -> ShardInfo | None:
        """The next shard; None while it is not published, and behind the last one."""
        while not self.has_ended:
            work = self._work[self._at]
            number = self._number if isinstance(work, Task) else self._next_number(work)
            if number is None:
                self._go_on()
                continue
            self._number = number
            is_done, shard = self._look(work.name if isinstance(work, Task) else work.task_name(number))
            if not is_done:
                return None
            self._number += 1
            if isinstance(work, Task):
                self._go_on()
            if shard is not None:
                return shard
        return None

    def _go_on(self) -> None:
        self._at, self._number = self._at + 1, 0

    def _look(self, name: str) -> tuple[bool, ShardInfo | None]:
        """Whether a task is done, and its shard for this split, if there is one."""
        if self._finished is None:
            record = self._journal.record(name)
            if record is not None:
                return True, record.shards.get(self._split)
            # The journal goes after the manifest has come, so what is in neither is not done.
            if not (self._journal.store / MANIFEST).exists():
                return False, None
            shards = read_manifest(self._journal.store).splits[self._split].shards
            self._finished = {shard.name.rpartition("shard-")[2]: shard for shard in shards}
        return True, self._finished.get(name)

    def _next_number(self, stream: Stream) -> int | None:
        """That of the next task of a stream, which has none where one huge document covers a task; None at its end."""
        if self._finished is None:
            numbers = self._journal.ended_stream(stream.input)
            if numbers is None:
                return self._number
        else:
            names = [name for name in self._finished if name.startswith(f"{stream.name}-")]
            numbers = sorted(int(name.partition("-")[2]) for name in names)
        return next((number for number in numbers if number >= self._number), None)


def _follow(store: Path, work: list[Task | Stream], split: str) -> Follower:
    follower = Follower(store, Plan([], [], []), split)
    follower._work = work
    return follower
