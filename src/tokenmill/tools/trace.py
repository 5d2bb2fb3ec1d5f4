"""`trace`: from a training step to its documents, and from a document to the steps that train on it.

The order of rows is arithmetic, and so are both directions: a step gives its rows, and a row its documents; a
document gives its rows, and permutations and mixtures can be inverted. Nothing is searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tokenmill.arguments import MOST_ROWS, positive, whole_number
from tokenmill.dataset.rows import Rows, as_rows
from tokenmill.display.tables import make_table
from tokenmill.errors import UsageError
from tokenmill.formatting import plural, show_safely
from tokenmill.loaders.deal import find_owners
from tokenmill.loaders.passes import count_rows
from tokenmill.store.sources import read_sources
from tokenmill.tools._document_parts import document_parts
from tokenmill.tools.inspect.document_view import describe_origin, kept_fields

__all__ = ["Sighting", "StepTrace", "render_sightings", "render_step", "trace_document", "trace_step"]

MOST_LINES = 200
MOST_ROWS_OF_STEP = 1 << 22
MOST_EPOCHS = 10_000
"""The trace of a document visits every epoch, so more would take minutes."""


class TracedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document in a row: where it starts, how many of its tokens the row holds, and where it came from."""

    source: str
    document: int
    start: int
    offset: int
    """The first of its tokens that the row holds."""
    num_tokens: int
    input: str | None = None
    position: int | None = None
    keys: dict[str, str | None] = {}


class TracedRow(msgspec.Struct, frozen=True):
    """A row of a step: its number over all epochs, and the rank that receives it."""

    row: int
    rank: int
    documents: list[TracedDocument]


class StepTrace(msgspec.Struct, frozen=True):
    """All rows of a global batch, in order."""

    step: int
    rows: list[TracedRow]


class Sighting(msgspec.Struct, frozen=True):
    """One batch that holds tokens of a document."""

    step: int
    rank: int
    place: int
    """The row of the rank's batch."""
    epoch: int
    start: int
    """In the row."""
    offset: int
    """In the document."""
    num_tokens: int


