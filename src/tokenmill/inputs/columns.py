"""Which field of a data set holds the text, where nobody has said so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULT", "only_text_column", "text_column_of_card", "text_column_of_file"]

DEFAULT = "text"
STRINGS = {"string", "large_string", "string_view"}


def only_text_column(kinds: Mapping[str, str]) -> str | None:
    """`text` if there is such a column, else the only one of strings; None where it has to be asked for."""
    if DEFAULT in kinds:
        return DEFAULT
    strings = [name for name, kind in kinds.items() if kind in STRINGS]
    return strings[0] if len(strings) == 1 else None


def text_column_of_card(card: Mapping[str, Any], config: str | None) -> str | None:
    """By the features that a card describes."""
    described = card.get("dataset_info")
    entries = described if isinstance(described, list) else [described]
    known = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("features"), list)]
    named = [entry for entry in known if entry.get("config_name", "default") == (config or "default")]
    for entry in named or known[:1]:
        features = [feature for feature in entry["features"] if isinstance(feature, dict) and "name" in feature]
        return only_text_column({str(feature["name"]): str(feature.get("dtype", "")) for feature in features})
    return None


def text_column_of_file(path: str) -> str | None:
    """By the schema of a Parquet file; other files have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return None
    return only_text_column({field.name: str(field.type) for field in schema})
