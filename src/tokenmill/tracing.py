"""From a training step to the documents it saw, and from a document to the steps that saw it.

Order is arithmetic, so both ways are too: a step is asked for its rows, and a row for its documents; a document
knows its rows, and permutations and mixtures can be undone. Nothing is searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.arguments import MOST_ROWS, positive, whole_number
from tokenmill.dataset.base import PackedRows, Rows, as_rows
from tokenmill.dataset.copying import RowBlock
from tokenmill.errors import UsageError
from tokenmill.loaders.base import count_rows
from tokenmill.progress import show_safely
from tokenmill.store.sources import read_sources

__all__ = [
    "Sighting",
    "StepTrace",
    "TracedDocument",
    "TracedRow",
    "render_sightings",
    "render_step",
    "trace_document",
    "trace_step",
]

MOST_LINES = 200
MOST_ROWS_OF_STEP = 1 << 22
MOST_EPOCHS = 10_000
"""Every epoch is looked at: more would take minutes."""


class TracedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document in a row: where it starts there, how many of its tokens are there, and where it came from."""

    source: str
    document: int
    start: int
    num_tokens: int
    input: str | None = None
    position: int | None = None
    keys: dict[str, str | None] = {}


class TracedRow(msgspec.Struct, frozen=True):
    """A row of a step: its number over all epochs, and the rank that gets it."""

    row: int
    rank: int
    documents: list[TracedDocument]


class StepTrace(msgspec.Struct, frozen=True):
    """All rows of a global batch, in order."""

    step: int
    rows: list[TracedRow]


class Sighting(msgspec.Struct, frozen=True):
    """One time that tokens of a document are in a batch."""

    step: int
    rank: int
    place: int
    """The row of the rank's batch."""
    epoch: int
    start: int
    num_tokens: int


