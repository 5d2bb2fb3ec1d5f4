"""Commands that make something of inputs or of a store: `train-tokenizer`, `export` and `demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from tokenmill.cli.flags import AnyStore, Format, Inputs, TextKey
from tokenmill.cli.output import console, progress

__all__ = ["demo", "export", "train_tokenizer"]


def train_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="How many tokens it shall have.")],
    text_key: TextKey = None,
    format: Format = "auto",
    special_tokens: Annotated[str, typer.Option(help="Comma-separated; the first ends documents.")] = "<|endoftext|>",
    sample: Annotated[str, typer.Option(help="Use at most this much text.")] = "200MB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that is there.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on your own text."""
    from tokenmill.machine import parse_bytes
    from tokenmill.progress import choose_display
    from tokenmill.training import train_tokenizer as train

    trained = train(
        inputs,
        out,
        vocab_size=vocab_size,
        text_key=text_key,
        format=format,
        special_tokens=special_tokens.split(","),
        limit_bytes=parse_bytes(sample, "--sample"),
        overwrite=overwrite,
        display=choose_display(),
    )
    size = f"{trained.num_bytes / 1e6:.1f} MB of text"
    print(f"{trained.path / 'tokenizer.json'}: {trained.vocab_size:,} tokens from {size}")
    print(f"Next: tokenmill tokenize INPUT... -o OUT --tokenizer {quote(str(trained.path))}")


def export(
    store: AnyStore,
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
    from tokenmill.exporters import export as write

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


def demo(
    folder: Annotated[Path | None, typer.Argument(help="Where to work \\[default: a temporary folder].")] = None,
) -> None:
    """Go the whole way on text that every machine has, offline, in under a minute."""
    from tokenmill.demo import run_demo

    run_demo(folder, console())
