"""`tokenmill trace`: from a step to its documents and back."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli._flags import (
    Align,
    AsJson,
    BatchSize,
    LongDocuments,
    MaxDocuments,
    Packing,
    Seed,
    SeqLen,
    Shuffle,
    Store,
    row_option,
)
from tokenmill.cli._output import console, print_json
from tokenmill.errors import UsageError

__all__ = ["trace"]


def trace(
    store: Store,
    step: Annotated[int | None, typer.Option(help="List the documents of this step, counted from 0.")] = None,
    document: Annotated[int | None, typer.Option(help="List the steps that train on this document.")] = None,
    seq_len: SeqLen = 2048,
    batch_size: BatchSize = 8,
    world_size: Annotated[int, row_option(help="Number of ranks.")] = 1,
    packing: Packing = "concat",
    long_documents: LongDocuments = None,
    max_documents: MaxDocuments = None,
    align: Align = None,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    balance: Annotated[bool, row_option(help="Ranks as with balance=True of the loader.")] = False,
    split: Annotated[str, row_option(help="Split of the store.")] = "train",
    epochs: Annotated[float, typer.Option(help="With --document: how many epochs to look at.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """List the documents of a training step, or the steps that train on a document.

    The flags of rows are those of tokenmill.load and have the same defaults.
    """
    from tokenmill.load_any import make_rows
    from tokenmill.store.remote_store import open_store
    from tokenmill.tools.trace import render_sightings, render_step, trace_document, trace_step

    if (step is None) == (document is None):
        raise UsageError("pass either --step N, to see its documents, or --document N, to see its steps")
    opened = open_store(store)
    rows = make_rows(
        opened.split(split),
        seq_len=seq_len,
        packing=packing,
        long_documents=long_documents,
        max_documents=max_documents,
        align=align,
        shuffle=shuffle,
        seed=seed,
    )
    if step is not None:
        inputs = [file.path for file in opened.manifest.inputs]
        found = trace_step(rows, step, batch_size=batch_size, world_size=world_size, balance=balance, inputs=inputs)
        print_json(found) if as_json else console().print(render_step(found))
    elif document is not None:
        sightings = trace_document(
            rows, document, batch_size=batch_size, world_size=world_size, epochs=epochs, balance=balance
        )
        print_json(sightings) if as_json else console().print(render_sightings(document, sightings, epochs))
