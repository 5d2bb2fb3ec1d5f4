"""What an engine makes of the snippets of a survey: tokens per byte, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.engines import Engine

__all__ = ["Rate", "measure_rate"]


@dataclass(frozen=True)
class Rate:
    """Tokens per byte of text, its standard error, and how fast one worker encodes."""

    tokens_per_byte: float
    error: float
    cold_bytes_per_second: float
    warm_bytes_per_second: float
    num_bytes: int


def measure_rate(snippets: list[str], engine: Engine) -> Rate:
    """Encode all snippets twice: with empty caches and with full ones."""
    if not snippets:
        return Rate(0.0, 0.0, 1e8, 1e8, 0)
    sizes = np.array([len(snippet.encode()) for snippet in snippets], np.float64)
    started = time.perf_counter()
    counts = _encode(snippets, engine)
    cold = time.perf_counter() - started
    started = time.perf_counter()
    _encode(snippets, engine)
    warm = time.perf_counter() - started
    # Places are even in bytes of text, so each snippet stands for as much of it, whatever its own size.
    rates = counts / np.maximum(1.0, sizes)
    error = float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else 0.0
    total = float(sizes.sum())
    return Rate(float(rates.mean()), error, total / max(cold, 1e-6), total / max(warm, 1e-6), int(total))


def _encode(snippets: list[str], engine: Engine) -> npt.NDArray[np.float64]:
    lengths = [np.diff(engine.encode(snippets[at : at + 512]).offsets) for at in range(0, len(snippets), 512)]
    return np.concatenate(lengths).astype(np.float64)
