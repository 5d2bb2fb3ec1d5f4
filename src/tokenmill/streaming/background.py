"""A run in a thread, and its shards as soon as they are published.

Several processes may need the same store: the ranks of a training, or its loaders for `train` and `val`. One of them
locks the directory and tokenizes. The others wait, and take over if it dies. All of them follow the journal, in this
process or another one.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from tokenmill.display import Silence
from tokenmill.executors.local import LocalExecutor
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.journal.locks import StoreInUseError, find_holders
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task
from tokenmill.pipeline.run import make_store
from tokenmill.store.manifest import MANIFEST, ShardInfo, read_manifest

__all__ = ["BackgroundRun", "follow"]

NICENESS = 10
"""Workers yield the CPU to the training, which occupies a GPU."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 10.0


class BackgroundRun:
    """A run in a thread; `check` raises the error that ended it."""

    def __init__(self, prepared: Prepared, plan: Plan) -> None:
        self._prepared = prepared
        self._plan = plan
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        # `_stop_all` joins it on exit: a daemon thread that is killed in the middle of a library crashes the program.
        self._thread = threading.Thread(target=self._run, name="tokenmill-tokenize", daemon=True)
        self._thread.start()
        _running.add(self)

    def check(self) -> None:
        """Raise the error that ended the run, if one did."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Let the run stop; a later one resumes it."""
        self._stopped.set()

    def stop(self) -> None:
        """Cancel the run, and join its thread."""
        self.cancel()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not find_holders(Path(self._prepared.request.out)):
                    # Another process may lock the store first.
                    with suppress(StoreInUseError), closing(LocalExecutor(NICENESS)) as executor:
                        executor.warm(PRELOAD, b"")
                        make_store(self._prepared, _StopDisplay(self._stopped), executor, plan=self._plan)
                        return
                self._stopped.wait(LOOK_SECONDS)
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error


class _StoppedError(BaseException):
    """The program exits, or no longer needs the run."""


class _StopDisplay(Silence):
    """A display that shows nothing, and stops the run at its next update after `cancel`."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped

    def update(self, snapshot: Any) -> None:
        """Stop the run if it was cancelled; the run calls this several times a second."""
        if self._stopped.is_set():
            raise _StoppedError("the program that reads the store has ended")


_running: weakref.WeakSet[BackgroundRun] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for background in list(_running):
        background.stop()


def follow(store: Path, plan: Plan, split: str) -> Iterator[ShardInfo | None]:
    """Yield the shards of a split in plan order, and None while the next one is not published.

    A shard is published when its task is in the journal, or when the manifest exists.
    """
    journal = Journal(store)
    finished: dict[str, ShardInfo] | None = None
    works: list[Task | Stream] = sorted([*plan.tasks, *plan.streams], key=plan.place)
    for work in works:
        number = 0
        while True:
            if isinstance(work, Task):
                numbers: list[int] | None = [0]
            elif finished is None:
                numbers = journal.ended_stream(work.input)
            else:
                names = [name for name in finished if name.startswith(f"{work.name}-")]
                numbers = sorted(int(name.partition("-")[2]) for name in names)
            if numbers is not None:
                # A huge document may skip numbers.
                later = next((known for known in numbers if known >= number), None)
                if later is None:
                    break
                number = later
            name = work.name if isinstance(work, Task) else work.task_name(number)
            record = journal.record(name) if finished is None else None
            if record is not None:
                shard = record.shards.get(split)
            else:
                # The journal is removed after the manifest is written, so a task in neither is not done.
                if finished is None and not (store / MANIFEST).exists():
                    yield None
                    continue
                if finished is None:
                    shards = read_manifest(store).splits[split].shards
                    finished = {shard.name.rpartition("shard-")[2]: shard for shard in shards}
                shard = finished.get(name)
            number += 1
            if shard is not None:
                yield shard
