"""Watch a run: update the display, and write `progress.json` for `tokenmill status` and `run.json` at the end."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from tokenmill.display import Display, Machine, Snapshot, WorkerMoment
from tokenmill.errors import TokenmillError
from tokenmill.machine import tree_memory
from tokenmill.pipeline.counts import Counts
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.attempts import AttemptInfo, Moment, read_attempts, read_progress, write_run_file
from tokenmill.pipeline.journal.mirror import JOURNAL, Mirror
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.pipeline.plan.ranks import WHOLE, Share

__all__ = ["Observer"]

WRITE_SECONDS = 1.0

PUSH_SECONDS = 10.0
"""The interval of uploads to a bucket, where each request costs money."""

MOST_MOMENTS = 400

FIRST_MOMENT_SECONDS = 0.5


class Observer:
    """Turns counts into snapshots for the display and for `progress.json`."""

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
        self.peak_memory_bytes = 0
        """The peak memory of the process tree, as sampled."""
        self._memory = 0
        self._cores: list[float] = []
        self._disk_free = 0
        self._counts: Counts | None = None
        self.snapshot: Snapshot | None = None
        """The last snapshot."""
        self._reason: str | None = None
        self._history: list[Moment] = []
        self._moment_seconds = FIRST_MOMENT_SECONDS
        # An attempt that was killed could not record its end.
        self._attempts = [
            msgspec.structs.replace(attempt, completed=bool(attempt.completed)) for attempt in read_progress(self._path)
        ]
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def observe(self, counts: Counts) -> None:
        """Show the progress of the run; called several times a second, first when tasks begin.

        The history keeps a moment at intervals. If there are too many, every other one goes and the interval doubles.
        """
        snapshot = self._take_snapshot(counts)
        self._display.update(snapshot)
        if not self._history or snapshot.seconds - self._history[-1].seconds >= self._moment_seconds:
            self._history.append(
                Moment(round(snapshot.seconds, 2), snapshot.num_text_bytes, snapshot.num_tokens, snapshot.memory_bytes)
            )
        if len(self._history) > MOST_MOMENTS:
            del self._history[1::2]
            self._moment_seconds *= 2
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._written = time.monotonic()
            self._write_attempts(completed=None)

    def _take_snapshot(self, counts: Counts) -> Snapshot:
        if self._clock is None:
            # Tasks may have started before the first call, while the parity gate was running.
            self._clock = counts.started if counts.started is not None else time.monotonic()
        self._counts = counts
        work, slowest, now = counts.work, counts.slowest, time.monotonic()
        workers = []
        for name, worker in sorted(counts.workers.items()):
            seconds = now - worker.task_started if worker.task else 0.0
            workers.append(
                WorkerMoment(
                    name=name,
                    pid=worker.pid,
                    task=worker.task,
                    input=worker.input,
                    task_seconds=round(seconds, 2),
                    bytes_per_second=round(worker.num_bytes / max(worker.seconds + seconds, 1e-3)),
                )
            )
        machine = Machine(
            cores=self._cores,
            disk_free=self._disk_free,
            stages=work.shares,
            workers=workers,
            slowest_task=slowest.task if slowest is not None else "",
            slowest_input=slowest.input if slowest is not None else "",
            slowest_seconds=round(slowest.seconds, 2) if slowest is not None else 0.0,
        )
        memory = self._memory if counts.memory_bytes is None else counts.memory_bytes
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory)
        self.snapshot = Snapshot(
            seconds=now - self._clock,
            total_bytes=counts.total_bytes,
            done_bytes=counts.done_bytes,
            resumed_bytes=counts.resumed_bytes,
            num_text_bytes=work.num_bytes,
            num_documents=work.num_documents,
            num_tokens=work.num_tokens,
            num_rejects=work.num_rejects,
            num_workers=counts.num_workers,
            num_tasks_done=counts.num_tasks_done,
            memory_bytes=memory,
            memory_limit=self._budget.memory_bytes,
            bottleneck=work.bottleneck,
            machine=machine,
        )
        return self.snapshot

    def close(self, *, completed: bool, reason: str | None = None, counts: Counts | None = None) -> None:
        """End the attempt; `reason` is the error message if it ended early.

        `counts` is its progress if it ended before the first snapshot. A completed attempt that had nothing to do is
        recorded only if it is the first.
        """
        if self.snapshot is None and counts is not None and not (completed and self._attempts):
            self._take_snapshot(counts)
        if completed and self.snapshot is not None:
            # Some bytes may stay unread because of --limit, or after the last document of a stream.
            self._display.update(msgspec.structs.replace(self.snapshot, done_bytes=self.snapshot.total_bytes))
        self._reason = reason
        self._stop.set()
        self._sampler.join()
        self._display.close()
        self._write_attempts(completed=completed)
        if self._mirror is not None:
            self._push(self._mirror)

    def mark_failed(self, reason: str) -> None:
        """Record that the attempt failed after its tasks were done, while it finished the run."""
        self._reason = reason
        self._write_attempts(completed=False)
        if self._mirror is not None:
            self._push(self._mirror)

    def write_run_file(self, inputs: list[InputFile]) -> None:
        """Write run.json beside the manifest, or add this attempt to the file of another rank."""
        own = [*self._attempts, *self._current_attempt(completed=True)]
        known = {(a.rank, a.world_size, a.started) for a in own}
        others = [a for a in read_attempts(self._store) if (a.rank, a.world_size, a.started) not in known]
        write_run_file(self._store, [*others, *own], inputs)

    def _sample(self) -> None:
        """Sample memory, cores and disk, using less than a hundredth of a core."""
        process = psutil.Process()
        while True:
            # Measure CPU time, not wall time: on busy cores, sampling takes longer but costs no more.
            started = time.thread_time()
            with suppress(psutil.Error, OSError):
                self._memory = tree_memory(process)
                self._cores = [round(busy / 100, 2) for busy in psutil.cpu_percent(percpu=True)]
                self._disk_free = shutil.disk_usage(self._store).free
            self.peak_memory_bytes = max(self.peak_memory_bytes, self._memory)
            if self._mirror is not None and time.monotonic() - self._pushed > PUSH_SECONDS:
                self._push(self._mirror)
            if self._stop.wait(max(0.5, 100 * (time.thread_time() - started))):
                return

    def _current_attempt(self, *, completed: bool | None) -> list[AttemptInfo]:
        if self.snapshot is None or self._counts is None:
            return []
        attempt = AttemptInfo(
            pid=os.getpid(),
            started=self._started,
            completed=completed,
            peak_memory_bytes=self.peak_memory_bytes,
            num_recycled=self._counts.num_recycled,
            num_retried=self._counts.num_retried,
            last=self.snapshot,
            reason=self._reason,
            history=self._history,
            host=socket.gethostname(),
            heard=time.time(),
            rank=self._share.rank,
            world_size=self._share.world_size,
        )
        return [attempt]

    def _write_attempts(self, *, completed: bool | None) -> None:
        """Write `progress.json` if possible; a full disk must not hide the original error."""
        with suppress(OSError):
            temporary = self._path.with_suffix(".json.tmp")
            temporary.write_bytes(msgspec.json.encode([*self._attempts, *self._current_attempt(completed=completed)]))
            temporary.replace(self._path)

    def _push(self, mirror: Mirror) -> None:
        """Upload `progress.json` to the bucket; ignore errors, as the run does not need it."""
        self._pushed = time.monotonic()
        with suppress(TokenmillError, OSError):
            mirror.put_if_unfinished(f"{JOURNAL}/{self._path.name}", self._path.read_bytes())