def trace_step(
    rows: Rows,
    step: int,
    *,
    batch_size: int,
    world_size: int = 1,
    balance: bool = False,
    inputs: Sequence[str] | None = None,
) -> StepTrace:
    """List the documents of a global batch; `inputs` are the names of the store's inputs.

    `balance` is that of the loader. Only the ranks of a padded last batch depend on how many epochs the loader has.
    """
    rows, step = as_rows(rows, "trace_step"), whole_number(step, "step")
    batch_size, size = _sizes(batch_size, world_size)
    last = (MOST_ROWS if rows.limit is None else rows.limit - 1) // size
    if not 0 <= step <= last:
        raise UsageError(f"step {step} does not exist; expected 0 to {last}")
    documents: list[list[TracedDocument]] = [[] for _ in range(size)]
    for choice in rows.resolve(step * size + np.arange(min(size, (rows.limit or MOST_ROWS) - step * size))):
        places = (np.arange(size) if choice.at is None else choice.at).tolist()
        parts = document_parts(choice.rows, choice.numbers)
        found = [(place, part) for place, some in zip(places, parts, strict=False) for part in some]
        # The origins of all documents of a packing are looked up at once.
        source = choice.rows.documents
        numbers = [part.document for _, part in found]
        origins, stores = read_sources(source, numbers), source.find_sources(np.array(numbers, np.int64)).tolist()
        for (place, part), origin, store in zip(found, origins, stores, strict=True):
            file = inputs[origin["input"]] if inputs is not None and "input" in origin else None
            kept = kept_fields(origin)
            documents[place].append(TracedDocument(source.sources[store][0], *part, file, origin.get("position"), kept))
    ranks = (np.arange(size) // batch_size).tolist()
    if balance:
        ranks = _find_ranks(rows, step, batch_size, world_size, rows.limit)
    return StepTrace(step, [TracedRow(step * size + place, ranks[place], some) for place, some in enumerate(documents)])


def _find_ranks(rows: Rows, step: int, batch_size: int, world_size: int, limit: int | None) -> list[int]:
    """Return the rank that gets each row of a balanced global batch."""
    first = np.array([step * batch_size * world_size])
    found: list[int] = find_owners(rows, first, batch_size=batch_size, world_size=world_size, limit=limit)[0].tolist()
    return found


def _sizes(batch_size: int, world_size: int) -> tuple[int, int]:
    """Check both sizes; return the rows of one rank and of all ranks in a step."""
    batch_size, world_size = whole_number(batch_size, "batch_size", 1), whole_number(world_size, "world_size", 1)
    if batch_size * world_size > MOST_ROWS_OF_STEP:
        raise UsageError(
            f"a step of batch_size {batch_size} and world_size {world_size} has too many rows to list; "
            f"the most are {MOST_ROWS_OF_STEP}"
        )
    return batch_size, batch_size * world_size


def trace_document(
    rows: Rows,
    document: int,
    *,
    batch_size: int,
    world_size: int = 1,
    epochs: float = 1.0,
    leaf: int = 0,
    balance: bool = False,
) -> list[Sighting]:
    """List the steps of some epochs that train on a document of a packing, by default the first packing."""
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
        (all_parts,) = document_parts(packing, np.array([row]))
        parts = [part for part in all_parts if part.document == document]
        for index in rows.where(packing, row, stop):
            step, place = divmod(index, size)
            if balance:
                ranks = _find_ranks(rows, step, batch_size, world_size, stop)
                rank, place = ranks[place], ranks[:place].count(ranks[place])
            else:
                rank, place = divmod(place, batch_size)
            found += [Sighting(step, rank, place, index // rows.num_rows, *part[1:]) for part in parts]
    return sorted(found, key=lambda sighting: (sighting.step, sighting.rank, sighting.place, sighting.start))


def render_step(trace: StepTrace) -> RenderableType:
    """Draw a table with a line for each document."""
    lines = [(row, document) for row in trace.rows for document in row.documents]
    cells = []
    for row, document in lines[:MOST_LINES]:
        counts = (row.rank, row.row, document.start, document.document, document.offset, document.num_tokens)
        origin = describe_origin(document.input or document.source, document.position)
        keys = "".join(f", {show_safely(k)} {show_safely(v)}" for k, v in document.keys.items() if v is not None)
        cells.append([*(f"{count:,}" for count in counts), origin + keys])
    num_tokens = sum(document.num_tokens for _, document in lines)
    sizes = (plural(len(trace.rows), "row"), plural(len(lines), "document"), plural(num_tokens, "token"))
    title = Text(f"step {trace.step:,}: {', '.join(sizes)}\n", style="bold")
    # Two lines leave room for the place in a file in 80 columns.
    heads = ("rank", "row", "row\ntoken", "document", "document\ntoken", "tokens", "from")
    table = make_table(heads, cells, left=("from",))
    if len(lines) <= MOST_LINES:
        return Group(title, table)
    more = f"\n... {plural(len(lines) - MOST_LINES, 'more document')}; --json prints all"
    return Group(title, table, Text(more, style="dim"))


def render_sightings(document: int, sightings: list[Sighting], epochs: float) -> RenderableType:
    """Draw a table with a line for each time that a batch holds the document."""
    steps = plural(len({sighting.step for sighting in sightings}), "step")
    title = Text(f"document {document:,}: in {steps} of {epochs:g} epoch{'s' if epochs != 1 else ''}\n", style="bold")
    if not sightings:
        return Group(title, Text("no row has it: it is empty, left over at the end, or too long and dropped"))
    figures = [(s.epoch, s.step, s.rank, s.place, s.start, s.offset, s.num_tokens) for s in sightings[:MOST_LINES]]
    heads = ("epoch", "step", "rank", "row of batch", "row token", "document token", "tokens")
    return Group(title, make_table(heads, [[f"{value:,}" for value in line] for line in figures]))
