"""What a run prints when it has ended: a short table and the next command."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

from tokenmill.pipeline.attempt import Outcome
from tokenmill.pipeline.request import Request
from tokenmill.progress import format_bytes, format_seconds
from tokenmill.store.manifest import Manifest

__all__ = ["print_finished", "print_summary"]


def print_summary(outcome: Outcome, request: Request) -> None:
    """Print the summary on stdout, aligned, in plain text."""
    manifest = outcome.manifest
    if manifest is None:
        print(_describe_rank(outcome))
        print(f"Whoever ends last writes the manifest.\nNext: tokenmill status {quote(request.out)}")
        return
    if outcome.observer is None:
        print_finished(request.out, manifest, "already finished")
        return
    for name, value in _rows(outcome, manifest):
        print(f"{name:<12} {value}")
    print(f"\nNext: tokenmill inspect {quote(request.out)}{_first_document(manifest)}")
    sys.stdout.flush()


def print_finished(store: str | Path, manifest: Manifest, how: str = "finished") -> None:
    """Print what a finished store holds."""
    print(f"{store} is {how}: {_totals(manifest)}.")
    if manifest.num_rejects:
        print(f"What could not be tokenized is left out, and listed in {store}/rejects.jsonl.")
    print(f"Next: tokenmill inspect {quote(str(store))}")


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
    own = f"{share}: {_count(outcome.num_own, 'task')} done" if outcome.num_own else f"{share} has no task in this run"
    return f"{own}; of all ranks, {stock}"


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
            (
                name,
                f"{split.num_tokens:,} tokens in {_count(split.num_documents, 'document')}, "
                f"{_count(len(split.shards), 'shard')}",
            )
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
        # The totals above are those of the run; these are not.
        whose = "" if outcome.share.is_whole else f", {outcome.share} alone"
        rows.append(("time", f"{format_seconds(moment.seconds)} ({speed}){whose}"))
        memory = f"{format_bytes(observer.peak_memory_bytes)} at most, of {format_bytes(moment.memory_limit)}"
        rows.append(("memory", f"{memory}{whose}"))
    return rows


def _count(number: int, noun: str) -> str:
    """A number of things: `1 shard`, `2 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _totals(manifest: Manifest) -> str:
    return f"{manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, {manifest.num_rejects:,} rejects"
