"""`tokenmill inspect`: the overview, one document, or one training row."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli._flags import Align, AsJson, LongDocuments, MaxDocuments, Packing, Seed, SeqLen, Shuffle, Store
from tokenmill.cli._output import console, print_json

__all__ = ["inspect"]


def inspect(
    store: Store,
    document: Annotated[int | None, typer.Option(help="Show one document with its tokens in colour.")] = None,
    row: Annotated[int | None, typer.Option(help="Show one training row, by the number that trace has for it.")] = None,
    seq_len: SeqLen = 2048,
    packing: Packing = "concat",
    long_documents: LongDocuments = None,
    max_documents: MaxDocuments = None,
    align: Align = None,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="Split of the document or row.")] = "train",
    max_tokens: Annotated[int, typer.Option(help="Show at most this many tokens of a document.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Show totals and document lengths, one document with its tokens and ids, or one training row.

    The flags of rows are those of trace and of tokenmill.load, and have the same defaults.
    """
    from tokenmill.tools.inspect import inspect as look

    shown = look(
        store,
        document=document,
        row=row,
        split=split,
        max_tokens=max_tokens,
        seq_len=seq_len,
        packing=packing,  # type: ignore[arg-type]
        long_documents=long_documents,  # type: ignore[arg-type]
        max_documents=max_documents,
        align=align,
        shuffle=shuffle,
        seed=seed,
    )
    print_json(shown.as_json()) if as_json else console().print(shown)
