"""One process at work: an engine, kept from task to task and within its memory, and reports of what was done."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from tokenmill.engines import Engine, create, load_tokenizer
from tokenmill.errors import StoreError
from tokenmill.executors.base import Executor
from tokenmill.pipeline.messages import WORKER, Progress
from tokenmill.pipeline.plan import Task
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.task import Job, TaskOutput, TaskRunner

__all__ = ["Mill", "WarmJob", "keep_engine"]

REPORT_SECONDS = 0.25
SMALLEST_CACHE = 100_000_000

_kept: dict[str, Engine] = {}


class WarmJob(msgspec.Struct, frozen=True):
    """Which engine workers will need."""

    path: str
    """A file or directory of the tokenizer."""
    engine: str
    special_tokens: str
    sha256: str

    @classmethod
    def of(cls, job: Job) -> WarmJob:
        """What a job needs."""
        path = str(Path(job.store) / "tokenizer")
        return cls(path, job.engine, job.settings.policy.special_tokens, job.settings.tokenizer_sha256)

    def begin(self, executor: Executor) -> None:
        """Have the engine loaded before the first worker is started."""
        executor.warm(f"{WORKER}:warm", msgspec.json.encode(self))

    @property
    def key(self) -> str:
        """Engines with the same key give the same ids."""
        return f"{self.engine} {self.special_tokens} {self.sha256}"


def keep_engine(job: WarmJob) -> None:
    """Load an engine ahead of the processes that are forked from this one, which share its memory."""
    if job.key not in _kept:
        _kept[job.key] = _load(job)


def _load(job: WarmJob) -> Engine:
    tokenizer = load_tokenizer(job.path)
    if tokenizer.sha256 != job.sha256:
        raise StoreError(f"the tokenizer in {job.path} changed while it was read; run the same command again")
    return create(job.engine, tokenizer, job.special_tokens)  # type: ignore[arg-type]


class Mill:
    """Runs tasks of one job; `tell` hears of the work several times a second."""

    def __init__(self, job: Job, tell: Callable[[Progress], None]) -> None:
        self._job = job
        self._tell = tell
        self._engine: Engine | None = None
        self._runner: TaskRunner | None = None
        self._process = psutil.Process()
        self._memory_limit = job.worker_bytes
        self._pending = Stages()
        self._num_recycled = 0
        self._reported = time.monotonic()

    @property
    def memory_bytes(self) -> int:
        """What the process takes now."""
        return int(self._process.memory_info().rss)

    def run(self, task: Task, run: str) -> TaskOutput:
        """Tokenize one task; it is durable but has no name yet."""
        if self._runner is None:
            self._runner = TaskRunner(self._job, self.load_engine(), self._report, self._relieve)
        output = self._runner.run(task, run)
        self._flush()
        return output

    def load_engine(self) -> Engine:
        """The engine of the job."""
        if self._engine is None:
            needed = WarmJob.of(self._job)
            self._engine = _kept.get(needed.key) or _load(needed)
            # Whatever the budget, a cache needs some room, or the engine would be recycled all the time.
            self._memory_limit = max(self._job.worker_bytes, self.memory_bytes + SMALLEST_CACHE)
        return self._engine

    def _report(self, stages: Stages) -> None:
        """Tell the run what was done, now and then."""
        self._pending.add(stages)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._flush()

    def _relieve(self) -> None:
        """Recycle an engine whose cache has outgrown the worker's share of memory."""
        if self.memory_bytes > self._memory_limit:
            self.load_engine().recycle()
            self._num_recycled += 1

    def _flush(self) -> None:
        self._tell(Progress(self._pending, self._num_recycled))
        self._pending, self._num_recycled = Stages(), 0
        self._reported = time.monotonic()
