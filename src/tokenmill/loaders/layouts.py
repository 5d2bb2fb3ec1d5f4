"""What trainers call the parts of a batch. All of it follows from inputs, targets and document starts.

Names and conventions as the trainers' own code has them: shifted or unshifted labels, what marks padding,
what a label without loss looks like. Without a document mask, a row is one document to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.copying import IGNORED
from tokenmill.loaders.batches import Batch

__all__ = ["LAYOUTS", "RAGGED", "Layout"]

RAGGED = {"doc_lens", "max_doc_lens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Parts of batches that have no value for each token."""

Layout = Callable[[Batch], Any]
"""Turns a batch of numpy arrays into what a trainer's step takes."""


def xy(batch: Batch) -> Batch:
    """nanoGPT: `x, y`, shifted by one."""
    return batch


def hf(batch: Batch) -> dict[str, Any]:
    """Transformers and TRL: labels are not shifted; the model does that.

    Where documents are kept apart there is no attention mask: with one, its models would not look at positions.
    """
    labels = np.full_like(batch.targets, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    plain = {
        "input_ids": batch.inputs,
        "labels": labels,
        "position_ids": _positions(batch).astype(np.int64),
    }
    if not batch.is_masked:
        return plain | {"attention_mask": batch.attention_mask}
    return plain | {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def sft(batch: Batch) -> dict[str, Any]:
    """Supervised arrays: targets are shifted, and `loss_mask` has the weights where the store has some."""
    return {
        "input_ids": batch.inputs,
        "target_ids": _ids_only(batch.targets),
        "attention_mask": batch.attention_mask,
        "loss_mask": batch.loss_weights,
    }


def megatron(batch: Batch) -> dict[str, Any]:
    """Megatron-LM: labels are shifted and always ids; `loss_mask` says which count."""
    return {
        "tokens": batch.inputs,
        "labels": _ids_only(batch.targets),
        "loss_mask": batch.loss_mask,
        "position_ids": _positions(batch).astype(np.int64),
    }


def torchtitan(batch: Batch) -> tuple[dict[str, Any], Any]:
    """torchtitan: inputs with positions, and shifted labels."""
    return {"input": batch.inputs, "positions": _positions(batch).astype(np.int64)}, batch.targets


def olmo(batch: Batch) -> dict[str, Any]:
    """OLMo-core: the lengths of documents in each row, filled up with 0; `label_mask` is that of unshifted labels."""
    label_mask = np.zeros(batch.targets.shape, np.bool_)
    label_mask[:, 1:] = batch.targets[:, :-1] != IGNORED
    num_rows, seq_len = batch.inputs.shape
    edges = np.asarray(batch.cu_seqlens) if batch.is_masked else np.arange(0, (num_rows + 1) * seq_len, seq_len)
    # OLMo-core lays rows end to end and adds lengths up, so padding is a document too.
    rows = edges[:-1] // seq_len
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    doc_lens = np.zeros((num_rows, int(places.max()) + 1), np.int32)
    doc_lens[rows, places] = np.diff(edges)
    return {
        "input_ids": batch.inputs,
        "doc_lens": doc_lens,
        "max_doc_lens": doc_lens.max(axis=1).tolist(),
        "label_mask": label_mask,
    }


def maxtext(batch: Batch) -> dict[str, Any]:
    """MaxText: segments 1..n with 0 for padding; a target without loss has segment 0."""
    segments = batch.segment_ids if batch.is_masked else np.minimum(batch.segment_ids, 1)
    return {
        "inputs": batch.inputs,
        "targets": _ids_only(batch.targets),
        "inputs_segmentation": segments,
        "inputs_position": _positions(batch),
        "targets_segmentation": np.where(batch.targets == IGNORED, np.int32(0), segments),
        "targets_position": _positions(batch),
    }


def _positions(batch: Batch) -> npt.NDArray[Any]:
    """Counted in each document where documents are kept apart, else through the row."""
    if batch.is_masked:
        restarting: npt.NDArray[Any] = batch.positions
        return restarting
    return np.broadcast_to(np.arange(batch.inputs.shape[1], dtype=np.int32), batch.inputs.shape).copy()


def _ids_only(targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    ids: npt.NDArray[Any] = np.maximum(targets, 0)
    return ids


LAYOUTS: dict[str, Layout] = {
    "xy": xy,
    "hf": hf,
    "sft": sft,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "olmo": olmo,
    "maxtext": maxtext,
}
