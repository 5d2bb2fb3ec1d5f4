"""Check that the state of a loader (a place in training, as a few readable values) belongs to a dataset.

`next_row` is all that is needed to resume. The rest is there to detect another dataset, and to say what differs: the
description, and its hash, the fingerprint. Both are compared, so that a damaged state, or one combined from two, is
refused even if one half is right.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from tokenmill.arguments import MOST_ROWS, show, whole_number
from tokenmill.dataset.rows import Rows
from tokenmill.errors import UsageError

__all__ = ["VERSION", "check_state"]

VERSION = 1
DEEPEST = 100
"""A description has a few levels for each mixture, shuffle or slice; deeper values are not looked into."""


def check_state(state: Any, rows: Rows) -> int:
    """Check that a state belongs to these rows, and return the row to continue with.

    Batch size and world size may have changed, and a mixture may have new stages from `next_row` on. The description
    must be that of these rows, and the fingerprint must be that of the description.
    """
    state = _plain(state)
    if not isinstance(state, dict) or not {"version", "fingerprint", "next_row"} <= set(state):
        raise UsageError(f"this is not the state of a loader: {show(state)}; pass what state_dict() returned")
    version = whole_number(state["version"], "the state's version")
    if version != VERSION:
        raise UsageError(f"the state has version {version}; this tokenmill reads version {VERSION}")
    next_row = whole_number(state["next_row"], "the state's next_row", 0, MOST_ROWS)
    for name in ("batch_size", "world_size"):
        whole_number(state.get(name, 1), f"the state's {name}", 1)
    theirs, ours = state.get("dataset"), msgspec.json.decode(msgspec.json.encode(rows.describe()))
    found = _difference(*(_without_later_stages(dataset, next_row) for dataset in (theirs, ours)))
    if found is not None:
        raise UsageError(f"the state is of another dataset: {found}; make the dataset as it was, or start over")
    expected = _fingerprint_of(theirs)
    if not isinstance(state["fingerprint"], str) or state["fingerprint"] != expected:
        raise UsageError(
            f"the state contradicts itself: its fingerprint is {show(state['fingerprint'])}, and that of the dataset "
            f"it describes is {show(expected)}; load the state of another checkpoint, or start over"
        )
    return next_row


def _plain(value: Any, depth: int = 0) -> Any:
    """Turn numbers of numpy and torch into Python's, and tuples into lists, as deep as a description can be."""
    if depth > DEEPEST:
        return value
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar else value


def _fingerprint_of(description: Any) -> str | None:
    """Hash a description as `Rows.fingerprint` does; None if it is more than plain values."""
    try:
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(description, order="deterministic"))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _without_later_stages(description: Any, next_row: int) -> Any:
    """Drop stages that begin later: up to there the mixture is the same."""
    stages = description.get("stages") if isinstance(description, dict) else None
    if not isinstance(stages, dict) or not isinstance(description.get("kind"), str) or description["kind"] != "mix":
        return description
    # In a state from a file, the row of a stage may be anything.
    numbers = {row: int(row) for row in stages if isinstance(row, str) and row.isdecimal() and len(row) < 20}
    kept = {row: weights for row, weights in stages.items() if numbers.get(row, 0) < max(next_row, 1)}
    return {**description, "stages": kept}


def _difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    """Describe the first difference."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            place = f"{where}.{key}" if where else key
            if key not in theirs or key not in ours:
                return f"{place} is only in the {'state' if key in theirs else 'dataset'}"
            found = _difference(theirs[key], ours[key], place)
            if found is not None:
                return found
        return None
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return next((d for i, (a, b) in pairs if (d := _difference(a, b, f"{where}[{i}]")) is not None), None)
    # A value in a foreign state may be an array, which `==` compares item by item.
    if isinstance(theirs, (str, int, float, type(None))) and theirs == ours:
        return None
    return f"{where or 'it'} is {show(theirs)} in the state and {show(ours)} here"
