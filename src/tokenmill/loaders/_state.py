"""Check that the state of a loader, a place in training as a few readable values, belongs to a dataset.

`next_row` is all that is needed to resume. The rest is there to detect another dataset, and to say what differs.
"""

from __future__ import annotations

from typing import Any

from tokenmill.arguments import MOST_ROWS, show, whole_number
from tokenmill.dataset.rows import Rows
from tokenmill.errors import UsageError

__all__ = ["VERSION", "check_state"]

VERSION = 1


def check_state(state: Any, rows: Rows) -> int:
    """Check that a state is one of these rows, and return the row to continue with.

    Batch size and world size may have changed, and a mixture may have new stages from `next_row` on.
    """
    if not isinstance(state, dict) or not {"version", "fingerprint", "next_row"} <= set(state):
        raise UsageError(f"this is not the state of a loader: {show(state)}; pass what state_dict() returned")
    version = whole_number(state["version"], "the state's version")
    if version != VERSION:
        raise UsageError(f"the state has version {version}; this tokenmill reads version {VERSION}")
    next_row = whole_number(state["next_row"], "the state's next_row", 0, MOST_ROWS)
    if state["fingerprint"] != rows.fingerprint:
        both = (_without_later_stages(dataset, next_row) for dataset in (state.get("dataset"), rows.describe()))
        found = _difference(*both)
        if found is not None:
            raise UsageError(f"the state is of another dataset: {found}; make the dataset as it was, or start anew")
    return next_row


def _without_later_stages(description: Any, next_row: int) -> Any:
    """Drop stages that begin later: up to there the mixture is the same."""
    is_mix = isinstance(description, dict) and description.get("kind") == "mix"
    stages = description.get("stages") if is_mix else None
    if not isinstance(stages, dict):
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
    if theirs == ours:
        return None
    return f"{where or 'it'} is {show(theirs)} in the state and {show(ours)} here"
