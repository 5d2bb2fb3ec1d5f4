"""What an estimate contains: figures with their confidence intervals, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.formats.npy import TYPES
from tokenmill.formatting import format_bytes, format_facts, format_seconds, plural

__all__ = ["Estimate", "Interval", "Padded"]


@dataclass(frozen=True)
class Interval:
    """An estimated value and its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """A value that was counted."""
        return cls(value, value, value)

    def scale(self, factor: float) -> Interval:
        """The interval in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    @property
    def is_exact(self) -> bool:
        """Whether the value was counted."""
        return self.low == self.high

    def show(self, format: Callable[[float], str]) -> str:
        """`12 (10 to 14)`, or `12` if the value was counted."""
        if self.is_exact:
            return format(self.value)
        return f"{format(self.value)} ({format(self.low)} to {format(self.high)})"


@dataclass(frozen=True)
class Padded:
    """Documents as padded arrays: one document per row, and several rows for a longer document."""

    seq_len: int
    rows: Interval

    STORED_BYTES = sum(np.dtype(kind).itemsize for kind in TYPES.values())
    """Per token of a row, of the four arrays that `export --to npy` writes."""
    TENSOR_BYTES = 28
    """Of the same four as tensors: ids, targets and attention mask as int64, the loss mask as float32."""

    @property
    def disk_bytes(self) -> Interval:
        """The size of the arrays on disk."""
        return self.rows.scale(self.seq_len * self.STORED_BYTES)

    @property
    def memory_bytes(self) -> Interval:
        """The memory of a trainer that turns all of them into tensors."""
        return self.rows.scale(self.seq_len * self.TENSOR_BYTES)

    def as_json(self) -> dict[str, int]:
        """Plain values."""
        figures = {"rows": self.rows, "disk_bytes": self.disk_bytes, "memory_bytes": self.memory_bytes}
        return {"seq_len": self.seq_len, **{name: round(figure.value) for name, figure in figures.items()}}


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a run would produce and need; it prints as a table."""

    tokens: Interval
    documents: Interval
    text_bytes: Interval
    bytes_per_token: Interval
    disk_bytes: Interval
    free_bytes: int
    memory_bytes: Interval
    seconds: dict[int, Interval]
    """By number of workers."""
    sample_bytes: int
    num_rejects: int
    engine: str
    is_supervised: bool
    padded: Padded | None
    """For the row length that the user asked about."""
    notes: list[str]

    def __repr__(self) -> str:
        return format_facts(self.rows(), self.notes)

    def as_json(self) -> dict[str, Any]:
        """Plain values with their intervals beside them."""
        figures = {name: getattr(self, name) for name in ("tokens", "documents", "disk_bytes", "memory_bytes")}
        return {
            **{name: round(figure.value) for name, figure in figures.items()},
            "seconds": {str(workers): round(figure.value, 1) for workers, figure in self.seconds.items()},
            "text_bytes": round(self.text_bytes.value),
            "bytes_per_token": round(self.bytes_per_token.value, 4),
            "free_bytes": self.free_bytes,
            "intervals": {
                **{name: [round(figure.low), round(figure.high)] for name, figure in figures.items()},
                "seconds": {str(n): [round(f.low, 1), round(f.high, 1)] for n, f in self.seconds.items()},
            },
            "sample_bytes": self.sample_bytes,
            "rejects_in_sample": self.num_rejects,
            "engine": self.engine,
            **({"padded": self.padded.as_json()} if self.padded is not None else {}),
            "notes": self.notes,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and figures of a table."""
        sample, text = format_bytes(self.sample_bytes), format_bytes(int(self.text_bytes.value))
        yield "sample", f"{sample} of {text} of text, encoded with {self.engine}"
        yield "documents", self.documents.show(_count)
        yield "tokens", self.tokens.show(_count)
        yield "per token", f"{self.bytes_per_token.show(lambda value: f'{value:.2f}')} bytes of text"
        yield "disk", f"{self.disk_bytes.show(_size)}; {format_bytes(self.free_bytes)} free"
        yield "memory", self.memory_bytes.show(_size)
        for workers, seconds in self.seconds.items():
            yield "time" if workers == 1 else "", f"{seconds.show(format_seconds)} with {plural(workers, 'worker')}"
        yield from self._padded_rows()

    def _padded_rows(self) -> Iterator[tuple[str, str]]:
        """The size of padded arrays, or its formula if no row length is known."""
        padded = self.padded
        if padded is None:
            if self.is_supervised:
                sizes = f"x {Padded.STORED_BYTES} bytes on disk, x {Padded.TENSOR_BYTES} as tensors"
                yield "padded", f"rows x seq_len {sizes};"
                yield "", "tokenmill estimate --seq-len L counts the rows"
            return
        rows = f"{padded.rows.show(_count)} rows of {padded.seq_len:,}"
        yield "padded", f"{rows}, one document or a part of one each;"
        for words, each, size in (
            ("on disk with export --to npy", padded.STORED_BYTES, padded.disk_bytes),
            ("in memory as int64 and float32 tensors", padded.TENSOR_BYTES, padded.memory_bytes),
        ):
            yield "", f"x {padded.seq_len:,} x {each} bytes = {_size(size.value)} {words}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    return format_bytes(int(value))
