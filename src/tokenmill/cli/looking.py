"""Commands that look at a store: `status`, `inspect`, `trace`, `verify` and `report`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.flags import AnyStore, AsJson, BatchSize, LongDocuments, Packing, Seed, SeqLen, Shuffle
from tokenmill.cli.output import console, print_json, progress
from tokenmill.errors import TokenmillError, UsageError

__all__ = ["inspect", "report", "status", "trace", "verify"]

ROWS = "Rows"
WATCH_SECONDS = 1.0
WATCH_BUCKET_SECONDS = 10.0
"""As often as a run tells a bucket how it goes."""


def status(
    store: AnyStore,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is done, speed, ETA and memory of a run, from any terminal, also after it has died."""
    import time

    from rich.live import Live

    from tokenmill.remote.bucket import is_remote
    from tokenmill.status import read_status, render_status

    if as_json:
        print_json(read_status(store))
    elif not watch:
        console().print(render_status(read_status(store)))
    else:
        pause = WATCH_BUCKET_SECONDS if is_remote(store) else WATCH_SECONDS
        with Live(render_status(read_status(store)), console=console(), auto_refresh=False) as live:
            while (now := read_status(store)).state == "running":
                live.update(render_status(now), refresh=True)
                time.sleep(pause)
            live.update(render_status(now), refresh=True)


def _open(store: str) -> Any:
    """A store, wherever it is."""
    from tokenmill.remote.bucket import is_remote
    from tokenmill.store.store import TokenStore

    if not is_remote(store):
        return TokenStore(Path(store))
    from tokenmill.store.remote import open_remote

    return open_remote(store)


def inspect(
    store: AnyStore,
    document: Annotated[int | None, typer.Option(help="Show one document with its tokens in colour.")] = None,
    row: Annotated[int | None, typer.Option(help="Show one training row, by the number that trace has for it.")] = None,
    seq_len: SeqLen = 2048,
    packing: Packing = "concat",
    long_documents: LongDocuments = "split",
    shuffle: Shuffle = True,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="Split of the document or row.")] = "train",
    max_tokens: Annotated[int, typer.Option(help="Show at most this many tokens of a document.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Show totals and document lengths, one document with its tokens and ids, or one training row.

    The flags of rows are those of trace and of tokenmill.load, and have the same defaults.
    """
    from tokenmill import inspection
    from tokenmill.loaders import make_rows

    if row is not None and document is not None:
        raise UsageError("say either --row N or --document N, to see one of them")
    opened = _open(store)
    shown: Any
    if row is not None:
        rows = make_rows(
            opened.split(split),
            seq_len=seq_len,
            packing=packing,
            long_documents=long_documents,
            shuffle=shuffle,
            seed=seed,
        )
        show_row = inspection.row_json if as_json else partial(inspection.render_row, max_tokens=max_tokens)
        shown = show_row(opened, rows, row)
    elif document is not None:
        show_one = inspection.document_json if as_json else partial(inspection.render_document, max_tokens=max_tokens)
        shown = show_one(opened, document, split)
    else:
        shown = inspection.overview_json(opened) if as_json else inspection.render_overview(opened)
    print_json(shown) if as_json else console().print(shown)


def trace(
    store: AnyStore,
    step: Annotated[int | None, typer.Option(help="List the documents of this step, counted from 0.")] = None,
    document: Annotated[int | None, typer.Option(help="List the steps that see this document.")] = None,
    seq_len: SeqLen = 2048,
    batch_size: BatchSize = 8,
    world_size: Annotated[int, typer.Option(help="Number of ranks.", rich_help_panel=ROWS)] = 1,
    packing: Packing = "concat",
    long_documents: LongDocuments = "split",
    shuffle: Shuffle = True,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="Split of the store.", rich_help_panel=ROWS)] = "train",
    epochs: Annotated[float, typer.Option(help="With --document: how many epochs to look at.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Tell which documents a training step saw, or which steps see a document.

    The flags of rows are those of tokenmill.load and have the same defaults.
    """
    from tokenmill.loaders import make_rows
    from tokenmill.tracing import render_sightings, render_step, trace_document, trace_step

    if (step is None) == (document is None):
        raise UsageError("say either --step N, to see its documents, or --document N, to see its steps")
    opened = _open(store)
    rows = make_rows(
        opened.split(split), seq_len=seq_len, packing=packing, long_documents=long_documents, shuffle=shuffle, seed=seed
    )
    if step is not None:
        inputs = [file.path for file in opened.manifest.inputs]
        found = trace_step(rows, step, batch_size=batch_size, world_size=world_size, inputs=inputs)
        print_json(found) if as_json else console().print(render_step(found))
    elif document is not None:
        sightings = trace_document(rows, document, batch_size=batch_size, world_size=world_size, epochs=epochs)
        print_json(sightings) if as_json else console().print(render_sightings(document, sightings, epochs))


def verify(
    store: AnyStore,
    more: Annotated[list[str] | None, typer.Argument(metavar="[INPUT...]", help="More inputs for --against.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT...", help="Compare ids of a sample with the reference's, from these inputs."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With --against: compare every document.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every byte and every document of a store, and its ids against the reference."""
    from tokenmill.verification import verify as check

    if (more or every) and not against:
        raise UsageError("the inputs to compare with come after --against: tokenmill verify OUT --against INPUT...")
    with progress() as advance:
        result = check(store, against=[*(against or []), *(more or [])], every=every, advance=advance)
    if as_json:
        print_json(result)
    elif not result.num_files:
        # Without a manifest nothing was checked.
        raise TokenmillError(result.problems[0])
    else:
        for name, value in result.rows():
            print(f"{name:<12} {value}")
    for problem in result.problems:
        print(problem, file=sys.stderr)
    if not result.is_sound:
        raise TokenmillError(f"{store} has {len(result.problems)} problem{'s' if len(result.problems) > 1 else ''}")
    if not as_json:
        print("sound")


def report(
    store: AnyStore,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as report.html.")],
    seq_len: Annotated[int, typer.Option(help="Tokens in a row, for the packings.")] = 2048,
    sample_tokens: Annotated[
        int | None, typer.Option(help="Look at about this many tokens \\[default: 64 million].")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of the store first.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write one page about a store: totals, lengths, packing, tokens, odd documents, checks, the run, a browser."""
    from tokenmill.report import SAMPLE_TOKENS, write_report
    from tokenmill.store.store import TokenStore
    from tokenmill.verification import local_copy

    with progress() as advance, local_copy(store, advance) as (folder, _):
        figures = write_report(
            TokenStore(folder),
            out,
            seq_len=seq_len,
            sample_tokens=SAMPLE_TOKENS if sample_tokens is None else sample_tokens,
            verify=verify,
            json=json,
            overwrite=overwrite,
            advance=advance,
        )
    plural = "s" if figures.num_documents != 1 else ""
    print(f"{out}: {figures.num_documents:,} document{plural}, {figures.num_tokens:,} tokens")
    problems = figures.checks.problems
    if problems:
        raise TokenmillError(f"{store} has {len(problems)} problem{'s' if len(problems) > 1 else ''}; {out} lists them")
