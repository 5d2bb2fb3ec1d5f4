"""Watching a run: the display, `progress.json` for `tokenmill status`, and `run.json` at the end.

How a run went (speed, memory, machine) is kept apart from the manifest, which must be equal
for equal inputs.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tokenmill.errors import StoreError, TokenmillError
from tokenmill.files import write_durably
from tokenmill.machine import processor_name, tree_memory, usable_cores
from tokenmill.pipeline.budget import Budget
from tokenmill.pipeline.journal import Journal
from tokenmill.pipeline.mirroring import JOURNAL, Mirror
from tokenmill.pipeline.sharing import WHOLE, Share
from tokenmill.pipeline.tally import Tally, WorkerTally
from tokenmill.progress import Display, Machine, Snapshot, WorkerMoment
from tokenmill.store.manifest import decode_sealed, encode_sealed

__all__ = ["AttemptInfo", "Moment", "Observer", "RunInfo", "read_attempts", "write_run_file"]

WRITE_SECONDS = 1.0
PUSH_SECONDS = 10.0
"""To a bucket: a request costs."""
CONTINUE = "; run the same command again"
MOST_MOMENTS = 400
FIRST_MOMENT_SECONDS = 0.5


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """How far an attempt was after some seconds."""

    seconds: float
    num_text_bytes: int
    num_tokens: int
    memory_bytes: int


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a run, finished or not."""

    pid: int
    started: float
    completed: bool | None
    """None while it runs."""
    peak_memory_bytes: int
    num_recycled: int
    num_retried: int
    last: Snapshot
    reason: str | None = None
    """Why it ended early, in words; None where it did not, or was killed and could not say."""
    history: list[Moment] = []
    """At most a few hundred moments, evenly spread over the attempt."""
    host: str = ""
    heard: float = 0.0
    """When it was written down."""
    rank: int = 0
    world_size: int = 1
    """One of one where the run was not shared."""

    @property
    def cause(self) -> str | None:
        """The reason without what to do about it: that was for whoever stopped it, then."""
        return None if self.reason is None else self.reason.partition(CONTINUE)[0].rstrip(".")

    @property
    def share(self) -> Share:
        """Which part of the run it was at."""
        return Share(self.rank, self.world_size)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: how the run went."""

    checksum: str = ""
    machine: dict[str, Any]
    attempts: list[AttemptInfo]
    origins: list[str] = []
    """What inputs were fetched from, down to the revision: `hf://datasets/owner/name@5f2c91...`."""


class Observer:
    """Turns tallies into snapshots for people and programs."""

    def __init__(
        self, store: Path, display: Display, budget: Budget, share: Share = WHOLE, mirror: Mirror | None = None
    ) -> None:
        self._store = store
        self._share = share
        self._mirror = mirror
        self._pushed = time.monotonic()
        self._path = store / ".tasks" / (f"progress-{share.name}.json" if share.name else "progress.json")
        self._display = display
        self._budget = budget
        self._started = time.time()
        self._clock: float | None = None
        self._written = 0.0
        self._peak = 0
        self._memory = 0
        self._cores: list[float] = []
        self._disk_free = 0
        self._tally: Tally | None = None
        self._snapshot: Snapshot | None = None
        self._reason: str | None = None
        self._history: list[Moment] = []
        self._moment_seconds = FIRST_MOMENT_SECONDS
        self._attempts = self._earlier_attempts()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def snapshot(self) -> Snapshot | None:
        """The last moment that was observed."""
        return self._snapshot

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory the process tree was seen to take."""
        return self._peak

    def observe(self, tally: Tally) -> None:
        """Show how far the run is; called several times a second, first when tasks begin."""
        moment = self._note(tally)
        self._display.update(moment)
        self._remember(moment)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._written = time.monotonic()
            self._write_attempts(completed=None)

    def _note(self, tally: Tally) -> Snapshot:
        if self._clock is None:
            # Tasks may have begun before anything was shown, while the parity gate was held.
            self._clock = tally.started if tally.started is not None else time.monotonic()
        self._tally = tally
        work = tally.work
        memory = self._memory if tally.memory_bytes is None else tally.memory_bytes
        self._peak = max(self._peak, memory)
        self._snapshot = Snapshot(
            seconds=time.monotonic() - self._clock,
            total_bytes=tally.total_bytes,
            done_bytes=tally.done_bytes,
            resumed_bytes=tally.resumed_bytes,
            num_text_bytes=work.num_bytes,
            num_documents=work.num_documents,
            num_tokens=work.num_tokens,
            num_rejects=work.num_rejects,
            num_workers=tally.num_workers,
            num_tasks_done=tally.num_tasks_done,
            memory_bytes=memory,
            memory_limit=self._budget.memory_bytes,
            bottleneck=work.bottleneck,
            machine=self._look_at_machine(tally),
        )
        return self._snapshot

    def _look_at_machine(self, tally: Tally) -> Machine:
        slowest = tally.slowest
        return Machine(
            cores=self._cores,
            disk_free=self._disk_free,
            stages=tally.work.shares,
            workers=[_describe_worker(name, worker) for name, worker in sorted(tally.workers.items())],
            slowest_task=slowest.task if slowest is not None else "",
            slowest_input=slowest.input if slowest is not None else "",
            slowest_seconds=round(slowest.seconds, 2) if slowest is not None else 0.0,
        )

    def _remember(self, now: Snapshot) -> None:
        """Keep a moment now and then; every other one is dropped when there are too many."""
        if self._history and now.seconds - self._history[-1].seconds < self._moment_seconds:
            return
        self._history.append(Moment(round(now.seconds, 2), now.num_text_bytes, now.num_tokens, now.memory_bytes))
        if len(self._history) > MOST_MOMENTS:
            del self._history[1::2]
            self._moment_seconds *= 2

    def close(self, *, completed: bool, reason: str | None = None, tally: Tally | None = None) -> None:
        """The attempt has ended; `reason` is what the user is told when it ended early.

        `tally` is how far it was, for one that ended before there was anything to observe. If it had nothing to do,
        that is of interest in a first attempt only.
        """
        if self._snapshot is None and tally is not None and not (completed and self._attempts):
            self._note(tally)
        self._reason = reason
        self._stop.set()
        self._sampler.join()
        self._display.close()
        self._write_attempts(completed=completed)
        self._push()

    def retract(self, reason: str) -> None:
        """The tasks of an attempt are done, and yet it ended early, while it was ending the run."""
        self._reason = reason
        self._write_attempts(completed=False)
        self._push()

    def write_run_file(self) -> None:
        """Write run.json beside the manifest, or add to what another rank has written there."""
        own = [*self._attempts, *self._current(completed=True)]
        known = {(attempt.share, attempt.started) for attempt in own}
        others = [a for a in read_attempts(self._store) if (a.share, a.started) not in known]
        write_run_file(self._store, [*others, *own])

    def _sample(self) -> None:
        """Look at memory, cores and disk, as often as that takes less than a hundredth of a core."""
        process = psutil.Process()
        while True:
            # Time of this thread, not of the clock: on busy cores, looking takes long and costs no more.
            started = time.thread_time()
            with suppress(psutil.Error, OSError):
                self._memory = tree_memory(process)
                self._cores = [round(busy / 100, 2) for busy in psutil.cpu_percent(percpu=True)]
                self._disk_free = shutil.disk_usage(self._store).free
            self._peak = max(self._peak, self._memory)
            if time.monotonic() - self._pushed > PUSH_SECONDS:
                self._push()
            if self._stop.wait(max(0.5, 100 * (time.thread_time() - started))):
                return

    def _current(self, *, completed: bool | None) -> list[AttemptInfo]:
        if self._snapshot is None or self._tally is None:
            return []
        attempt = AttemptInfo(
            pid=os.getpid(),
            started=self._started,
            completed=completed,
            peak_memory_bytes=self._peak,
            num_recycled=self._tally.num_recycled,
            num_retried=self._tally.num_retried,
            last=self._snapshot,
            reason=self._reason,
            history=self._history,
            host=socket.gethostname(),
            heard=time.time(),
            rank=self._share.rank,
            world_size=self._share.world_size,
        )
        return [attempt]

    def _write_attempts(self, *, completed: bool | None) -> None:
        """Best effort: a full disk must not hide the error that matters."""
        with suppress(OSError):
            temporary = self._path.with_suffix(".json.tmp")
            temporary.write_bytes(msgspec.json.encode([*self._attempts, *self._current(completed=completed)]))
            temporary.replace(self._path)

    def _push(self) -> None:
        """Tell others how the run goes, where its store is in a bucket; nothing depends on it."""
        self._pushed = time.monotonic()
        if self._mirror is not None:
            with suppress(TokenmillError, OSError):
                self._mirror.note(f"{JOURNAL}/{self._path.name}", self._path.read_bytes())

    def _earlier_attempts(self) -> list[AttemptInfo]:
        return [_ended(attempt) for attempt in _read_progress(self._path)]