def trace_step(
    rows: Rows, step: int, *, batch_size: int, world_size: int = 1, inputs: Sequence[str] | None = None
) -> StepTrace:
    """The documents of a global batch. `inputs` are the names of the store's inputs, to say where they came from."""
    rows, step = as_rows(rows, "trace_step"), whole_number(step, "step")
    batch_size, size = _sizes(batch_size, world_size)
    last = (MOST_ROWS if rows.limit is None else rows.limit - 1) // size
    if not 0 <= step <= last:
        raise UsageError(f"step {step} does not exist; expected 0 to {last}")
    block = RowBlock(rows, step * size + np.arange(size), document_mask=False, limit=rows.limit)
    choices = rows.resolve(step * size + np.arange(min(size, (rows.limit or 1 << 62) - step * size)))
    leaf_of: dict[int, PackedRows] = {}
    for choice in choices:
        for place in (np.arange(size) if choice.at is None else choice.at).tolist():
            leaf_of[place] = choice.rows
    found = [(place, *segment) for place in range(size) for segment in block.cover.documents_of(place)]
    documents: list[list[TracedDocument]] = [[] for _ in range(size)]
    for (place, *_), document in _describe(leaf_of, found, inputs):
        documents[place].append(document)
    traced = [TracedRow(step * size + place, place // batch_size, some) for place, some in enumerate(documents)]
    return StepTrace(step, traced)


def _sizes(batch_size: int, world_size: int) -> tuple[int, int]:
    """Rows of one rank and of all ranks in a step."""
    batch_size, world_size = whole_number(batch_size, "batch_size", 1), whole_number(world_size, "world_size", 1)
    if batch_size * world_size > MOST_ROWS_OF_STEP:
        raise UsageError(
            f"a step of batch_size {batch_size} and world_size {world_size} has too many rows to list; "
            f"the most are {MOST_ROWS_OF_STEP}"
        )
    return batch_size, batch_size * world_size


def _describe(
    leaf_of: dict[int, PackedRows], found: list[tuple[int, int, int, int]], inputs: Sequence[str] | None
) -> list[tuple[tuple[int, int, int, int], TracedDocument]]:
    """Look up where documents came from, one table at a time."""
    described: dict[tuple[int, int, int, int], TracedDocument] = {}
    for leaf in dict.fromkeys(leaf_of.values()):
        mine = [segment for segment in found if leaf_of[segment[0]] is leaf]
        origins = read_sources(leaf.documents, [document for _, document, _, _ in mine])
        for segment, origin in zip(mine, origins, strict=True):
            described[segment] = _traced(leaf, segment, origin, inputs)
    return [(segment, described[segment]) for segment in found]


def _traced(
    leaf: PackedRows, segment: tuple[int, int, int, int], origin: dict[str, Any], inputs: Sequence[str] | None
) -> TracedDocument:
    _, document, start, length = segment
    number = origin.get("input")
    return TracedDocument(
        leaf.documents.name,
        document,
        start,
        length,
        inputs[number] if inputs is not None and number is not None else None,
        origin.get("position"),
        {name.removeprefix("key."): value for name, value in origin.items() if name.startswith("key.")},
    )


def trace_document(
    rows: Rows, document: int, *, batch_size: int, world_size: int = 1, epochs: float = 1.0, leaf: int = 0
) -> list[Sighting]:
    """The steps that see a document of a packing (the first one, unless told) in so many epochs."""
    leaves = as_rows(rows, "trace_document").leaves()
    batch_size, size = _sizes(batch_size, world_size)
    epochs = positive(epochs, "epochs", MOST_EPOCHS)
    packing = leaves[whole_number(leaf, "leaf", 0, len(leaves) - 1)]
    document = whole_number(document, "document")
    if not 0 <= document < packing.documents.num_documents:
        raise UsageError(
            f"document {document} is not in {packing.documents.name}, which has {packing.documents.num_documents}, "
            "from 0 on"
        )
    stop = count_rows(rows, epochs) or 0
    found = []
    for row in packing.rows_of(document):
        block = RowBlock(packing, np.array([row]), document_mask=False)
        parts = [(start, length) for number, start, length in block.cover.documents_of(0) if number == document]
        for index in rows.where(packing, row, stop):
            step, place = divmod(index, size)
            rank, place = divmod(place, batch_size)
            found += [Sighting(step, rank, place, index // rows.num_rows, start, length) for start, length in parts]
    return sorted(found, key=lambda sighting: (sighting.step, sighting.rank, sighting.place, sighting.start))


def render_step(trace: StepTrace) -> RenderableType:
    """A table with a line for each document."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name, options in (
        ("rank", {"justify": "right"}),
        ("row", {"justify": "right"}),
        ("document", {"justify": "right"}),
        ("tokens", {"justify": "right"}),
        ("from", {"overflow": "fold"}),
    ):
        table.add_column(name, **options)  # type: ignore[arg-type]
    lines = [(row, document) for row in trace.rows for document in row.documents]
    for row, document in lines[:MOST_LINES]:
        origin = show_safely(document.input or document.source)
        if document.position is not None:
            origin += f", position {document.position:,}"
        keys = "".join(f", {show_safely(k)} {show_safely(v)}" for k, v in document.keys.items() if v is not None)
        counts = (row.rank, row.row, document.document, document.num_tokens)
        table.add_row(*(f"{count:,}" for count in counts), origin + keys)
    num_tokens = sum(document.num_tokens for _, document in lines)
    title = f"step {trace.step:,}: {len(trace.rows):,} rows, {len(lines):,} documents, {num_tokens:,} tokens\n"
    more = f"\n... {len(lines) - MOST_LINES:,} more documents; --json prints all" if len(lines) > MOST_LINES else ""
    return Group(Text(title, style="bold"), table, Text(more, style="dim")) if more else Group(Text(title), table)


def render_sightings(document: int, sightings: list[Sighting], epochs: float) -> RenderableType:
    """A table with a line for each time."""
    steps = len({sighting.step for sighting in sightings})
    times = f"{steps:,} step{'s' if steps != 1 else ''}"
    title = Text(f"document {document:,}: in {times} of {epochs:g} epoch{'s' if epochs != 1 else ''}\n", style="bold")
    if not sightings:
        return Group(title, Text("no row has it: it is empty, left over at the end, or too long and dropped"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name in ("epoch", "step", "rank", "row of batch", "from token", "tokens"):
        table.add_column(name, justify="right")
    for s in sightings[:MOST_LINES]:
        table.add_row(*(f"{value:,}" for value in (s.epoch, s.step, s.rank, s.place, s.start, s.num_tokens)))
    return Group(title, table)
