"""Where a document came from, in words."""

from __future__ import annotations

from typing import Any

from tokenmill.formatting import show_safely

__all__ = ["describe_origin", "kept_fields"]


def describe_origin(path: str, position: int | None) -> str:
    """`data/a.jsonl, position 5`."""
    return show_safely(path) + ("" if position is None else f", position {position:,}")


def kept_fields(row: dict[str, Any]) -> dict[str, str | None]:
    """The fields of a document that `--keep-keys` kept, from its row in the table of documents."""
    return {name.removeprefix("key."): value for name, value in row.items() if name.startswith("key.")}
