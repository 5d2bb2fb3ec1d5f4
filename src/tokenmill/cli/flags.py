"""The flags that commands share: the same name, the same words and the same check wherever they appear."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.errors import UsageError

__all__ = [
    "AnyStore",
    "AsJson",
    "BatchSize",
    "Format",
    "Inputs",
    "LongDocuments",
    "Memory",
    "Packing",
    "Seed",
    "SeqLen",
    "Shuffle",
    "Store",
    "TextKey",
    "TokenizerSpec",
    "Workers",
    "count_or_auto",
    "switch",
]

ROWS = "Rows"

INPUTS = "Files, directories, globs, @list.txt, s3://..., hf://datasets/..., or a data set: tinystories, owner/name."

Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUTS)]
Store = Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")]
AnyStore = Annotated[str, typer.Argument(metavar="OUT", help="Directory of the store, or s3://BUCKET/PATH.")]
TokenizerSpec = Annotated[str, typer.Option("--tokenizer", help="As for tokenmill tokenize.")]
TextKey = Annotated[str | None, typer.Option(help="Field that holds the text \\[default: text].")]
Format = Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.")]
Workers = Annotated[str, typer.Option(help="Worker processes.")]
Memory = Annotated[str, typer.Option(help="Bound for all processes together: 4GB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

SeqLen = Annotated[int, typer.Option(help="Tokens in a row.", rich_help_panel=ROWS)]
BatchSize = Annotated[int, typer.Option(help="Rows per rank.", rich_help_panel=ROWS)]
Packing = Annotated[str, typer.Option(help="concat, best-fit or pad.", rich_help_panel=ROWS)]
LongDocuments = Annotated[str, typer.Option(help="split, truncate or drop.", rich_help_panel=ROWS)]
Shuffle = Annotated[bool, typer.Option("--shuffle/--no-shuffle", rich_help_panel=ROWS)]
Seed = Annotated[int, typer.Option(help="Of the packing and the shuffle.", rich_help_panel=ROWS)]


def switch(flags: dict[str, Any], name: str) -> bool:
    """Take a flag that is on or off out of the others."""
    value = flags.pop(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name.replace('_', '-')}: {value!r} is neither true nor false, written without quotes")
    return value


def count_or_auto(text: str, flag: str) -> int | str:
    """The value of a flag that is a number or left to tokenmill."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise UsageError(f"{flag} {text!r} is neither a number nor auto")
    return int(text)
