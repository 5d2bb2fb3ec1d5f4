"""The scanner in C never accepts a line that msgspec refuses, and reads the same text and fields from the others.

Of plain text it finds the lines that Python finds.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import json_values
from tokenmill.readers import _blocks
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.text_batch import PackedTexts

scanner = _blocks.line_scanner
pytestmark = pytest.mark.skipif(scanner is None, reason="the scanner was not compiled")

FIELDS = ((b"text",), (b"meta", b"url"), (b"meta",), (b"id",))
STEP = 16


def scan(
    data: bytes,
    fields: tuple[tuple[bytes, ...], ...] = FIELDS,
    most_bytes: int = 1 << 40,
    most_line_bytes: int = 1 << 40,
) -> tuple[list[Any], list[Any]]:
    """Return for each text the number of its line, the text and its other fields; and the numbers of odd lines."""
    found_here = scanner.scan_json(data, len(data), fields, most_bytes, most_line_bytes)
    texts, longest, leads, num_lines, documents, odd = found_here
    rows = np.frombuffer(documents, np.int64).reshape(-1, 2 * len(fields)).tolist()
    pieces = PackedTexts(texts, len(rows), longest).pieces
    assert max(map(len, pieces), default=0) == longest
    assert {byte - 0xC0 for byte in texts if 0xC0 <= byte < 0xFF} <= {bit for bit in range(64) if leads >> bit & 1}
    lines = data.split(b"\n")[: None if data[-1:] != b"\n" else -1] if data else []
    assert num_lines == len(lines)
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)]).tolist()
    found = []
    for row, piece in zip(rows, pieces, strict=True):
        assert row[0] == starts[row[1]]
        values = [msgspec.json.decode(data[a:b]) if a >= 0 else None for a, b in zip(row[2::2], row[3::2], strict=True)]
        found.append((row[1], piece.decode(), *values))
    left = []
    for start, stop, number in np.frombuffer(odd, np.int64).reshape(-1, 3).tolist():
        assert data[start:stop] == lines[number]
        left.append(number)
    blank = [number for number, line in enumerate(lines) if not line.strip(b" \t\r")]
    assert sorted([*(one[0] for one in found), *left, *blank]) == list(range(len(lines)))
    return found, left


def expected(line: bytes) -> tuple[Any, ...]:
    """Read one line with msgspec, as the reader does where the scanner was not compiled."""
    line.decode()
    record = msgspec.json.decode(line)
    meta = record.get("meta")
    url = meta.get("url") if isinstance(meta, dict) else None
    assert isinstance(record["text"], str)
    return record["text"], url, meta, record.get("id")


def dump(record: dict[str, Any], **options: Any) -> bytes:
    return json.dumps(record, **options).encode()


RECORDS = st.fixed_dictionaries(
    {"text": st.text(st.characters(exclude_categories=["Cs"]))},
    optional={"meta": json_values, "id": json_values, "other": json_values},
)


@settings(max_examples=300, deadline=None)
@given(st.lists(RECORDS, max_size=8), st.booleans(), st.booleans())
def test_every_sound_line_is_read_as_msgspec_reads_it(records: list[Any], ascii_only: bool, spaced: bool) -> None:
    separators = (" , ", "\t:  ") if spaced else (",", ":")
    lines = [dump(record, ensure_ascii=ascii_only, separators=separators) for record in records]
    found, odd = scan(b"\n".join(lines))
    assert found == [(number, *expected(line)) for number, line in enumerate(lines) if number not in odd]
    # Only numbers that languages read differently are left.
    assert all(any(map(_is_extreme, _numbers(lines[number]))) for number in odd)


def _is_extreme(digits: str) -> bool:
    return len(digits) > 15 or re.search(r"e[-+]?\d{3}", digits) is not None


def _numbers(line: bytes) -> list[str]:
    found: list[str] = []
    json.loads(line, parse_int=lambda digits: found.append(digits), parse_float=lambda digits: found.append(digits))
    return found


@settings(max_examples=1000, deadline=None)
@given(RECORDS, st.booleans(), st.data())
def test_a_line_with_changed_bytes_is_left_or_read_as_msgspec_reads_it(
    record: Any, ascii_only: bool, data: Any
) -> None:
    line = bytearray(dump(record, ensure_ascii=ascii_only))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(line)))
        new = data.draw(st.sampled_from([*b'{}[]:,"\\u0d8ce+-.tfn \t\r\x00\x1f\x7f\x80\xc0\xe2\xed\xf4\xff', *b"text"]))
        line[at : at + data.draw(st.integers(0, 1))] = bytes([new])
    assume_line = bytes(line).replace(b"\n", b" ")
    found, _ = scan(assume_line)
    for one in found:
        assert one == (0, *expected(assume_line))


@pytest.mark.parametrize("special", ["\n", '"', "\\", "\t\t", "\u00e9", "\u20ac", "\U0001f600", "\x7f", "\x00", "/"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_special_character_may_be_anywhere_in_a_step(special: str, ascii_only: bool) -> None:
    texts = ["a" * before + special + "b" * after for before in range(2 * STEP + 2) for after in (0, 1, STEP)]
    lines = [dump({"text": text}, ensure_ascii=ascii_only) for text in texts]
    for data in (b"\n".join(lines), b"\n".join(lines) + b"\n"):
        assert [one[1] for one in scan(data)[0]] == texts
    # Without anything after it: no step may read beyond the end.
    for line, text in zip(lines, texts, strict=True):
        assert scan(bytes(bytearray(line)))[0] == [(0, text, None, None, None)]


def test_every_character_is_read_and_everything_else_is_left() -> None:
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    text = "".join(characters)
    assert scan(dump({"text": text}, ensure_ascii=False))[0][0][1] == text
    assert scan(dump({"text": text}))[0][0][1] == text
    for first in range(0x80, 0x100):
        for second in (*range(0x7F, 0x92), *range(0x9E, 0xC2), 0xFF, 0x20):
            for rest in (b"", b"\x80", b"\x80\x80", b"\xbf\x7f", b"\x80\xc0", b"\xbf\xbf\xbf"):
                line = b'{"text": "%b"}' % bytes([first, second, *rest])
                try:
                    is_sound = bool(line.decode())
                except UnicodeDecodeError:
                    is_sound = False
                assert bool(scan(line)[0]) == is_sound, line


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "\\ud83d"}',
        b'{"text": "\\ud83d\\u0041"}',
        b'{"text": "\\ude00"}',
        b'{"text": "\\u12g4"}',
        b'{"text": "\\x41"}',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": "a", "meta": {"url": 1, "url": 2}}',
        b'{"text": "a", "x": 01}',
        b'{"text": "a", "x": 1.}',
        b'{"text": "a", "x": 1e400}',
        b'{"text": "a", "x": 123456789012345678901}',
        b'{"text": "a", "x": nul}',
        b'{"text": "a", "x": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"text": "a",}',
        b'{"text": "a" "b": 1}',
        b'["text"]',
        b'"text"',
        b"{}",
        b'{"text": null}',
        b'{"text": "a"',
        b'{"text": "a',
        b'{"text": "a\\',
        b'{"text": "a\\u00',
        b"{",
        b'\xef\xbb\xbf{"text": "a"}',
    ],
)
def test_other_lines_are_left_to_msgspec(line: bytes) -> None:
    good = dump({"text": "good"})
    found, odd = scan(b"\n".join([good, line, good]))
    assert (odd, [one[:2] for one in found]) == ([1], [(0, "good"), (2, "good")])
    assert scan(line)[1] == [0]


def test_a_text_above_the_limit_is_left() -> None:
    data = dump({"text": "\u20ac" * 4}, ensure_ascii=False)
    assert len(scan(data, most_bytes=12)[0]) == 1
    assert scan(data, most_bytes=11) == ([], [0])
    assert len(scan(b"\n" + data + b" \r\n", most_line_bytes=len(data) + 2)[0]) == 1
    assert scan(b"\n" + data + b" \r\n", most_line_bytes=len(data) + 1) == ([], [1])


@pytest.mark.parametrize("size", [67_536, 67_537])
def test_a_line_is_too_long_with_the_scanner_and_without(size: int) -> None:
    start, end = b'{"text": "a", "other": "', b'"}'
    data = start + b"x" * (size - len(start) - len(end)) + end + b"\n" + dump({"text": "b"})
    for packed in (True, False):
        batch = JsonlReader(ReadOptions(max_document_bytes=1000, packed=packed)).decode(data, len(data), 0, 0)
        assert list(batch.texts) == (["a", "b"] if size == 67_536 else ["b"]), packed
        assert [reject.reason for reject in batch.rejects] == ([] if size == 67_536 else ["too-long"]), packed


def test_fields_may_contain_each_other() -> None:
    data = dump({"a": {"b": "text", "c": [1, {"b": 2}]}, "b": "no"})
    fields = ((b"a", b"b"), (b"a",), (b"a", b"b"), (b"a", b"b", b"c"), (b"a", b"c"))
    found, odd = scan(data, fields)
    assert (found, odd) == ([(0, "text", {"b": "text", "c": [1, {"b": 2}]}, "text", None, [1, {"b": 2}])], [])


def test_wrong_arguments_are_errors() -> None:
    for arguments in (
        (b"", 1, FIELDS, 1, 1),
        (b"", -1, FIELDS, 1, 1),
        (b"", 0, (), 1, 1),
        (b"", 0, ((),), 1, 1),
        (b"", 0, ((b"a",),) * 33, 1, 1),
        (b"", 0, ((b"a",) * 65,), 1, 1),
    ):
        with pytest.raises(ValueError, match="expected|more bytes"):
            scanner.scan_json(*arguments)
    for arguments in ((b"", 0, (("text",),), 1, 1), ("", 0, FIELDS, 1, 1), (b"", 0, [b"text"], 1, 1)):
        with pytest.raises((TypeError, ValueError)):
            scanner.scan_json(*arguments)
    assert scanner.scan_json(b"", 0, FIELDS, 1, 1) == (b"", 0, 0, 0, b"", b"")


def plain(data: bytes, most_bytes: int = 1 << 40) -> tuple[list[tuple[int, str]], int] | None:
    """Return the start and the text of each line, and the number of all lines."""
    found = scanner.scan_text(data, len(data), most_bytes)
    if found is None:
        return None
    texts, longest, leads, num_lines, documents = found
    rows = np.frombuffer(documents, np.int64).reshape(-1, 2).tolist()
    pieces = PackedTexts(texts, len(rows), longest, leads).pieces
    assert max(map(len, pieces), default=0) == longest
    assert {byte - 0xC0 for byte in texts if 0xC0 <= byte < 0xFF} == {bit for bit in range(64) if leads >> bit & 1} - {
        63
    }
    lines = data.split(b"\n")
    assert [data.count(b"\n", 0, start) for start, _ in rows] == [number for _, number in rows]
    assert num_lines == len(lines) - (lines[-1] == b"")
    return [(start, piece.decode()) for (start, _), piece in zip(rows, pieces, strict=True)], num_lines


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=40), st.sampled_from(["", " ", "\t\v\f\r", "\r", "a\r", "\r\r"])), max_size=12)
)
def test_lines_of_text_are_those_that_python_finds(lines: list[str]) -> None:
    data = "\n".join(lines).encode("utf-8", "ignore")
    expected, start = [], 0
    for line in data.split(b"\n"):
        if line.strip():
            expected.append((start, line.removesuffix(b"\r").decode()))
        start += len(line) + 1
    found = plain(data)
    assert found is not None
    assert found[0] == expected


@pytest.mark.parametrize("special", ["\u00e9", "\u20ac", "\U0001f600", "\x7f", '"', "\\"])
def test_a_character_of_text_may_be_anywhere_in_a_step(special: str) -> None:
    texts = ["a" * before + special + "b" * after for before in range(2 * STEP + 2) for after in (0, 1, STEP)]
    found = plain("\n".join(texts).encode())
    assert found is not None
    assert [text for _, text in found[0]] == texts
    for text in texts:
        assert plain(text.encode()) == ([(0, text)], 1)
        # What is after the end of the line is not copied, and is not looked at.
        assert plain(text.encode() + b"\n\xe9\n") is None


def test_text_that_is_too_long_or_not_utf8_is_left_to_python() -> None:
    assert plain(b"abc\nabcd", most_bytes=3) is None
    assert plain(b"abc\r\nabc", most_bytes=3) is not None
    for bad in (b"\xff", b"\xc3", b"\xc3\n\xa9", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a" * 30 + b"\xe2\x82"):
        assert plain(b"good\n" + bad + b"\ngood") is None
    assert plain(b"") == ([], 0)
