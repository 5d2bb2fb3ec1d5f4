"""Batches in some layout as trees of arrays, which loaders of frameworks change array by array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.loaders.layouts import RAGGED

__all__ = ["map_parts"]


def map_parts(change: Callable[[Any, bool], Any], part: Any, is_ragged: bool = False) -> Any:
    """Change everything in a batch that is not a dict, a tuple or a list.

    `change` is also told whether a part is ragged, which only its name says: lengths of documents may happen to be
    as many as a row has tokens.
    """
    if isinstance(part, dict):
        return {name: map_parts(change, value, name in RAGGED) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        return type(part)(map_parts(change, value, is_ragged) for value in part)
    return change(part, is_ragged)
