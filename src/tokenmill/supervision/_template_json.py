"""JSON as chat templates write it: not escaped for HTML and not sorted, as Transformers has it.

The tools of one record are mostly those of the record before. So their JSON and their strings are kept.
"""

from __future__ import annotations

import json
import marshal
from functools import lru_cache
from typing import Any, NamedTuple

from tokenmill.supervision.record_messages import collect_strings

__all__ = ["KnownTool", "Options", "encode_json", "know_tools"]

MOST_KEPT_BYTES = 20_000


class Options(NamedTuple):
    """Those of the filter `tojson` that Transformers offers, with its defaults."""

    ensure_ascii: Any = False
    indent: Any = None
    separators: Any = None
    sort_keys: Any = False


class KnownTool(dict[str, Any]):
    """A tool whose JSON is kept."""

    def __init__(self, tool: dict[str, Any]) -> None:
        super().__init__(tool)
        self._texts: dict[Options, str] = {}

    def to_json(self, options: Options) -> str:
        """Return the tool as JSON."""
        text = self._texts.get(options)
        if text is None:
            text = self._texts[options] = _encoder(options).encode(self)
        return text


def encode_json(value: Any, options: Options) -> str:
    """Return a value as JSON."""
    return value.to_json(options) if type(value) is KnownTool else _encoder(options).encode(value)


def know_tools(tools: list[dict[str, Any]]) -> tuple[list[KnownTool], list[str]]:
    """Return the tools and all strings in them."""
    data = marshal.dumps(tools, 0)
    return (
        _known(data) if len(data) <= MOST_KEPT_BYTES else ([KnownTool(tool) for tool in tools], collect_strings(tools))
    )


@lru_cache(500)
def _known(data: bytes) -> tuple[list[KnownTool], list[str]]:
    tools = marshal.loads(data)
    return [KnownTool(tool) for tool in tools], collect_strings(tools)


@lru_cache(100)
def _encoder(options: Options) -> json.JSONEncoder:
    ensure_ascii, indent, separators, sort_keys = options
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
