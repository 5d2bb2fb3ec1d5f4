"""What trainers call the parts of a batch. All of it follows from inputs, targets and document starts.

Names and conventions as the trainers' own code has them: shifted or unshifted labels, what marks padding,
what a label without loss looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.copying import IGNORED
from tokenmill.loaders.batches import Batch

__all__ = ["LAYOUTS", "Layout"]

Layout = Callable[[Batch], Any]
"""Turns a batch of numpy arrays into what a trainer's step takes."""


def xy(batch: Batch) -> Batch:
    """nanoGPT: `x, y`, shifted by one."""
    return batch


def hf(batch: Batch) -> dict[str, Any]:
    """Transformers and TRL: labels are not shifted; the model does that."""
    labels = np.full_like(batch.targets, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    return {
        "input_ids": batch.inputs,
        "labels": labels,
        "position_ids": batch.positions.astype(np.int64),
        "attention_mask": (batch.segment_ids > 0).astype(np.int64),
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def megatron(batch: Batch) -> dict[str, Any]:
    """Megatron-LM: labels are shifted and always ids; `loss_mask` says which count."""
    return {
        "tokens": batch.inputs,
        "labels": _ids_only(batch.targets),
        "loss_mask": batch.loss_mask,
        "position_ids": batch.positions.astype(np.int64),
    }


def torchtitan(batch: Batch) -> tuple[dict[str, Any], Any]:
    """torchtitan: inputs with positions, and shifted labels."""
    return {"input": batch.inputs, "positions": batch.positions.astype(np.int64)}, batch.targets


def olmo(batch: Batch) -> dict[str, Any]:
    """OLMo-core: the lengths of documents, padded with 0; `label_mask` is that of unshifted labels."""
    label_mask = np.zeros(batch.targets.shape, np.bool_)
    label_mask[:, 1:] = batch.targets[:, :-1] != IGNORED
    lengths = [[length for _, _, length in row] for row in batch.documents]
    doc_lens = np.zeros((len(lengths), max(map(len, lengths))), np.int32)
    for row, some in enumerate(lengths):
        doc_lens[row, : len(some)] = some
    return {
        "input_ids": batch.inputs,
        "doc_lens": doc_lens,
        "max_doc_lens": [max(some, default=0) for some in lengths],
        "label_mask": label_mask,
    }


def maxtext(batch: Batch) -> dict[str, Any]:
    """MaxText: segments 1..n with 0 for padding; a target without loss has segment 0."""
    return {
        "inputs": batch.inputs,
        "targets": _ids_only(batch.targets),
        "inputs_segmentation": batch.segment_ids,
        "inputs_position": batch.positions,
        "targets_segmentation": np.where(batch.targets == IGNORED, np.int32(0), batch.segment_ids),
        "targets_position": batch.positions,
    }


def _ids_only(targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    ids: npt.NDArray[Any] = np.maximum(targets, 0)
    return ids


LAYOUTS: dict[str, Layout] = {
    "xy": xy,
    "hf": hf,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "olmo": olmo,
    "maxtext": maxtext,
}
