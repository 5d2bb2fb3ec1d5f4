"""Decode JSON strings into one buffer of UTF-8, without a Python string for each.

The strings of a block are joined, and `codecs.escape_decode` of the standard library decodes their escapes in one call.
It knows the escapes of C. These include all of JSON except `\\u` and `\\/`, which it leaves in place; a text that may
contain one of these is decoded on its own. If many texts do, or there are many backslashes, nothing is packed.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from codecs import escape_decode
from typing import Any

import msgspec
import numpy as np

from tokenmill.text_batch import PackedTexts

__all__ = ["find_all", "is_utf8", "pack"]

QUOTE, LEFT_ESCAPES = ord('"'), {b"u", b"/"}
MOST_BACKSLASHES = 40
"""In 8 KB of texts. With more of them, as in TeX, checking each takes longer than packing saves."""

# escape_decode warns of escapes that it does not know; this module searches for them itself.
warnings.filterwarnings("ignore", ".*invalid.* escape sequence", Warning, re.escape(__name__))


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


def pack(strings: list[Any]) -> PackedTexts | None:
    """Pack valid JSON values as texts; None if one is not a string, or if too many have escapes."""
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    if int(lengths.min()) < len('""'):
        return None
    parts = [*strings]
    parts[0] = memoryview(parts[0])[1:]
    parts[-1] = memoryview(parts[-1])[:-1]
    joined = b"\xff".join(parts)
    starts = np.cumsum(lengths + 1)[:-1] - 1
    if memoryview(strings[0])[0] != QUOTE or not (np.frombuffer(joined, np.uint8)[starts] == QUOTE).all():
        return None
    try:
        data: bytes = escape_decode(joined)[0]
    except (ValueError, Warning):
        # Unknown escapes are an error in some Python versions, or if warnings are errors.
        return None
    if data.count(b"\\", 0, 8192) > MOST_BACKSLASHES:
        return None
    left = [at for at in find_all(data, b"\\", len(data)) if data[at + 1 : at + 2] in LEFT_ESCAPES]
    if len(left) > len(strings) // 4:
        return None
    if left:
        data = _decode_some(data, left, strings)
    return PackedTexts(data, len(strings), int(lengths.max()))


def _decode_some(data: bytes, places: list[int], strings: list[Any]) -> bytes:
    """Decode the texts around some places on their own, and put them into the packed texts."""
    edges = [-2, *find_all(data, b"\xff", len(data)), len(data) + 1]
    view, done = memoryview(data), 0
    parts: list[bytes | memoryview] = []
    for number in sorted({bisect_left(edges, at) - 1 for at in places}):
        parts += [view[done : edges[number] + 2], msgspec.json.decode(strings[number], type=str).encode()]
        done = edges[number + 1] - 1
    return b"".join([*parts, view[done:]])


def find_all(data: bytes | bytearray, byte: bytes, stop: int, most: int = 1 << 62) -> list[int]:
    """Find every occurrence of a byte before `stop`, or the first `most`; fast if it is rare."""
    found: list[int] = []
    at = data.find(byte, 0, stop)
    while at >= 0 and len(found) < most:
        found.append(at)
        at = data.find(byte, at + 1, stop)
    return found
