"""The state of a run at one moment, as displays show it and `run.json` keeps it."""

from __future__ import annotations

import msgspec

from tokenmill.formatting import format_bytes, format_count, format_seconds, plural

__all__ = ["Machine", "Preparation", "Snapshot", "WorkerMoment"]


class WorkerMoment(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is doing."""

    name: str
    pid: int
    task: str
    """Empty while the worker is idle."""
    input: str
    task_seconds: float
    bytes_per_second: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """How a run uses its machine, which shows what limits its speed."""

    cores: list[float]
    """How busy each core is, from 0 to 1."""
    disk_free: int
    stages: dict[str, float]
    """The share of all workers' time that each stage took."""
    workers: list[WorkerMoment]
    slowest_task: str
    slowest_input: str
    slowest_seconds: float
    """Of the finished tasks; 0 before the first one has finished."""

    def line(self) -> str:
        """Summarize cores, disk and stages in one line."""
        busy = sum(self.cores) / max(1, len(self.cores))
        stages = ", ".join(f"{name} {share:.0%}" for name, share in self.stages.items() if share >= 0.005)
        return f"{len(self.cores)} cores {busy:.0%} busy, {format_bytes(self.disk_free)} of disk free; {stages}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run at one moment."""

    seconds: float
    """Since the attempt began."""
    startup_seconds: float = 0.0
    """How long it took until the first text was read: finding inputs, loading the tokenizer, starting processes."""
    total_bytes: int
    done_bytes: int
    resumed_bytes: int
    num_text_bytes: int
    num_documents: int
    num_tokens: int
    num_rejects: int
    num_workers: int
    num_tasks_done: int
    memory_bytes: int
    memory_limit: int
    bottleneck: str
    input_rate: float = 0.0
    """Bytes of inputs per second, in the last seconds."""
    text_rate: float = 0.0
    token_rate: float = 0.0
    machine: Machine | None = None

    @property
    def fraction(self) -> float:
        """The share of the input that is done, including earlier attempts."""
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 1.0

    @property
    def work_seconds(self) -> float:
        """The time since the first text was read."""
        return max(0.0, self.seconds - self.startup_seconds)

    @property
    def text_per_second(self) -> float:
        """Bytes of text per second of all of this attempt, without its start-up."""
        return self.num_text_bytes / self.work_seconds if self.work_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all of this attempt, without its start-up."""
        return self.num_tokens / self.work_seconds if self.work_seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """The time left at the speed of the last seconds."""
        return max(0, self.total_bytes - self.done_bytes) / self.input_rate if self.input_rate > 0 else None

    def line(self) -> str:
        """Progress and speed in one line of less than 80 columns."""
        eta = "--:--" if self.eta_seconds is None else format_seconds(self.eta_seconds)
        since = " in this attempt" if self.resumed_bytes else ""
        parts = [
            f"{100 * self.fraction:5.1f}%",
            f"ETA {eta}",
            f"{format_bytes(self.text_rate)}/s",
            f"{format_count(self.token_rate)} tok/s",
            f"{format_count(self.num_documents)} {'doc' if self.num_documents == 1 else 'docs'}{since}",
        ]
        if self.num_rejects:
            parts.append(plural(self.num_rejects, "reject"))
        return "  ".join(parts)

    def details(self) -> str:
        """Memory, workers and the stage that takes the most time."""
        memory = f"{format_bytes(self.memory_bytes)} of {format_bytes(self.memory_limit)}"
        return f"{plural(self.num_workers, 'worker')}, memory {memory}, mostly {self.bottleneck}"


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the work before a run, which fetches its inputs or writes them to disk."""

    action: str
    """`fetching`"""
    what: str
    """`3 of 14 files`"""
    unit: str
    """`bytes`, or the name of the things that are counted; empty if nothing is."""
    seconds: float
    total: int
    """0 if unknown."""
    done: int
    machine: None = None

    @classmethod
    def step(cls, action: str) -> Preparation:
        """A step of which only the beginning is known: `looking at the inputs`."""
        return cls(action=action, what="", unit="", seconds=0.0, total=0, done=0)

    @property
    def is_step(self) -> bool:
        """Whether nothing is counted."""
        return not self.unit

    @property
    def fraction(self) -> float:
        """The share that is done."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """The time left at the speed so far."""
        return (self.total - self.done) * self.seconds / self.done if self.total and self.done else None

    def line(self) -> str:
        """Progress and speed in one line."""
        if self.is_step:
            return self.action
        share = f"{100 * self.fraction:5.1f}%  " if self.total else ""
        eta = "" if self.eta_seconds is None else f"ETA {format_seconds(self.eta_seconds)}  "
        amount = self._show(self.done) + (f" of {self._show(self.total)}" if self.total else "")
        return f"{self.action}  {share}{eta}{amount}  {self._show(self.done / max(self.seconds, 1e-3))}/s"

    def details(self) -> str:
        """What is being fetched or written."""
        return self.what

    def _show(self, amount: float) -> str:
        if self.unit == "bytes":
            return format_bytes(amount)
        return f"{format_count(amount)} {self.unit.removesuffix('s') if amount == 1 else self.unit}"
