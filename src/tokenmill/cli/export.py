"""`tokenmill export`: a store in another trainer's format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli._flags import Store
from tokenmill.cli._output import progress

__all__ = ["export"]


def export(
    store: Store,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option(
            help="megatron, nanogpt, llmc, datatrove or olmo (whole documents); parquet, hf, pt, mds, litdata or "
            "arrayrecord (rows); npy (one document a row, padded)."
        ),
    ],
    seq_len: Annotated[int | None, typer.Option(help="Tokens per row, for formats of rows.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split \\[default: all].")] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="megatron, datatrove, olmo: hard links to the shards instead of one file for all."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write a store in another trainer's format, and compare what was written with the store."""
    from tokenmill.formats.export import export as write

    with progress() as advance:
        done = write(
            store,
            dest,
            to=to,
            seq_len=seq_len,
            split=split,
            links=links,
            overwrite=overwrite,
            advance=advance,
            note=lambda text: print(f"note: {text}", file=sys.stderr),
        )
    print(done.line(dest))
