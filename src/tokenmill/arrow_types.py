"""Types of columns of Arrow tables. Inputs and readers both look them up; the two do not import each other."""

from __future__ import annotations

from typing import Any

__all__ = ["STRINGS", "column_path", "find_type", "holds_strings"]

STRINGS = {"string", "large_string", "string_view"}
"""Arrow's names for the types of text columns."""


def column_path(schema: Any, key: str) -> list[str]:
    """The names that a key leads through; a column whose own name has dots comes first."""
    return [key] if schema.get_field_index(key) >= 0 else key.split(".")


def find_type(schema: Any, key: str) -> Any:
    """The type of a column, or of a field inside struct columns (`meta.url`); None if it does not exist."""
    import pyarrow.types as types

    first, *inner = column_path(schema, key)
    if schema.get_field_index(first) < 0:
        return None
    kind = schema.field(first).type
    for name in inner:
        if not types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def holds_strings(kind: Any, *, or_nothing: bool = False) -> bool:
    """Whether a column has strings, perhaps in a dictionary; or, if that is enough, only nulls."""
    import pyarrow.types as types

    held = kind.value_type if types.is_dictionary(kind) else kind
    return str(held) in STRINGS or (or_nothing and bool(types.is_null(held)))
