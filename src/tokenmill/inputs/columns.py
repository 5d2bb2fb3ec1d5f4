"""Which field of a data set holds the text, where nobody has said so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from tokenmill.inputs.peeking import is_json, read_blocks

__all__ = ["DEFAULT", "STRINGS", "only_text_column", "text_column_of_card", "text_column_of_file"]

DEFAULT = "text"
STRINGS = {"string", "large_string", "string_view"}
"""The types of columns of text, as Arrow calls them."""
FIRST_RECORDS = 100


def only_text_column(kinds: Mapping[str, str]) -> str | None:
    """`text` if there is such a column, else the only one of strings; None where it has to be asked for."""
    if DEFAULT in kinds:
        return DEFAULT
    strings = [name for name, kind in kinds.items() if kind in STRINGS]
    return strings[0] if len(strings) == 1 else None


def text_column_of_card(card: Mapping[str, Any], config: str | None) -> str | None:
    """By the features that a card describes for a configuration."""
    described = card.get("dataset_info")
    entries = described if isinstance(described, list) else [described]
    known = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("features"), list)]
    for entry in known:
        if str(entry.get("config_name", "default")) == (config or "default"):
            features = [feature for feature in entry["features"] if isinstance(feature, dict) and "name" in feature]
            return only_text_column({str(feature["name"]): str(feature.get("dtype", "")) for feature in features})
    return None


def text_column_of_file(path: str) -> str | None:
    """By the schema of a Parquet file, or by the first records of JSON lines; other files have no fields."""
    return only_text_column(_kinds_of_records(path) if is_json(path) else _kinds_of_columns(path))


def _kinds_of_columns(path: str) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return {field.name: str(field.type) for field in pq.read_schema(path)}
    except (OSError, pa.ArrowException):
        return {}


def _kinds_of_records(path: str) -> dict[str, str]:
    """The fields that hold strings, and the others, in as many lines as tell it."""
    kinds: dict[str, str] = {}
    head = next(read_blocks(path), b"")
    for line in head.splitlines()[:FIRST_RECORDS]:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            for name, value in msgspec.json.decode(line, type=dict[str, Any]).items():
                if isinstance(value, str):
                    kinds[name] = "string"
                kinds.setdefault(name, "")
    return kinds
