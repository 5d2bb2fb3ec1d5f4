"""Flags that several commands share, so that their names, help texts and checks are the same everywhere."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tokenmill.errors import UsageError

INPUTS = "Files, directories, globs, @list.txt, s3://..., hf://datasets/..., or a data set: tinystories, owner/name."

Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUTS)]
Store = Annotated[str, typer.Argument(metavar="OUT", help="Directory of the store, or s3://BUCKET/PATH.")]
TokenizerSpec = Annotated[str, typer.Option("--tokenizer", help="As for tokenmill tokenize.")]
TextKey = Annotated[str | None, typer.Option(help="Field that holds the text \\[default: text].")]
Format = Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.")]
Workers = Annotated[str, typer.Option(help="Worker processes.")]
Memory = Annotated[str, typer.Option(help="Bound for all processes together: 4GB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

row_option = partial(typer.Option, rich_help_panel="Rows")
SeqLen = Annotated[int, row_option(help="Tokens in a row.")]
BatchSize = Annotated[int, row_option(help="Rows per rank.")]
Packing = Annotated[str, row_option(help="concat, best-fit or pad; pairs or prompts for a store that holds these.")]
LongDocuments = Annotated[
    str | None,
    row_option(help="split, truncate or drop; pairs: keep_start, keep_end or drop \\[default: split; keep_start]."),
]
MaxDocuments = Annotated[int | None, row_option(help="The most documents in a row, for batches of fixed shapes.")]
Align = Annotated[int | None, row_option(help="Pad documents to multiples of this many tokens.")]
Shuffle = Annotated[bool, row_option("--shuffle/--no-shuffle")]
Seed = Annotated[int, row_option(help="Seed of the packing and the shuffle.")]


def switch(flags: dict[str, Any], name: str) -> bool:
    """Remove a boolean flag from the others and return it."""
    value = flags.pop(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name.replace('_', '-')}: {value!r} is neither true nor false, written without quotes")
    return value


def count_or_auto(text: str, flag: str) -> int | str:
    """Parse the value of a flag that is a number or `auto`."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise UsageError(f"{flag} {text!r} is neither a number nor auto")
    return int(text)
