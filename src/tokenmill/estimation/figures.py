"""What an estimate says: figures with the interval they lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.exporters.npy import TYPES

__all__ = ["Estimate", "Figure", "Padded"]


@dataclass(frozen=True)
class Figure:
    """An estimate and the interval it lies in."""

    value: float
    low: float
    high: float

    def scale(self, factor: float) -> Figure:
        """The figure in another unit."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)

    @classmethod
    def exact(cls, value: float) -> Figure:
        """A figure that was counted."""
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        """Whether it was counted."""
        return self.low == self.high


@dataclass(frozen=True)
class Padded:
    """Padded arrays of the documents: one to a row, and those that are longer than a row in several."""

    seq_len: int
    rows: Figure

    STORED_BYTES = sum(np.dtype(kind).itemsize for kind in TYPES.values())
    """For each place of a row, of the four arrays that `export --to npy` writes."""
    TENSOR_BYTES = 28
    """Of the same four as tensors: ids, targets and attention mask as int64, the loss mask as float32."""

    @property
    def disk_bytes(self) -> Figure:
        """What the arrays take on disk."""
        return self.rows.scale(self.seq_len * self.STORED_BYTES)

    @property
    def memory_bytes(self) -> Figure:
        """What they take in the memory of a trainer that makes tensors of all of them."""
        return self.rows.scale(self.seq_len * self.TENSOR_BYTES)

    def as_json(self) -> dict[str, int]:
        """Plain values."""
        figures = {"rows": self.rows, "disk_bytes": self.disk_bytes, "memory_bytes": self.memory_bytes}
        return {"seq_len": self.seq_len, **{name: round(figure.value) for name, figure in figures.items()}}


@dataclass(frozen=True)
class Estimate:
    """What a run would give and take."""

    tokens: Figure
    documents: Figure
    text_bytes: Figure
    bytes_per_token: Figure
    disk_bytes: Figure
    free_bytes: int
    memory_bytes: Figure
    seconds: dict[int, Figure]
    """By number of workers."""
    sample_bytes: int
    num_rejects: int
    engine: str
    is_supervised: bool
    padded: Padded | None
    """For the row length that was asked about."""
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values, and the intervals beside them."""
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
