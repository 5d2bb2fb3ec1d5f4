"""`tokenmill inspect`: the overview, one document, or one training row."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tokenmill.cli._flags import AsJson, LongDocuments, Packing, Seed, SeqLen, Shuffle, Store
from tokenmill.cli._output import console, print_json
from tokenmill.errors import UsageError

__all__ = ["inspect"]


def inspect(
    store: Store,
    document: Annotated[int | None, typer.Option(help="Show one document with its tokens in colour.")] = None,
    row: Annotated[int | None, typer.Option(help="Show one training row, by the number that trace has for it.")] = None,
    seq_len: SeqLen = 2048,
    packing: Packing = "concat",
    long_documents: LongDocuments = None,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="Split of the document or row.")] = "train",
    max_tokens: Annotated[int, typer.Option(help="Show at most this many tokens of a document.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Show totals and document lengths, one document with its tokens and ids, or one training row.

    The flags of rows are those of trace and of tokenmill.load, and have the same defaults.
    """
    import tokenmill.tools.inspect as tool
    from tokenmill.load_any import make_rows
    from tokenmill.store.remote_store import open_store

    if row is not None and document is not None:
        raise UsageError("pass either --row N or --document N, not both")
    opened = open_store(store)
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
        show_row = tool.row_json if as_json else partial(tool.render_row, max_tokens=max_tokens)
        shown = show_row(opened, rows, row)
    elif document is not None:
        show_one = tool.document_json if as_json else partial(tool.render_document, max_tokens=max_tokens)
        shown = show_one(opened, document, split)
    else:
        shown = tool.overview_json(opened) if as_json else tool.render_overview(opened)
    print_json(shown) if as_json else console().print(shown)
