"""The table of a `Precompiled` normalizer, as far as it concerns single characters.

It is a double array of Darts-clone, the keys of which are spelled in UTF-8, and the strings that the keys stand for.
"""

from __future__ import annotations

import base64
import binascii
import struct

import numpy as np

__all__ = ["CharacterMap"]


class CharacterMap:
    """Looks up what single characters become."""

    def __init__(self, table: str) -> None:
        try:
            data = base64.b64decode(table, validate=True)
            (size,) = struct.unpack_from("<I", data)
        except (binascii.Error, struct.error, ValueError) as error:
            raise ValueError(f"its Precompiled normalizer has a table that cannot be read ({error})") from None
        if size % 4 or size + 4 > len(data):
            raise ValueError("its Precompiled normalizer has a table that is cut off")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist()
        self._strings = data[4 + size :]

    def apply(self, text: str) -> str:
        """Return a text after each of its characters was looked up alone."""
        return "".join(map(self._one, text))

    def _one(self, character: str) -> str:
        """Return what the shortest key that the character begins with stands for, as `tokenizers` does."""
        units, at = self._units, 0
        unit = units[0]
        at ^= _offset(unit)
        for byte in character.encode():
            at ^= byte
            if at >= len(units) or units[at] & 0x800000FF != byte:
                return character
            unit = units[at]
            at ^= _offset(unit)
            if unit >> 8 & 1 and at < len(units):
                start = units[at] & 0x7FFFFFFF
                return self._strings[start : self._strings.find(b"\0", start)].decode("utf-8", "replace")
        return character


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)
