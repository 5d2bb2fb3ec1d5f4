"""What `estimate` prints: each figure with the interval it lies in."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator

from tokenmill.estimation.figures import Estimate, Figure, Padded
from tokenmill.progress import format_bytes, format_seconds

__all__ = ["print_estimate"]

COLUMNS = 80


def print_estimate(estimate: Estimate) -> None:
    """Print an estimate on stdout: each figure with the interval it lies in."""
    for name, value in (*_estimate_rows(estimate), *_padded_rows(estimate)):
        print(f"{name:<12} {value}")
    for note in estimate.notes:
        print(textwrap.fill(note, COLUMNS, initial_indent=f"{'note':<12} ", subsequent_indent=" " * 13))
    sys.stdout.flush()


def _estimate_rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    text = format_bytes(int(estimate.text_bytes.value))
    yield "sample", f"{format_bytes(estimate.sample_bytes)} of {text} of text, encoded with {estimate.engine}"
    yield "documents", _interval(estimate.documents, lambda value: f"{value:,.0f}")
    yield "tokens", _interval(estimate.tokens, lambda value: f"{value:,.0f}")
    yield "per token", f"{_interval(estimate.bytes_per_token, lambda value: f'{value:.2f}')} bytes of text"
    yield "disk", f"{_interval(estimate.disk_bytes, _size)}; {format_bytes(estimate.free_bytes)} free"
    yield "memory", _interval(estimate.memory_bytes, _size)
    for workers, seconds in estimate.seconds.items():
        yield (
            "time" if workers == 1 else "",
            f"{_interval(seconds, format_seconds)} with {workers} worker" + ("s" if workers > 1 else ""),
        )


def _padded_rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """What the documents take as padded arrays: worked out, or the formula where no row length is known."""
    padded = estimate.padded
    if padded is None:
        if estimate.is_supervised:
            sizes = f"x {Padded.STORED_BYTES} bytes on disk, x {Padded.TENSOR_BYTES} as tensors"
            yield "padded", f"rows x seq_len {sizes};"
            yield "", "tokenmill estimate --seq-len L counts the rows"
        return
    rows = _interval(padded.rows, lambda value: f"{value:,.0f}")
    yield "padded", f"{rows} rows of {padded.seq_len:,}, a document each or a part of one;"
    for words, each, size in (
        ("on disk with export --to npy", padded.STORED_BYTES, padded.disk_bytes),
        ("in memory as int64 and float32 tensors", padded.TENSOR_BYTES, padded.memory_bytes),
    ):
        yield "", f"x {padded.seq_len:,} x {each} bytes = {_size(size.value)} {words}"


def _interval(figure: Figure, show: Callable[[float], str]) -> str:
    if figure.is_exact:
        return show(figure.value)
    return f"{show(figure.value)} ({show(figure.low)} to {show(figure.high)})"


def _size(value: float) -> str:
    return format_bytes(int(value))
