"""The names and conventions that trainers use for the parts of a batch.

They are those of the trainers' own code: shifted or unshifted labels, what marks padding, what a label without loss
looks like. Without a document mask, every layout treats a row as one document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.filling.batch import NumpyBatch

__all__ = ["FLAT_LAYOUTS", "LAYOUTS", "Layout", "map_parts"]

FLAT = "hf-flat"
"""The layout whose batches are one row of all tokens, without padding."""
FLAT_LAYOUTS = (FLAT, "flat")
"""Layouts of which no part has the shape (batch_size, seq_len)."""
UNSHIFTED = ("hf", FLAT, "olmo")
"""Layouts without targets, in which a label is the token at its own place."""
RAGGED = {"doc_lens", "max_doc_lens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "sources"}
"""Parts of batches that do not have one value for each token."""

Layout = Callable[[NumpyBatch], Any]
"""Turns a batch of numpy arrays into the arguments of a trainer's step."""


def xy(batch: NumpyBatch) -> NumpyBatch:
    """nanoGPT: `x, y`, shifted by one."""
    return batch


def hf(batch: NumpyBatch) -> dict[str, Any]:
    """Transformers and TRL: labels are not shifted, because the model shifts them.

    With a document mask there is no attention mask, because with one the models would ignore positions. `seq_idx`
    numbers the documents of each row from 0; the padding counts as one more.
    """
    plain = {
        "input_ids": batch.inputs,
        "labels": _unshifted_labels(batch),
        "position_ids": _positions(batch).astype(np.int64),
    }
    if not batch.is_masked:
        return plain | {"attention_mask": batch.attention_mask}
    segments = np.asarray(batch.segment_ids)
    return plain | {
        "seq_idx": np.where(segments > 0, segments - 1, segments.max(axis=1, keepdims=True)),
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def hf_flat(batch: NumpyBatch) -> dict[str, Any]:
    """Transformers' `DataCollatorWithFlattening`: the tokens of all rows in one row of shape (1, T), without padding.

    A sequence is a document with a document mask, otherwise a row. A batch without any tokens, which a rank may get
    after the last row, is one token without a label.
    """
    filled = np.asarray(batch.segment_ids) > 0
    positions = _positions(batch)
    parts = [batch.inputs, _unshifted_labels(batch), positions]
    if filled.all():
        inputs, labels, positions = (part.reshape(-1) for part in parts)
    elif filled.any():
        inputs, labels, positions = (part[filled] for part in parts)
    else:
        inputs, labels, positions = (part[:1, 0] for part in parts)
    starts = np.flatnonzero(positions == 0)
    edges = np.append(starts, len(positions)).astype(np.int32)
    lengths = np.diff(edges)
    return {
        "input_ids": inputs[None],
        "labels": labels[None],
        "position_ids": positions.astype(np.int64)[None],
        "seq_idx": np.arange(len(lengths), dtype=np.int32).repeat(lengths)[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def flat(batch: NumpyBatch) -> dict[str, Any]:
    """All tokens of a batch, padding included, in arrays of shape (T,): T is the same in every batch.

    A sequence is a document with a document mask, otherwise a row. `segment_ids` counts sequences from 1, and is 0 for
    padding.
    """
    ids = np.asarray(batch.segment_ids)
    cu_seqlens, max_seqlen, counts = batch.cu_seqlens, batch.max_seqlen, batch.num_documents
    if not batch.is_masked:
        ids, max_seqlen, counts = np.minimum(ids, 1), batch.seq_len, np.minimum(counts, 1)
        cu_seqlens = np.arange(len(ids) + 1, dtype=np.int32) * max_seqlen
    if len(ids) > 1:
        before = (np.cumsum(counts) - counts).astype(np.int32)
        ids = (ids + before[:, None]) * (ids > 0)
    return {
        "inputs": batch.inputs.reshape(-1),
        "targets": batch.targets.reshape(-1),
        "positions": _positions(batch).reshape(-1),
        "segment_ids": ids.reshape(-1),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
    }


def sft(batch: NumpyBatch) -> dict[str, Any]:
    """Supervised arrays: targets are shifted, and `loss_mask` has the weights if the store has any."""
    return {
        "input_ids": batch.inputs,
        "target_ids": _ids_only(batch.targets),
        "attention_mask": batch.attention_mask,
        "loss_mask": batch.loss_weights,
    }


def megatron(batch: NumpyBatch) -> dict[str, Any]:
    """Megatron-LM: labels are shifted and always ids; `loss_mask` says which have a loss."""
    return {
        "tokens": batch.inputs,
        "labels": _ids_only(batch.targets),
        "loss_mask": batch.loss_mask,
        "position_ids": _positions(batch).astype(np.int64),
    }


def torchtitan(batch: NumpyBatch) -> tuple[dict[str, Any], Any]:
    """torchtitan: inputs with positions, and shifted labels."""
    return {"input": batch.inputs, "positions": _positions(batch).astype(np.int64)}, batch.targets


def olmo(batch: NumpyBatch) -> dict[str, Any]:
    """OLMo-core: the lengths of documents in each row, padded with 0; `label_mask` is for unshifted labels."""
    label_mask = np.zeros(batch.targets.shape, np.bool_)
    label_mask[:, 1:] = batch.targets[:, :-1] != batch.ignore_index
    num_rows, seq_len = batch.inputs.shape
    # OLMo-core lays rows end to end and sums the lengths, so padding counts as a document.
    doc_lens = np.diff(batch.row_cu_seqlens) if batch.is_masked else np.full((num_rows, 1), seq_len, np.int32)
    return {
        "input_ids": batch.inputs,
        "doc_lens": doc_lens,
        "max_doc_lens": doc_lens.max(axis=1).tolist(),
        "label_mask": label_mask,
    }


def maxtext(batch: NumpyBatch) -> dict[str, Any]:
    """MaxText: segments 1..n with 0 for padding; a target without loss has segment 0."""
    segments = batch.segment_ids if batch.is_masked else np.minimum(batch.segment_ids, 1)
    return {
        "inputs": batch.inputs,
        "targets": _ids_only(batch.targets),
        "inputs_segmentation": segments,
        "inputs_position": _positions(batch),
        "targets_segmentation": np.where(batch.targets == batch.ignore_index, np.int32(0), segments),
        "targets_position": _positions(batch),
    }


def _unshifted_labels(batch: NumpyBatch) -> npt.NDArray[Any]:
    """Return the label of each token itself; the first one of a row has none."""
    labels: npt.NDArray[Any] = np.full_like(batch.targets, batch.ignore_index)
    labels[:, 1:] = batch.targets[:, :-1]
    return labels


def _positions(batch: NumpyBatch) -> npt.NDArray[Any]:
    """Return positions in the document with a document mask, otherwise in the row."""
    if batch.is_masked:
        restarting: npt.NDArray[Any] = batch.positions
        return restarting
    return np.broadcast_to(batch.row_places, batch.inputs.shape).copy()


def _ids_only(targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    ids: npt.NDArray[Any] = np.maximum(targets, 0)
    return ids


def map_parts(change: Callable[[Any, bool], Any], part: Any, is_ragged: bool = False) -> Any:
    """Apply a function to every part of a batch in some layout that is not a dict or a tuple.

    The function is also told whether the part is ragged. The name of a part says so, or the caller for all parts: a row
    may happen to have as many documents as tokens.
    """
    if isinstance(part, dict):
        return {name: map_parts(change, value, is_ragged or name in RAGGED) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map_parts(change, value, is_ragged) for value in part)
    return change(part, is_ragged)


LAYOUTS: dict[str, Layout] = {
    "xy": xy,
    "hf": hf,
    FLAT: hf_flat,
    "flat": flat,
    "sft": sft,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "olmo": olmo,
    "maxtext": maxtext,
}