def read_attempts(store: Path) -> list[AttemptInfo]:
    """All attempts at a run, by all ranks, in the order in which they began."""
    ended = _read_run_file(store)
    if ended is not None:
        return ended.attempts
    found = [attempt for path in (store / ".tasks").glob("progress*.json") for attempt in _read_progress(path)]
    return sorted(found, key=lambda attempt: attempt.started)


def write_run_file(store: Path, attempts: list[AttemptInfo]) -> None:
    """Write run.json beside the manifest, or other attempts into it; `machine` is the one that ended the run."""
    info = _read_run_file(store) or RunInfo(
        machine={
            "system": platform.platform(),
            "processor": processor_name(),
            "cores": usable_cores(),
            "memory_bytes": int(psutil.virtual_memory().total),
            "python": platform.python_version(),
        },
        attempts=[],
        origins=_origins(store),
    )
    ended = sorted(map(_ended, attempts), key=lambda attempt: attempt.started)
    write_durably(store / "run.json", encode_sealed(msgspec.structs.replace(info, attempts=ended)))


def _read_run_file(store: Path) -> RunInfo | None:
    """How a run went that has ended; None of one that goes on, whatever an earlier one has left."""
    if not (store / ".tasks").is_dir():
        with suppress(OSError, StoreError):
            return decode_sealed((store / "run.json").read_bytes(), RunInfo, store / "run.json")
    return None


def _origins(store: Path) -> list[str]:
    """What inputs were fetched from, as the plan of the run has it."""
    with suppress(StoreError):
        return sorted({file.origin for file in Journal(store).saved_plan().inputs if file.origin is not None})
    return []


def _read_progress(path: Path) -> list[AttemptInfo]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[AttemptInfo])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []


def _ended(attempt: AttemptInfo) -> AttemptInfo:
    """An attempt of which nothing will be heard any more."""
    return attempt if attempt.completed else msgspec.structs.replace(attempt, completed=False)


def _describe_worker(name: str, worker: WorkerTally) -> WorkerMoment:
    now = time.monotonic() - worker.task_started if worker.task else 0.0
    return WorkerMoment(
        name=name,
        pid=worker.pid,
        task=worker.task,
        input=worker.input,
        task_seconds=round(now, 2),
        bytes_per_second=round(worker.num_bytes / max(worker.seconds + now, 1e-3)),
    )
