"""Blank lines are skipped at the speed of decompression, and every other line keeps its number and place."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.readers import delimited_reader_for
from tokenmill.readers.base import ReadOptions

BLANKS = [b"", b"\r", b" ", b"\t", b" \t \r", b" " * 70]
FILLED = {
    "jsonl": [b'{"text": "a b"}', b'{"text":""}\r', b' {"text": "\xc3\xa9"} ', b"oops", b"[]", b"\x0b", b"\x00", b"}{"],
    "text": [b"a", b"\x00", b" two words \r", b"\xff", b"\x1c", b"\xc2\xa0", b"x" * 90],
}


class Pieces:
    """A stream that returns at most `size` bytes per read."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = data, size

    def read(self, size: int, /) -> bytes:
        data, self._data = self._data[: min(size, self._size)], self._data[min(size, self._size) :]
        return data


def read(format: str, data: bytes, size: int, *, packed: bool) -> tuple[list[tuple[int, int, str]], list[str], int]:
    """Return position, line and text of each document; the position, line and reason of each reject; all lines."""
    reader = delimited_reader_for(format, ReadOptions(packed=packed))
    documents, rejects, line = [], [], 0
    for batch in reader.read_stream(Pieces(data, size)):
        assert batch.lines is not None
        documents += zip(batch.positions.tolist(), batch.lines.tolist(), list(batch.texts), strict=True)
        rejects += [f"{reject.position} {reject.line} {reject.reason}" for reject in batch.rejects]
        line += batch.num_lines
    return documents, sorted(rejects), line


def expect(format: str, data: bytes) -> tuple[list[tuple[int, int, str]], list[str], int]:
    """The same, line by line."""
    documents, rejects, position = [], [], 0
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        text = _parse(line) if format == "jsonl" else _decode(line)
        if line.strip() if format == "text" else line.strip(b" \t\r"):
            if text is not None and not text.startswith("!"):
                documents.append((position, number, text))
            else:
                rejects.append(f"{position} {number} {(text or '!')[1:]}")
        position += len(line) + 1
    return documents, sorted(rejects), len(lines)


def _parse(line: bytes) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return "!malformed-json"
    return value["text"] if isinstance(value, dict) else "!not-an-object"


def _decode(line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        return "!invalid-utf8"


@st.composite
def mixes(draw: st.DrawFn, format: str) -> bytes:
    """Runs of blank lines, from none to more than a part that is searched at once, between other lines."""
    lines: list[bytes] = []
    for _ in range(draw(st.integers(0, 6))):
        lines += [draw(st.sampled_from(BLANKS))] * draw(st.sampled_from([0, 1, 3, 50, 40_000]))
        lines += draw(st.lists(st.sampled_from(FILLED[format]), max_size=4))
    return b"\n".join(lines) + draw(st.sampled_from([b"", b"\n"]))


@pytest.mark.parametrize("format", ["jsonl", "text"])
@settings(deadline=None, max_examples=120)
@given(data=st.data(), size=st.sampled_from([1 << 20, 70_000, 1 << 15]), packed=st.booleans())
def test_documents_and_rejects_between_blank_lines_keep_their_lines_and_places(
    format: str, data: st.DataObject, size: int, packed: bool
) -> None:
    mix = data.draw(mixes(format))
    assert read(format, mix, size, packed=packed) == expect(format, mix)


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("unit", [b"\n", b"\r\n", b"   \n", b"\n" * 1000 + b'{"text": "one"}\n'])
def test_blank_lines_are_skipped_at_the_speed_of_decompression(format: str, unit: bytes) -> None:
    data = unit * ((32 << 20) // len(unit))
    seconds = []
    for packed in (True, False):
        started = time.process_time()
        num_lines = read(format, data, 1 << 20, packed=packed)[2]
        seconds.append(time.process_time() - started)
        assert num_lines == data.count(b"\n")
    assert len(data) / max(seconds) > 80e6
    # The scanner in C is no slower than arrays; it once called a function for each line.
    assert seconds[0] < 3 * seconds[1] + 0.01
