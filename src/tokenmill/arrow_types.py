"""Columns of Arrow tables, for inputs and for readers, which do not import each other."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["STRINGS", "as_text", "column_path", "find_type", "holds_bytes", "holds_strings", "holds_text", "is_utf8"]

STRINGS = {"string", "large_string", "string_view"}
"""Arrow's names for the types of text columns."""
BYTES = {"binary", "large_binary", "binary_view"}


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


def _held(kind: Any) -> Any:
    import pyarrow.types as types

    return kind.value_type if types.is_dictionary(kind) else kind


def holds_strings(kind: Any) -> bool:
    """Whether a column has strings, perhaps in a dictionary."""
    return str(_held(kind)) in STRINGS


def holds_bytes(kind: Any) -> bool:
    """Whether a column has bytes, perhaps in a dictionary: Impala, Hive and older Spark write strings this way."""
    return str(_held(kind)) in BYTES


def holds_text(kind: Any) -> bool:
    """Whether a column can be the text: strings, bytes, or only nulls."""
    import pyarrow.types as types

    return holds_strings(kind) or holds_bytes(kind) or bool(types.is_null(_held(kind)))


def as_text(column: Any) -> Any:
    """Read bytes as strings, also inside lists and structs; whether they are UTF-8 is not checked."""
    import pyarrow.compute as pc

    kind = _text_type(column.type)
    if kind == column.type:
        return column
    return pc.cast(column, options=pc.CastOptions(kind, allow_invalid_utf8=True))


def _text_type(kind: Any) -> Any:
    """The type with strings instead of bytes."""
    import pyarrow as pa
    import pyarrow.types as types

    if holds_bytes(kind):
        return pa.string() if types.is_binary(kind) else pa.large_string()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_text_type(field.type)) for field in kind])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_text_type(kind.value_type)))
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_text_type(kind.value_type)))
    return kind


def is_utf8(data: Any) -> bool:
    """Whether bytes, or the texts of an Arrow column, are UTF-8. Arrow checks 5 GB/s, `decode` a third of that."""
    import pyarrow as pa

    if not isinstance(data, pa.Array):
        offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
        data = pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data))
    try:
        data.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
