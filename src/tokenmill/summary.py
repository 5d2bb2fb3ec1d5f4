"""What a run prints when it has ended: a short table and the next command."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenmill.estimation import Estimate, Figure, Padded
from tokenmill.pipeline.attempt import Outcome
from tokenmill.pipeline.request import Request
from tokenmill.progress import format_bytes, format_seconds
from tokenmill.store.manifest import Manifest

__all__ = ["print_estimate", "print_finished", "print_summary"]

COLUMNS = 80


def print_summary(outcome: Outcome, request: Request) -> None:
    """Print the summary on stdout, aligned, in plain text."""
    manifest = outcome.manifest
    if manifest is None:
        print(_describe_rank(outcome))
        print(f"Next: tokenmill status {request.out}")
        return
    if outcome.observer is None:
        print_finished(request.out, manifest, "already finished")
        return
    for name, value in _rows(outcome, manifest):
        print(f"{name:<12} {value}")
    print(f"\nNext: tokenmill inspect {request.out}{_first_document(manifest)}")
    sys.stdout.flush()


def print_finished(store: str | Path, manifest: Manifest, how: str = "finished") -> None:
    """Print what a finished store holds."""
    print(f"{store} is {how}: {_totals(manifest)}.")
    print(f"Next: tokenmill inspect {store}")


def _first_document(manifest: Manifest) -> str:
    """The flags that show a document, if there is one."""
    split = next((name for name, split in manifest.splits.items() if split.num_documents), None)
    if split is None:
        return ""
    return " --document 0" if split == "train" else f" --document 0 --split {split}"


def _describe_rank(outcome: Outcome) -> str:
    """What a rank has done of a run that is not finished."""
    share, stock = outcome.share, outcome.stock
    assert stock is not None
    own = f"{share}: {outcome.num_own:,} tasks done" if outcome.num_own else f"{share} has no task in this run"
    least = "at least " if stock.unread else ""
    done = f"{stock.num_done:,} of {least}{stock.num_tasks:,} tasks of the run are done"
    return f"{own}; {done}; whoever ends last writes the manifest"


def _rows(outcome: Outcome, manifest: Manifest) -> list[tuple[str, str]]:
    observer = outcome.observer
    assert observer is not None
    rows = [
        (
            "documents",
            f"{manifest.num_documents_in:,} in = {manifest.num_documents:,} out + {manifest.num_rejects:,} rejects",
        )
    ]
    rows += [(f"  {reason}", f"{count:,}") for reason, count in manifest.rejects.items()]
    for name, split in manifest.splits.items():
        rows.append(
            (name, f"{split.num_tokens:,} tokens in {split.num_documents:,} documents, {len(split.shards):,} shards")
        )
    size = sum(
        file.bytes for split in manifest.splits.values() for shard in split.shards for file in shard.files.values()
    )
    rows.append(("on disk", f"{format_bytes(size)} ({manifest.dtype})"))
    if manifest.engine.num_rerouted:
        rows.append(("reference", f"{manifest.engine.num_rerouted:,} documents with disputed code points"))
    if manifest.special_tokens.num_parsed:
        rows.append(("parsed", f"{manifest.special_tokens.num_parsed:,} special tokens from strings in texts"))
    moment = observer.snapshot
    if moment is not None and moment.num_text_bytes:
        speed = f"{moment.text_per_second / 1e6:.0f} MB/s, {moment.tokens_per_second / 1e6:.1f}M tokens/s"
        rows.append(("time", f"{format_seconds(moment.seconds)} ({speed})"))
        rows.append(
            ("memory", f"{format_bytes(observer.peak_memory_bytes)} at most, of {format_bytes(moment.memory_limit)}")
        )
    return rows


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


def _totals(manifest: Manifest) -> str:
    return f"{manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, {manifest.num_rejects:,} rejects"
