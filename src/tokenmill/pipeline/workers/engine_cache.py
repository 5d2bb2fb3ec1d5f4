"""The engine that a process keeps from task to task, within its share of memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import psutil

from tokenmill.engines import Engine, SpecialTokens, create, load_tokenizer
from tokenmill.errors import StoreError
from tokenmill.pipeline.job import Job

__all__ = ["EngineCache", "EngineKey", "Warming", "keep_engine"]

SMALLEST_CACHE = 100_000_000


class EngineKey(msgspec.Struct, frozen=True):
    """The engine that processes need; equal keys give equal ids."""

    engine: str
    special_tokens: SpecialTokens
    sha256: str
    """The hash of the tokenizer."""

    def load(self, path: Path) -> Engine:
        """Load the engine from the tokenizer's files, or return the one that this process keeps."""
        if self in _kept:
            return _kept[self]
        tokenizer = load_tokenizer(str(path))
        if tokenizer.sha256 != self.sha256:
            raise StoreError(f"the tokenizer in {path} changed while it was read; run the same command again")
        return create(self.engine, tokenizer, self.special_tokens)  # type: ignore[arg-type]


_kept: dict[EngineKey, Engine] = {}


class Warming(msgspec.Struct, frozen=True):
    """An engine to load before processes are forked, and a file or directory of its tokenizer."""

    key: EngineKey
    path: str


def keep_engine(warming: Warming) -> None:
    """Load an engine before processes are forked from this one, which then share its memory."""
    _kept[warming.key] = warming.key.load(Path(warming.path))


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
        engine = key.load(Path(self._job.store) / "tokenizer")
        # Whatever the budget, a cache needs some room, or the engine would be recycled all the time.
        self._memory_limit = max(self._job.worker_bytes, self.memory_bytes + SMALLEST_CACHE)
        return engine

    def relieve(self) -> None:
        """Recycle the engine if the process has grown past its share of memory."""
        if self.memory_bytes > self._memory_limit:
            self.engine.recycle()
            self.num_recycled += 1
