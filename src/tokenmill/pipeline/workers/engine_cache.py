"""The engine of a process, which it keeps from task to task and recycles to stay within its share of memory."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec
import psutil

from tokenmill.engines import Engine, SpecialTokens, choose, create, load_tokenizer
from tokenmill.errors import StoreError
from tokenmill.executors.base import Executor
from tokenmill.pipeline.plan.prepare import Job

__all__ = ["EngineCache", "EngineKey", "warm_engine"]

WARM = f"{__name__}:warm"
SMALLEST_CACHE = 100_000_000


class EngineKey(msgspec.Struct, frozen=True):
    """The engine that processes need; equal keys give equal ids."""

    engine: str
    special_tokens: SpecialTokens
    sha256: str
    """The hash of the tokenizer."""

    def load(self, path: str) -> Engine:
        """Load the engine from the tokenizer's file or directory, or return the one that this process keeps."""
        if self in _kept:
            return _kept[self]
        tokenizer = load_tokenizer(path)
        if tokenizer.sha256 != self.sha256:
            raise StoreError(f"the tokenizer in {path} changed while it was read; run the same command again")
        return create(self.engine, tokenizer, self.special_tokens)  # type: ignore[arg-type]


_kept: dict[EngineKey, Engine] = {}


def warm_engine(executor: Executor, source: Path | None, key: EngineKey) -> None:
    """Load the engine before the first process is forked; `source` is a file or directory of its tokenizer."""
    if executor.shares_disk and source is not None:
        executor.warm(WARM, msgspec.json.encode((key, str(source.absolute()))))


def warm(payload: bytes) -> None:
    """Load the engine in the fork server; workers forked from it share the memory."""
    # The first worker gets the same error and reports it.
    with suppress(Exception):
        key, path = msgspec.json.decode(payload, type=tuple[EngineKey, str])
        if key not in _kept:
            _kept.clear()
        _kept[key] = key.load(path)


def guess(path: bytes) -> None:
    """Load the engine that a run with this tokenizer needs if it has default flags, while the run is being prepared.

    If the run needs another, `warm` loads that one instead.
    """
    with suppress(Exception):
        if Path(path.decode()).exists():
            tokenizer = load_tokenizer(path.decode())
            engine = choose(tokenizer).engine
            _kept[EngineKey(engine, "as-text", tokenizer.sha256)] = create(engine, tokenizer)


class EngineCache:
    """The engine of one job, loaded once and recycled when its cache has outgrown the share of this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process = psutil.Process()
        self._memory_limit = job.worker_bytes
        self.num_recycled = 0

    @property
    def memory_bytes(self) -> int:
        """How much memory the process takes now."""
        return int(self._process.memory_info().rss)

    @cached_property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        settings = self._job.settings
        key = EngineKey(self._job.engine, settings.policy.special_tokens, settings.tokenizer_sha256)
        engine = key.load(f"{self._job.store}/tokenizer")
        # Leave the cache some room even with a small budget, or the engine would be recycled all the time.
        self._memory_limit = max(self._job.worker_bytes, self.memory_bytes + SMALLEST_CACHE)
        return engine

    def relieve(self) -> None:
        """Recycle the engine if the process has grown past its share of memory."""
        if self.memory_bytes > self._memory_limit:
            self.engine.recycle()
            self.num_recycled += 1
