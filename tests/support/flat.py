"""What `layout="hf-flat"` must contain, by its definition."""

from __future__ import annotations

from typing import Any

import numpy as np

Sequences = list[tuple[list[int], list[int]]]


def sequences_of(batch: Any) -> Sequences:
    """The ids and labels of the sequences of a plain batch: its documents if they are masked, otherwise its rows."""
    found = []
    for inputs, targets, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
        used = documents[-1][1] + documents[-1][2] if documents else 0
        pieces = [(start, start + length) for _, start, length in documents] if batch.is_masked else [(0, used)]
        for start, stop in pieces:
            labels = [-100, *targets[start : stop - 1].tolist()]
            found += [(inputs[start:stop].tolist(), labels)] if stop > start else []
    return found


def flatten(sequences: Sequences) -> dict[str, Any]:
    """Lay sequences end to end; without any, a single token stands for them."""
    sequences = sequences or [([0], [-100])]
    lengths = [len(ids) for ids, _ in sequences]
    edges = np.cumsum([0, *lengths], dtype=np.int32)
    return {
        "input_ids": np.array([[token for ids, _ in sequences for token in ids]]),
        "labels": np.array([[label for _, labels in sequences for label in labels]]),
        "position_ids": np.array([[place for length in lengths for place in range(length)]]),
        "seq_idx": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def same_batches(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check keys in order, values, shapes and types."""
    assert list(found) == list(expected)
    for name, part in expected.items():
        assert type(found[name]) is type(part), name
        if isinstance(part, np.ndarray):
            assert found[name].dtype == part.dtype, name
            assert found[name].shape == part.shape, name
            assert (found[name] == part).all(), name
        else:
            assert found[name] == part, name
