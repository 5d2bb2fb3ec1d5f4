"""JSON files: one array of records, or concatenated objects, in any layout.

Such a file cannot be read from the middle. `JsonElements` converts it to JSON lines while it is read, one element per
line, at a few hundred MB/s and without holding more than one read in memory. Everything else (limits, rejects, cutting
into tasks) is then the same as for JSON lines.
"""

from __future__ import annotations

import re

from tokenmill.compression import ByteStream, DamagedInput
from tokenmill.readers._blocks import BYTE_ORDER_MARK
from tokenmill.readers.jsonl import JsonlReader

__all__ = ["JsonElements", "JsonReader"]


class JsonReader(JsonlReader):
    """Reads the elements of a JSON array, or concatenated values.

    Positions are bytes of the JSON lines that `adapt` makes, and lines are elements.
    """

    unit = "element"
    splittable = False

    def adapt(self, stream: ByteStream) -> ByteStream:
        """Convert the elements to JSON lines."""
        return JsonElements(stream)


# Line ends become tabs. Between values both are white space, and inside a string both are errors.
_ONE_LINE = bytes.maketrans(b"\r\n", b"\t\t")
_BLANK = re.compile(rb"[ \t]*")
_SCALAR = re.compile(rb'[^ \t,\[\]{}"]*')
_MARK = re.compile(rb'["\[\]{}]')
_QUOTE, _BACKSLASH, _OPENING = ord('"'), ord("\\"), frozenset(b"[{")


class JsonElements:
    """Converts the elements of JSON arrays or concatenated values to a stream of JSON lines.

    It checks only the structure between elements; the decoder of lines checks each element. Broken structure raises
    `DamagedInput`, because the elements after it cannot be separated.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._damage: str | None = None
        self._started = False
        self._num_elements = 0
        self._in_array = False
        self._expected = "value"
        self._inside = ""
        self._depth = 0
        self._rest = b""
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes of JSON lines."""
        if not self._ready:
            self._ready = self._read_lines(size)
        data, self._ready = self._ready[:size], self._ready[size:]
        return data

    def _read_lines(self, size: int) -> bytes:
        while self._damage is None:
            data = self._read_stream(size)
            if not data:
                cut_off = self._in_array or self._inside in ("string", "brackets")
                if not cut_off:
                    return b""
                self._damage = f"the JSON ends inside or after element {self._num_elements + 1}; the file is cut off"
            elif output := self._convert(self._rest + data):
                return output
        raise DamagedInput(self._damage)

    def _read_stream(self, size: int) -> bytes:
        data = self._stream.read(size)
        if not self._started:
            while len(data) <= len(BYTE_ORDER_MARK) and (more := self._stream.read(size)):
                data += more
            data = data.removeprefix(BYTE_ORDER_MARK)
            self._started = True
        return data

    def _convert(self, data: bytes) -> bytes:
        """Follow the structure through one read: copy elements and drop the bytes between them."""
        data = data.translate(_ONE_LINE)
        pieces: list[bytes] = []
        self._rest = b""
        mark = at = 0
        while at < len(data) and self._damage is None:
            if not self._inside:
                mark = _end(_BLANK, data, at)
                at = self._step(data, mark) if mark < len(data) else mark
            if not self._inside:
                continue
            at = self._follow_element(data, at)
            if self._inside:
                pieces.append(data[mark : len(data) - len(self._rest)])
                break
            pieces += data[mark:at], b"\n"
            self._num_elements += 1
            self._expected = "separator" if self._in_array else "value"
        return b"".join(pieces)

    def _step(self, data: bytes, at: int) -> int:
        """Handle one byte between elements: punctuation, or the first byte of an element."""
        char = data[at : at + 1]
        if self._expected == "separator" and char == b",":
            self._expected = "element"
        elif self._expected in ("separator", "first") and char == b"]":
            self._in_array, self._expected = False, "value"
        elif self._expected == "separator":
            self._report_damage(char)
        elif char == b"[" and not self._in_array:
            self._in_array, self._expected = True, "first"
        elif char in (b"{", b"["):
            self._inside, self._depth = "brackets", 1
        elif char == b'"':
            self._inside, self._depth = "string", 0
        elif char in b"-0123456789tfn":
            self._inside = "scalar"
        else:
            self._report_damage(char)
        return at + 1

    def _follow_element(self, data: bytes, at: int) -> int:
        """Return the end of the element, or of the data; skip strings from quote to quote."""
        if self._inside == "scalar":
            at = _end(_SCALAR, data, at)
            self._inside = "" if at < len(data) else "scalar"
            return at
        depth, in_string = self._depth, self._inside == "string"
        while depth or in_string:
            if in_string:
                end = _string_end(data, at)
                if end < 0:
                    self._inside, self._depth = "string", depth
                    self._rest = b"\\" if _num_backslashes(data, at, len(data)) % 2 else b""
                    return len(data)
                at, in_string = end, False
                continue
            match = _MARK.search(data, at)
            if match is None:
                self._inside, self._depth = "brackets", depth
                return len(data)
            at = match.end()
            if data[at - 1] == _QUOTE:
                in_string = True
            else:
                depth += 1 if data[at - 1] in _OPENING else -1
        self._inside = ""
        return at

    def _report_damage(self, found: bytes) -> None:
        expected = {
            "value": "an object or an array",
            "first": "a value or ']'",
            "element": "a value",
            "separator": "',' or ']'",
        }[self._expected]
        after = f"after element {self._num_elements}" if self._num_elements else "at the start"
        self._damage = f"not JSON {after}: expected {expected}, found {found.decode('latin-1')!r}"


def _end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    match = pattern.match(data, at)
    assert match is not None
    return match.end()


def _string_end(data: bytes, at: int) -> int:
    """Return the end of the string that contains `at`, -1 if it is not in the data."""
    quote = data.find(b'"', at)
    while quote >= 0 and _num_backslashes(data, at, quote) % 2:
        quote = data.find(b'"', quote + 1)
    return quote + 1 if quote >= 0 else -1


def _num_backslashes(data: bytes, start: int, stop: int) -> int:
    """Count the backslashes at the end of `data[start:stop]`."""
    at = stop
    while at > start and data[at - 1] == _BACKSLASH:
        at -= 1
    return stop - at
