"""The layouts of rows that are not packed documents: preference pairs, and prompts alone.

Such rows have only their own layout, which therefore needs no name in a call: inputs and targets of a row that holds
two answers mean nothing to a trainer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.dataset.rows import Integers, Rows
from tokenmill.errors import UsageError
from tokenmill.filling.batch import Batch, NumpyBatch
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk
from tokenmill.filling.layouts import Layout
from tokenmill.store.sources import read_kept

__all__ = ["arrange", "own_layout"]


def own_layout(rows: Rows, name: str = "xy") -> Layout:
    """Return the layout of rows that have their own; the user has asked for the named one, by default `xy`."""
    if name not in ("xy", rows.layout):
        raise UsageError(f"layout {name!r} is for packed documents, and these rows are {rows.layout}; leave it out")
    return {"pairs": pairs, "prompts": prompts}[str(rows.layout)]


def arrange(rows: Rows, index: Integers) -> Any:
    """Return rows by number as one batch in their own layout."""
    chunk = Chunk(rows, index, batch_size=len(index)).fill(BufferPool(np.int64))
    return own_layout(rows)(Batch(chunk.inputs[0], chunk.targets[0], chunk, 0))


def pairs(batch: NumpyBatch) -> dict[str, Any]:
    """Preference pairs: padded arrays of both texts, labels unshifted, and the columns of TRL's `DPOTrainer` as lists.

    A label is `ignore_index` outside the answers. A blank row, which only a last batch has, has no tokens.
    """
    inputs, is_trained = np.asarray(batch.inputs), np.asarray(batch.is_trained)
    shape = inputs.shape[0], inputs.shape[1] // 2
    sides = ("chosen", "rejected")
    found: dict[str, Any] = {}
    for side in sides:
        found[f"input_ids_{side}"] = np.zeros(shape, inputs.dtype)
        found[f"attention_mask_{side}"] = np.zeros(shape, np.int64)
        found[f"labels_{side}"] = np.full(shape, batch.ignore_index, inputs.dtype)
    columns: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    documents = batch.documents
    for row, segments in enumerate(documents):
        prompt: list[int] = []
        for side, (_, start, length) in zip(sides, segments, strict=False):
            tokens, trained = inputs[row, start : start + length], is_trained[row, start : start + length]
            found[f"input_ids_{side}"][row, :length] = tokens
            found[f"attention_mask_{side}"][row, :length] = 1
            found[f"labels_{side}"][row, :length] = np.where(trained, tokens, batch.ignore_index)
            # The answer is the end of a text. If the start of the prompts is cut off, more of one may be left.
            num_prompt = length - int(trained.sum())
            if num_prompt > len(prompt):
                prompt = tokens[:num_prompt].tolist()
            columns[f"{side}_ids"].append(tokens[num_prompt:].tolist())
        columns["prompt_ids"].append(prompt)
        for side in sides[len(segments) :]:
            columns[f"{side}_ids"].append([])
    return {**found, **columns, **_kept_fields(batch, documents)}


def prompts(batch: NumpyBatch) -> dict[str, Any]:
    """Prompts to be continued: padded on the left, so that generation starts at one place, and as lists."""
    inputs = np.asarray(batch.inputs)
    padded, mask = np.zeros_like(inputs), np.zeros(inputs.shape, np.int64)
    positions, ragged = np.zeros(inputs.shape, np.int64), []
    documents = batch.documents
    for row, segments in enumerate(documents):
        length = segments[0][2] if segments else 0
        first = inputs.shape[1] - length
        padded[row, first:], mask[row, first:] = inputs[row, :length], 1
        positions[row, first:] = np.arange(length)
        ragged.append(inputs[row, :length].tolist())
    arrays = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    return {**arrays, "prompt_ids": ragged, **_kept_fields(batch, documents)}


def _kept_fields(batch: NumpyBatch, documents: list[list[tuple[int, int, int]]]) -> dict[str, Any]:
    """Return the fields that `--keep-keys` kept, as `fields`, if the store has any; None for blank rows."""
    owners = batch.owners
    fields: dict[str, list[str | None]] = {}
    for owner in {id(owner): owner for owner in owners if owner is not None}.values():
        mine = [row for row, one in enumerate(owners) if one is owner]
        numbers: Integers = np.array([documents[row][0][0] for row in mine], np.int64)
        for name, values in read_kept(owner, numbers).items():
            column = fields.setdefault(name, [None] * len(owners))
            for row, value in zip(mine, values, strict=True):
                column[row] = value
    return {"fields": fields} if fields else {}
