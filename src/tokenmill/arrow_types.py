"""Types of nested columns of Arrow tables. Inputs and readers both look them up; the two do not import each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["find_type"]


def find_type(schema: Any, parts: Sequence[str]) -> Any:
    """The type of a column, or of a field inside struct columns; None if it does not exist."""
    import pyarrow.types as types

    if schema.get_field_index(parts[0]) < 0:
        return None
    kind = schema.field(parts[0]).type
    for name in parts[1:]:
        if not types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind
