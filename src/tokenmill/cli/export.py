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
            help="megatron, nanogpt, llmc, datatrove or olmo (whole documents); parquet or hf (documents or rows); "
            "pt, mds, litdata or arrayrecord (rows); npy (one document a row, padded)."
        ),
    ],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per row \\[default for parquet and hf: one row per document].")
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(
            metavar="concat|best-fit|pad",
            help="parquet, hf: how documents fill rows \\[default: concat; with a loss mask: best-fit].",
        ),
    ] = None,
    long_documents: Annotated[
        str | None,
        typer.Option(
            metavar="split|truncate|drop", help="best-fit, pad: documents longer than a row \\[default: split]."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="parquet, hf: columns beside input_ids, of labels, completion_mask, assistant_masks, loss_mask, "
            "loss_weights, attention_mask, position_ids and seq_lengths \\[default: with a loss mask, labels; with "
            "weights, loss_weights; in packed rows, seq_lengths].",
        ),
    ] = None,
    drop_mask: Annotated[
        bool, typer.Option("--drop-mask", help="Leave the loss mask and weights out: every token is trained on.")
    ] = False,
    eos_check: Annotated[
        bool,
        typer.Option(
            "--eos-check/--no-eos-check",
            help="olmo, llmc: refuse documents that their readers, which look for EOS, would cut or join.",
        ),
    ] = True,
    split: Annotated[str | None, typer.Option(help="Only this split \\[default: all].")] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="megatron, datatrove, olmo: hard links to the shards instead of one file for all."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
) -> None:
    """Write a store in another trainer's format, and compare what was written with the store."""
    from tokenmill.formats.export import export as write

    with progress() as advance:
        done = write(
            store,
            dest,
            to=to,  # type: ignore[arg-type]
            split=split,
            links=links,
            overwrite=overwrite,
            advance=advance,
            note=lambda text: print(f"note: {text}", file=sys.stderr),
            seq_len=seq_len,
            packing=packing,  # type: ignore[arg-type]
            long_documents=long_documents,  # type: ignore[arg-type]
            columns=columns,
            drop_mask=drop_mask,
            eos_check=eos_check,
        )
    print(done.line(dest))
