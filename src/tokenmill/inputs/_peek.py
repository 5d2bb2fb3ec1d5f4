"""Look into data before a run reads it: how many documents a file has, and which of its fields holds the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.arrow_types import STRINGS
from tokenmill.compression import DamagedInput
from tokenmill.errors import DataError
from tokenmill.files import InputStream, detect_compression

__all__ = ["count_documents", "only_text_column", "text_column_of_card", "text_column_of_file"]

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DEFAULT = "text"
FIRST_RECORDS = 100


def _is_json(path: str) -> bool:
    """Whether a name says JSON or JSON lines."""
    return bool({"json", "jsonl", "ndjson"}.intersection(path.rpartition("/")[2].lower().split(".")[1:]))


def _read_blocks(path: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file block by block, as far as it can be read."""
    file = Path(path)
    try:
        with file.open("rb") as head:
            compression = detect_compression(head.read(64), path)
        with InputStream(file, compression) as stream:
            while data := stream.read(BLOCK_BYTES):
                yield data
    except (DamagedInput, DataError, OSError):
        return


def count_documents(path: str, limit: int) -> int:
    """Count documents up to `limit`, and never more than a reader finds.

    These are rows of Parquet, and lines of JSON that begin like a record; any other file that is not blank counts as
    one.
    """
    if path.endswith(".parquet"):
        return _read_footer(path)[0]
    if _is_json(path):
        return _count_records(path, limit)
    return int(any(data.strip() for data in _read_blocks(path)))


def _read_footer(path: str) -> tuple[int, dict[str, str]]:
    """The number of rows of a Parquet file, and the types of its columns; 0 and no types if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
        return footer.num_rows, {field.name: str(field.type) for field in footer.schema.to_arrow_schema()}
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return 0, {}


def _count_records(path: str, limit: int) -> int:
    """Count lines that begin with an object; if the first line is not a complete object, count one."""
    count, last = 0, b"\n"
    for number, data in enumerate(_read_blocks(path)):
        if number == 0:
            data = data.removeprefix(BYTE_ORDER_MARK)
            try:
                msgspec.json.decode(data.lstrip().partition(b"\n")[0], type=dict[str, msgspec.Raw])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return int(data.lstrip(b"[ \t\r\n").startswith(b"{"))
        count += (last + data).count(b"\n{")
        last = data[-1:]
        if count >= limit:
            break
    return count


def only_text_column(types: Mapping[str, str]) -> str | None:
    """`text` if there is such a column, else the only column of strings; None if the user has to choose."""
    if DEFAULT in types:
        return DEFAULT
    strings = [name for name, kind in types.items() if kind in STRINGS]
    return strings[0] if len(strings) == 1 else None


def text_column_of_card(card: Mapping[str, Any], config: str | None) -> str | None:
    """The text column by the features that a card describes for a configuration."""
    described = card.get("dataset_info")
    for entry in described if isinstance(described, list) else [described]:
        if isinstance(entry, dict) and str(entry.get("config_name", "default")) == (config or "default"):
            features = [feature for feature in entry.get("features") or () if isinstance(feature, dict)]
            return only_text_column({str(one.get("name")): str(one.get("dtype", "")) for one in features})
    return None


def text_column_of_file(path: str) -> str | None:
    """The text column by the schema of a Parquet file or the first records of JSON lines; None for other formats."""
    return only_text_column(_types_of_records(path) if _is_json(path) else _read_footer(path)[1])


def _types_of_records(path: str) -> dict[str, str]:
    """The fields of the first records: `string` if a record has a string there, else empty."""
    types: dict[str, str] = {}
    head = next(_read_blocks(path), b"")
    for line in head.splitlines()[:FIRST_RECORDS]:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            for name, value in msgspec.json.decode(line, type=dict[str, Any]).items():
                if isinstance(value, str):
                    types[name] = "string"
                types.setdefault(name, "")
    return types
