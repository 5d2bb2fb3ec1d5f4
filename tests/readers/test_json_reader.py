"""JSON arrays and values in a row, turned into JSON lines."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import Pieces, delimited, gather, json_values, read_bytes
from tokenmill.readers.json import JsonElements


def elements(data: bytes, sizes: Sequence[int] = ()) -> list[Any]:
    stream = JsonElements(Pieces(data, sizes))
    size = max(sizes, default=1 << 20)
    pieces = list(iter(lambda: stream.read(size), b""))
    assert all(len(piece) <= size for piece in pieces)
    output = b"".join(pieces)
    return [json.loads(one) for one in output.split(b"\n") if one]


@settings(deadline=None)
@given(
    st.lists(json_values, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 12), max_size=4),
)
def test_any_values_come_out_of_an_array_or_a_row(
    values: list[Any], indent: int | None, ascii_only: bool, is_array: bool, sizes: list[int]
) -> None:
    if is_array:
        data = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    else:
        values = [value for value in values if isinstance(value, dict)]
        data = "\n".join(json.dumps(value, indent=indent, ensure_ascii=ascii_only) for value in values)
    data = data.replace("\n", "\r\n")
    assert elements(data.encode("utf-8", "surrogatepass"), sizes) == values


def test_lines_of_a_json_file_are_its_elements() -> None:
    data = b'[\n  {"text": "a"},\n  7,\n  {"text": "b\\n",\n "x": [1, {"y": "]"}]},\n  {"text": 1}\n]\n'
    read = read_bytes(data, "json", [5])
    assert read.texts == ["a", "b\n"]
    assert [(at_line, reason) for _, at_line, reason in read.rejects] == [(1, "not-an-object"), (3, "not-a-string")]


def test_a_bad_element_costs_only_itself() -> None:
    read = read_bytes(b'[{"text": "a"}, {"text": "b",}, {"text": tru}, {"text": "c\nd"}, {"text": "e"}]', "json")
    assert read.texts == ["a", "e"]
    assert [reason for *_, reason in read.rejects] == ["malformed-json"] * 3


@pytest.mark.parametrize("sizes", [[], [1], [3]])
@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'[{"text": "a"}, {"text": "b"}', 2),
        (b'[{"text": "a"}, {"text": "b', 1),
        (b'[{"text": "a"}, {"text": "b\\', 1),
        (b'[{"text": "a"} {"text": "b"}]', 1),
        (b'[{"text": "a"}, ]', 1),
        (b'[{"text": "a"}}, {"text": "b"}]', 1),
        (b'[{"text": "a"}] rubbish', 1),
        (b'{"text": "a"}, {"text": "b"}', 1),
        (b'{"text": "a"}{"text"', 1),
        (b"<html></html>", 0),
        (b"[", 0),
        (b"]", 0),
    ],
)
def test_broken_structure_is_damage_after_what_came_before(data: bytes, found: int, sizes: list[int]) -> None:
    read = read_bytes(data, "json", sizes)
    assert read.texts == ["a", "b"][:found]
    assert [reason for *_, reason in read.rejects] == ["damaged"]


def test_arrays_one_after_another_and_empty_files_are_read() -> None:
    assert elements(b'[{"a": 1}]\n[]\n[{"b": 2}, 3]{"c": []}') == [{"a": 1}, {"b": 2}, 3, {"c": []}]
    assert elements(b"") == elements(b" \n") == elements(b"[ \n]") == []
    assert elements(b'[[1, [2]], "a,]\\"", -1.5e3, true]', [1]) == [[1, [2]], 'a,]"', -1500.0, True]


def test_an_element_without_end_is_skipped_in_bounded_memory() -> None:
    class Endless:
        num_left = 60

        def read(self, size: int, /) -> bytes:
            self.num_left -= 1
            return b'[{"text": "' if self.num_left == 59 else b'\\"' + b"x" * (size - 2) if self.num_left > 0 else b""

    reader = delimited("json", max_document_bytes=1_000_000)
    tracemalloc.start()
    read = gather(reader.read_stream(reader.adapt(Endless())))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000
    assert [reason for *_, reason in read.rejects] == ["damaged"]
