"""What `tokenize` and `finish` print at the end: a short table and the next command."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

from tokenmill.formatting import format_bytes, format_count, format_facts, format_seconds, plural
from tokenmill.pipeline.journal.mirror import JOURNAL
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import Outcome
from tokenmill.store.manifest import Manifest

__all__ = ["print_finished", "print_summary"]


def print_summary(outcome: Outcome, request: Request) -> None:
    """Print the summary of a run on stdout, in plain text."""
    manifest = outcome.manifest
    if manifest is None:
        share, num_done = outcome.share, outcome.num_own
        own = f"{share}: {plural(num_done, 'task')} done" if num_done else f"{share} has no task in this run"
        print(f"{own}; of all ranks, {outcome.completion}")
        print(f"The last rank to end writes the manifest.\nNext: tokenmill status {quote(request.out)}")
        return
    if outcome.observer is None:
        print_finished(request.out, manifest, "already finished")
        return
    print(format_facts(_rows(outcome, manifest)))
    _print_leftovers(request.out)
    print(f"\nNext: tokenmill inspect {quote(request.out)}{_first_document(manifest)}")
    sys.stdout.flush()


def print_finished(store: str | Path, manifest: Manifest, how: str = "finished") -> None:
    """Print what a finished store holds."""
    totals = (
        f"{manifest.shown_records}, {plural(manifest.num_tokens, 'token')}, {plural(manifest.num_rejects, 'reject')}"
    )
    print(f"{store} is {how}: {totals}.")
    if manifest.num_rejects:
        print(
            f"The store leaves out the documents that could not be tokenized; they are listed in {store}/rejects.jsonl."
        )
    _print_leftovers(store)
    print(f"Next: tokenmill inspect {quote(str(store))}")


def _print_leftovers(store: str | Path) -> None:
    """Say that the journal could not be removed: other programs would take the store for an unfinished run."""
    journal = Path(store) / JOURNAL
    if journal.exists():
        print(f"{journal} could not be removed; remove it, or run: tokenmill finish {quote(str(store))}")


def _first_document(manifest: Manifest) -> str:
    """The flags of `inspect` that show the first document, if there is one."""
    split = next((name for name, split in manifest.splits.items() if split.num_documents), None)
    if split is None:
        return ""
    return " --document 0" if split == "train" else f" --document 0 --split {split}"


def _rows(outcome: Outcome, manifest: Manifest) -> list[tuple[str, str]]:
    observer = outcome.observer
    assert observer is not None
    counts = (
        f"{manifest.num_documents_in:,} in = {manifest.num_records:,} out + {plural(manifest.num_rejects, 'reject')}"
    )
    rows = [(manifest.records_name, counts)]
    rows += [(f"  {reason}", f"{count:,}") for reason, count in manifest.rejects.items()]
    for name, split in manifest.splits.items():
        where = f"{plural(split.num_documents, 'document')}, {plural(len(split.shards), 'shard')}"
        if manifest.has_pairs:
            where = f"{plural(split.num_documents // 2, 'pair')} of documents, {plural(len(split.shards), 'shard')}"
        rows.append((name, f"{plural(split.num_tokens, 'token')} in {where}"))
    rows.append(("on disk", f"{format_bytes(manifest.shard_bytes)} ({manifest.dtype})"))
    if manifest.engine.num_rerouted:
        rows.append(("reference", f"{plural(manifest.engine.num_rerouted, 'document')} with disputed code points"))
    if manifest.special_tokens.num_parsed:
        rows.append(("parsed", f"{manifest.special_tokens.num_parsed:,} special tokens from strings in texts"))
    if outcome.num_unchecked:
        rows.append(("unchecked", f"{plural(outcome.num_unchecked, 'compressed input')} without a checksum"))
    moment = observer.snapshot
    if moment is not None and moment.num_text_bytes:
        speed = f"{format_bytes(moment.text_per_second)}/s of text, {format_count(moment.tokens_per_second)} tokens/s"
        startup = f"after {moment.startup_seconds:.1f} s of start-up"
        # The totals above are those of all ranks; these are of one.
        whose = "" if outcome.share.is_whole else f", {outcome.share} alone"
        rows.append(("time", f"{format_seconds(moment.seconds)} ({speed} {startup}){whose}"))
        memory = f"{format_bytes(observer.peak_memory_bytes)} at most, of {format_bytes(moment.memory_limit)}"
        rows.append(("memory", f"{memory}{whose}"))
    return rows
