"""Every document once, with its place; every bad one refused with a reason; nothing lost in silence."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.batch import Reject, TextBatch
from tokenmill.errors import DataError, UsageError
from tokenmill.files import DamagedInput, detect_compression, open_stream
from tokenmill.readers import READERS, ReadOptions, blocks, detect_format, reader_for
from tokenmill.readers.json import JsonElements
from tokenmill.readers.parquet import ParquetReader

NASTY = Path(__file__).parents[2] / "shared" / "data" / "nasty"


class Pieces:
    """A stream that hands over its bytes in pieces of given sizes, over and over."""

    def __init__(self, data: bytes, sizes: Iterable[int] = (), damage: str | None = None) -> None:
        self._file = io.BytesIO(data)
        self._sizes = list(sizes) or [1 << 30]
        self._damage = damage
        self._turn = 0

    def read(self, size: int, /) -> bytes:
        self._turn += 1
        data = self._file.read(min(size, self._sizes[self._turn % len(self._sizes)]))
        if not data and self._damage is not None:
            raise DamagedInput(self._damage)
        return data


class Read(NamedTuple):
    texts: list[str]
    positions: list[int]
    rejects: list[tuple[int, int, str]]
    kept: list[tuple[Any, ...]]
    num_lines: int
    num_bytes: int


def gather(batches: Iterable[TextBatch]) -> Read:
    """All batches as one, with reject lines counted from the first batch's span."""
    read = Read([], [], [], [], 0, 0)
    num_lines = num_bytes = 0
    for batch in batches:
        assert len(batch.texts) == len(batch.positions)
        assert batch.kept is None or len(batch.kept) == len(batch.texts)
        assert batch.positions.dtype == np.int64
        read.texts.extend(batch.texts)
        read.positions.extend(batch.positions.tolist())
        read.rejects.extend((reject.position, reject.line, reject.reason) for reject in batch.rejects)
        read.kept.extend(batch.kept or [])
        assert all(len(reject.detail) < 200 for reject in batch.rejects)
        num_lines += batch.num_lines
        num_bytes += batch.num_bytes
    return read._replace(num_lines=num_lines, num_bytes=num_bytes)


def read_bytes(data: bytes, format: str = "jsonl", sizes: Iterable[int] = (), **options: Any) -> Read:
    reader = reader_for(format, ReadOptions(**options))
    assert not isinstance(reader, ParquetReader)
    return gather(reader.read_stream(reader.adapt(Pieces(data, sizes))))


def read_in_ranges(path: Path, data: bytes, cuts: Iterable[int], format: str, **options: Any) -> Read:
    path.write_bytes(data)
    reader = reader_for(format, ReadOptions(**options))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = []
    num_lines = 0
    for start, stop in itertools.pairwise(edges):
        part = gather(reader.read_range(path, start, stop))
        assert all(start <= position < stop for position in part.positions)
        rejects = [(at, line if line < 0 else line + num_lines, reason) for at, line, reason in part.rejects]
        num_lines += part.num_lines
        parts.append(part._replace(rejects=rejects))
    joined = [[item for part in parts for item in part[field]] for field in range(4)]
    return Read(*joined, num_lines, sum(part.num_bytes for part in parts))  # type: ignore[arg-type]


def rejects_of(data: bytes, format: str = "jsonl", **options: Any) -> list[Reject]:
    reader = reader_for(format, ReadOptions(**options))
    assert not isinstance(reader, ParquetReader)
    return [reject for batch in reader.read_stream(reader.adapt(Pieces(data))) for reject in batch.rejects]


@pytest.fixture(params=[1 << 19, 64, 7], ids=["large-blocks", "small-blocks", "tiny-blocks"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)
    return int(request.param)


def line(text: str, **fields: Any) -> bytes:
    return json.dumps({"text": text, **fields}, ensure_ascii=False).encode()


# --- JSON lines


def test_documents_come_with_the_position_of_their_line(block_bytes: int) -> None:
    data = line("a") + b"\n" + line("", id=1) + b"\n\n  \n" + line("\u00e9\U0001f600") + b"\r\n" + line("end")
    read = read_bytes(data)
    assert read.texts == ["a", "", "\u00e9\U0001f600", "end"]
    assert read.positions == [0, 14, data.index(b'{"text": "\xc3'), data.index(b'{"text": "end')]
    assert (read.rejects, read.num_lines, read.num_bytes) == ([], 6, len(data))


def test_a_byte_order_mark_is_no_part_of_the_first_document(block_bytes: int) -> None:
    mark = b"\xef\xbb\xbf"
    assert read_bytes(mark + line("a") + b"\n" + line("b")).texts == ["a", "b"]
    assert read_bytes(mark + b"a\nb", "text").texts == ["a", "b"]
    assert read_bytes(mark + b"a\nb", "text", whole_files=True).texts == ["a\nb"]
    assert read_bytes(mark + b"a--b", "text", separator="--").positions == [0, 6]
    assert read_bytes(mark + b'[{"text": "a"}]', "json", [1, 2]).texts == ["a"]
    assert read_bytes(mark).texts == read_bytes(mark, "text").texts == read_bytes(mark, "json").texts == []


BAD_LINES = {
    b"not json": "malformed-json",
    b'{"text": "cut of': "malformed-json",
    b'{"text": "comma",}': "malformed-json",
    b"{'text': 'quotes'}": "malformed-json",
    b'{"text": "nul \x00"}': "malformed-json",
    b'{"text": "tab \t"}': "malformed-json",
    b'{"text": "x", "score": NaN}': "malformed-json",
    b'{"text": "a"} {"text": "b"}': "malformed-json",
    b'{"text": "a"}{"text": "b"}': "malformed-json",
    b'{"x": ' + b"[" * 20_000: "malformed-json",
    b'{"text": null}': "null-text",
    b'{"text": 1}': "not-a-string",
    b'{"text": ["a"]}': "not-a-string",
    b"{}": "missing-field",
    b'{"body": "x"}': "missing-field",
    b"[1, 2]": "not-an-object",
    b'"text"': "not-an-object",
    b"null": "not-an-object",
    b'{"text": "\xff"}': "invalid-utf8",
    b'{"text": "\xed\xa0\x80"}': "invalid-utf8",
    b'{"text": "\xe2\x82"}': "invalid-utf8",
    b'{"text": "\\ud83d"}': "lone-surrogate",
    b'{"text": "\\ude00 low"}': "lone-surrogate",
    b'{"text": "' + b"x" * 10_001 + b'"}': "too-long",
}


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_costs_only_itself(block_bytes: int, bad: bytes, reason: str) -> None:
    lines = [line("one"), bad, b"", line("two"), bad, line("three")]
    data = b"\n".join(lines)
    read = read_bytes(data, max_document_bytes=10_000)
    assert read.texts == ["one", "two", "three"]
    first, second = (sum(len(one) + 1 for one in lines[:number]) for number in (1, 4))
    assert read.rejects == [(first, 1, reason), (second, 4, reason)]
    assert read.num_lines == 6


@pytest.mark.parametrize(
    "good",
    [
        b'{"text": "kept", "other": "\\ud83d"}',
        b'{"text": "kept", "other": "\xff"}',
        b'{"text": 1, "text": "kept"}',
        b'{"text": "first", "text": "kept"}',
        b' \t{"te\\u0078t":"kept"} \r',
        b'{"text": "kept", "n": 1e999, "m": 123456789012345678901234567890}',
    ],
)
def test_a_line_with_a_sound_text_is_kept_whatever_else_it_holds(good: bytes) -> None:
    read = read_bytes(line("a") + b"\n" + good + b"\n" + line("b"))
    assert read.texts == ["a", "kept", "b"]
    assert read.rejects == []


def test_an_object_over_two_lines_is_two_bad_lines_even_where_counts_agree() -> None:
    data = b'{"text": "a"\n}\n' + line("b") + line("c") + b"\n"
    assert [reject.reason for reject in rejects_of(data)] == ["malformed-json"] * 3


def test_a_missing_field_names_the_fields_there_are_and_the_likely_one() -> None:
    (reject,) = rejects_of(b'{"content": "long text", "url": "u"}')
    assert reject.detail == "no field 'text'; the record has 'content', 'url'. Pass --text-key content"
    (reject,) = rejects_of(b'{"id": 1, "n": null}')
    assert reject.detail == "no field 'text'; the record has 'id', 'n'"
    (reject,) = rejects_of(b'{"id": "1", "doc": {"body": "long text"}}')
    assert reject.detail == "no field 'text'; the record has 'id', 'doc'. Pass --text-key doc.body"
    (reject,) = rejects_of(json.dumps({f"field number {n}": n for n in range(100)}).encode())
    assert "and 94 more" in reject.detail


def test_a_dotted_key_leads_into_nested_objects() -> None:
    data = b'{"doc": {"body": {"text": "a"}}}\n{"doc": {"body": null}}\n{"doc": "x"}\n{"doc": {"body": {"text": 1}}}'
    read = read_bytes(data, text_key="doc.body.text")
    assert read.texts == ["a"]
    assert [reason for *_, reason in read.rejects] == ["missing-field", "missing-field", "not-a-string"]
    with pytest.raises(UsageError, match=r"a\.\.b"):
        reader_for("jsonl", ReadOptions(text_key="a..b"))


def test_kept_values_are_text_none_or_compact_json() -> None:
    record = {"text": "t", "s": "x", "n": 1, "f": 1.5, "l": [1, "\u00e9"], "d": {"a": None, "b": {"c": "deep"}}}
    big = b'{"text": "u", "n": 123456789012345678901234567890, "l": [123456789012345678901234567890]}'
    data = json.dumps(record).encode() + b"\n" + big
    keys = ("s", "n", "f", "l", "d", "d.b.c", "missing", "text")
    read = read_bytes(data, keep_keys=keys)
    assert read.kept == [
        ("x", "1", "1.5", '[1,"\u00e9"]', '{"a":null,"b":{"c":"deep"}}', "deep", None, "t"),
        (None, "123456789012345678901234567890", None, "[123456789012345678901234567890]", None, None, None, "u"),
    ]


def test_kept_fields_may_surround_the_text() -> None:
    data = b'{"doc": {"text": "a", "id": 7}}\n{"doc": {"text": null}}\n{"doc": {"text": "b"}}'
    read = read_bytes(data, text_key="doc.text", keep_keys=("doc.id", "doc"))
    assert read.texts == ["a", "b"]
    assert read.kept == [("7", '{"text":"a","id":7}'), (None, '{"text":"b"}')]
    assert [reason for *_, reason in read.rejects] == ["null-text"]


def test_a_lone_surrogate_in_a_kept_field_refuses_the_document() -> None:
    assert [r.reason for r in rejects_of(b'{"text": "a", "id": "\\ud800"}', keep_keys=("id",))] == ["lone-surrogate"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "a", "b"]) | st.text(), inner),
    max_leaves=8,
)
records = st.dictionaries(st.sampled_from(["text", "id", "x"]), json_values, max_size=3) | json_values


def expected_reason(value: Any) -> str | None:
    """What should become of a record, from its plain Python value."""
    if not isinstance(value, dict):
        return "not-an-object"
    if "text" not in value:
        return "missing-field"
    if value["text"] is None:
        return "null-text"
    return None if isinstance(value["text"], str) else "not-a-string"


@settings(deadline=None)
@given(st.lists(records, max_size=12), st.booleans(), st.lists(st.integers(1, 60), max_size=4))
def test_any_json_value_is_a_document_or_a_reject(values: list[Any], ascii_only: bool, sizes: list[int]) -> None:
    lines = [json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") for value in values]
    read = read_bytes(b"\n".join(lines), sizes=sizes)
    assert read.texts == [value["text"] for value in values if expected_reason(value) is None]
    assert [reason for *_, reason in read.rejects] == [r for value in values if (r := expected_reason(value))]


any_lines = st.lists(
    st.sampled_from([line("a"), line("\u00e9" * 5), line("b" * 30), b"", b" ", b"{}", b"bad", b'{"text": 1}\r', b"\r"])
    | st.text(max_size=5).map(line),
    max_size=20,
)
cuts = st.lists(st.integers(0, 300), max_size=5)


@settings(deadline=None)
@given(any_lines, cuts, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
def test_ranges_cut_anywhere_give_every_document_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], end: bytes, mark: bool, last: bool
) -> None:
    data = (b"\xef\xbb\xbf" if mark else b"") + end.join(lines) + (end if last else b"")
    path = tmp_path_factory.mktemp("ranges") / "x.jsonl"
    for format in ("jsonl", "text"):
        assert read_in_ranges(path, data, cuts, format) == read_bytes(data, format)


def test_ranges_of_the_plan_are_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line("a") * 10)
    reader = reader_for("jsonl", ReadOptions())
    assert reader.plan(path, 50) == [(0, 50), (50, 100), (100, 130)]
    assert reader_for("text", ReadOptions(whole_files=True)).plan(path, 50) == [(0, 130)]
    assert reader_for("json", ReadOptions()).plan(path, 50) == [(0, 130)]


def test_a_missing_file_is_a_data_error_that_names_it(tmp_path: Path) -> None:
    for format in ("jsonl", "text", "json", "parquet"):
        with pytest.raises(DataError, match=r"gone\.x"):
            list(reader_for(format, ReadOptions()).read_range(tmp_path / "gone.x", 0, 10))


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_document_above_the_limit_is_passed_over_in_bounded_memory(format: str, end: bytes) -> None:
    class Endless:
        def __init__(self) -> None:
            self.pieces = [line("a") + b"\n", b'{"text": "', *[b"x" * (1 << 19)] * 60, b'"}' + end]

        def read(self, size: int, /) -> bytes:
            return self.pieces.pop(0) if self.pieces else b""

    stream = Endless()
    reader = reader_for(format, ReadOptions(max_document_bytes=1_000_000))
    assert not isinstance(reader, ParquetReader)
    tracemalloc.start()
    read = gather(reader.read_stream(stream))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert read.rejects == [(14, 1, "too-long")]
    assert len(read.texts) == 1
    assert read.num_bytes == 14 + 10 + 60 * (1 << 19) + 2 + len(end)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.lists(st.integers(1, 30), max_size=3), st.booleans())
def test_what_is_too_long_does_not_depend_on_how_bytes_arrive(
    lengths: list[int], sizes: list[int], separated: bool
) -> None:
    pieces = [b"x" * length for length in lengths]
    options = {"separator": "ab", "max_document_bytes": 20} if separated else {"max_document_bytes": 20}
    read = read_bytes((b"ab" if separated else b"\n").join(pieces), "text", sizes, **options)
    if separated and pieces and not pieces[-1]:
        pieces.pop()
    assert read.texts == [piece.decode() for piece in pieces if len(piece) <= 20 and (piece or separated)]
    assert len(read.rejects) == sum(length > 20 for length in lengths)


def test_escapes_do_not_count_against_the_limit() -> None:
    data = b'{"text": "' + b"\\u00e9" * 50 + b'"}\n{"text": "' + b"\\u00e9" * 51 + b'"}'
    read = read_bytes(data, max_document_bytes=100)
    assert read.texts == ["\u00e9" * 50]
    assert [reason for *_, reason in read.rejects] == ["too-long"]


def test_a_long_line_takes_linear_time() -> None:
    data = b'{"text": "' + b"x" * 30_000_000 + b'"}\n'
    read = read_bytes(data, sizes=[100_000])
    assert [len(text) for text in read.texts] == [30_000_000]


@pytest.mark.parametrize("format", ["jsonl", "text", "json"])
def test_damage_drops_the_document_it_cuts_and_is_a_reject(format: str) -> None:
    reader = reader_for(format, ReadOptions())
    assert not isinstance(reader, ParquetReader)
    data = line("a") + b"\n" + line("b") + b"\n" + line("c")[:-2]
    read = gather(reader.read_stream(reader.adapt(Pieces(data, [9], damage="cut off"))))
    assert len(read.texts) == 2
    assert read.rejects == [(28, 2, "damaged")]


# --- plain text


def test_each_line_is_a_document_and_blank_lines_are_not(block_bytes: int) -> None:
    read = read_bytes(b"one\n\n  \ntwo\r\n\r\n\x00three\n a \nlast", "text")
    assert read.texts == ["one", "two", "\x00three", " a ", "last"]
    assert read.positions == [0, 8, 15, 22, 26]
    assert read.num_lines == 8


def test_a_line_that_is_not_utf8_costs_only_itself() -> None:
    read = read_bytes(b"one\n\xff\xfe\ntwo\n", "text")
    assert read.texts == ["one", "two"]
    assert read.rejects == [(4, 1, "invalid-utf8")]


def test_pieces_between_separators_are_documents_even_when_empty() -> None:
    read = read_bytes(b"a\nb<end><end>\r\nc<end>", "text", separator="<end>")
    assert read.texts == ["a\nb", "", "\r\nc"]
    assert read.positions == [0, 8, 13]


def split(text: str, separator: str) -> list[str]:
    pieces = text.split(separator)
    return pieces if pieces[-1] else pieces[:-1]


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab\n\u00e9"), max_size=60),
    st.sampled_from(["\n\n", "aba", "aa", "ab", "abb", "\u00e9", "a"]),
    st.lists(st.integers(1, 9), max_size=4),
    cuts,
)
def test_separators_cut_as_str_split_does(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, sizes: list[int], cuts: list[int]
) -> None:
    data = text.encode()
    read = read_bytes(data, "text", sizes, separator=separator)
    assert read.texts == split(text, separator)
    assert [data[at : at + len(t.encode())] for at, t in zip(read.positions, read.texts, strict=True)] == [
        t.encode() for t in read.texts
    ]
    reader = reader_for("text", ReadOptions(separator=separator))
    assert not isinstance(reader, ParquetReader)
    assert reader.splittable == (separator not in ("\n\n", "aba", "aa"))
    if reader.splittable:
        path = tmp_path_factory.mktemp("ranges") / "x.txt"
        assert read_in_ranges(path, data, cuts, "text", separator=separator) == read


def test_a_whole_file_is_one_document() -> None:
    assert read_bytes(b"a\r\n\n", "text", whole_files=True).texts == ["a\r\n\n"]
    assert read_bytes(b"", "text", whole_files=True).texts == [""]
    assert read_bytes(b"x" * 11, "text", whole_files=True, max_document_bytes=10).rejects == [(0, 0, "too-long")]
    assert read_bytes(b"x\xff", "text", whole_files=True).rejects == [(0, 0, "invalid-utf8")]
    long = read_bytes(b"x" * 2_000_000, "text", [1000], whole_files=True, max_document_bytes=10)
    assert (long.rejects, long.num_bytes) == ([(0, 0, "too-long")], 2_000_000)


def test_a_truncated_whole_file_is_not_a_document() -> None:
    reader = reader_for("text", ReadOptions(whole_files=True))
    assert not isinstance(reader, ParquetReader)
    assert gather(reader.read_stream(Pieces(b"abc", damage="cut off"))).rejects == [(0, 0, "damaged")]


def test_separator_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        reader_for("text", ReadOptions(separator=""))
    with pytest.raises(UsageError, match="exclude"):
        reader_for("text", ReadOptions(separator="x", whole_files=True))


def test_plain_text_has_nothing_to_keep() -> None:
    assert read_bytes(b"a\nb", "text", keep_keys=("id", "url")).kept == [(None, None), (None, None)]


# --- JSON arrays and concatenated values


def elements(data: bytes, sizes: Iterable[int] = ()) -> list[Any]:
    stream = JsonElements(Pieces(data, sizes))
    output = b"".join(iter(lambda: stream.read(1 << 20), b""))
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


def test_an_element_without_end_is_passed_over_in_bounded_memory() -> None:
    class Endless:
        num_left = 60

        def read(self, size: int, /) -> bytes:
            self.num_left -= 1
            return b'[{"text": "' if self.num_left == 59 else b'\\"' * (size // 2) if self.num_left > 0 else b""

    reader = reader_for("json", ReadOptions(max_document_bytes=1_000_000))
    assert not isinstance(reader, ParquetReader)
    tracemalloc.start()
    read = gather(reader.read_stream(reader.adapt(Endless())))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000
    assert [reason for *_, reason in read.rejects] == ["damaged"]


# --- which format


@pytest.mark.parametrize(
    ("name", "head", "format"),
    [
        ("a.jsonl", b"", "jsonl"),
        ("a.NDJSON", b"not json", "jsonl"),
        ("a.jsonl.gz", b'{"text": "a"}', "jsonl"),
        ("a.txt.zst", b'{"text": "a"}', "text"),
        ("a.md", b"# a", "text"),
        ("a.text", b"", "text"),
        ("a.json", b' [{"text": "a"}]', "json"),
        ("a.json", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("a.json", b'{\n  "text": "a"\n}', "json"),
        ("a.json", b'{"text": "a", "x": [\n1]}', "json"),
        ("a.json", b"", "json"),
        ("a.txt", b"PAR1....", "parquet"),
        ("part-00000", b'{"text": "a"}\nrubbish', "jsonl"),
        ("part-00000", b'\n {"text": "' + b"a" * 70_000, "jsonl"),
        ("part.v2", b'{"text": "a"}', "jsonl"),
    ],
)
def test_the_format_is_told_by_content_then_name(name: str, head: bytes, format: str) -> None:
    assert detect_format(Path(name), head[: 1 << 16], ReadOptions()) == format


@pytest.mark.parametrize("head", [b"some text", b"[1]", b"{not json}\n", b"\x00\x01"])
def test_an_unknown_format_is_refused_by_name(head: bytes) -> None:
    with pytest.raises(DataError, match=r"^data/part-7\.bin: .*--format json\|jsonl\|parquet\|text"):
        detect_format(Path("data/part-7.bin"), head, ReadOptions())


@pytest.mark.parametrize("options", [ReadOptions(whole_files=True), ReadOptions(separator="--")])
def test_flags_of_plain_text_choose_it_and_refuse_other_formats(options: ReadOptions) -> None:
    assert detect_format(Path("a.py"), b"import os", options) == "text"
    assert detect_format(Path("a.txt"), b"x", options) == "text"
    with pytest.raises(DataError, match="--format text"):
        detect_format(Path("a.jsonl"), b"{}", options)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_the_format_inside_a_compressed_file_is_looked_at(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "a.json.zst"
    path.write_bytes(compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert detect_format(path, path.read_bytes(), ReadOptions()) == "jsonl"


def test_an_unknown_reader_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'csv'.*json, jsonl, parquet, text"):
        reader_for("csv", ReadOptions())
    assert list(READERS) == ["json", "jsonl", "parquet", "text"]


# --- Parquet


def write_parquet(path: Path, column: Any, rows_per_group: int = 10, **more: Any) -> Path:
    table = pa.table({"text": column, **more})
    pq.write_table(table, path, row_group_size=rows_per_group, data_page_size=256, compression="zstd")
    return path


def read_parquet(path: Path, start: int = 0, stop: int | None = None, **options: Any) -> Read:
    reader = reader_for("parquet", ReadOptions(**options))
    assert isinstance(reader, ParquetReader)
    return gather(reader.read_range(path, start, reader.num_rows(path) if stop is None else stop))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_columns_of_any_string_type_are_read(tmp_path: Path, kind: Any) -> None:
    texts = [f"text {number % 7} \u00e9" if number % 5 else None for number in range(35)]
    read = read_parquet(write_parquet(tmp_path / "x.parquet", pa.array(texts).cast(kind)))
    assert read.texts == [text for text in texts if text is not None]
    assert read.positions == [number for number in range(35) if number % 5]
    assert read.rejects == [(number, number, "null-text") for number in range(0, 35, 5)]
    assert read.num_lines == 35


def test_spans_of_row_groups_give_every_row_once(tmp_path: Path) -> None:
    texts = [f"text {number} " * (number % 9) for number in range(95)]
    path = write_parquet(tmp_path / "x.parquet", texts, id=list(range(95)))
    reader = reader_for("parquet", ReadOptions(keep_keys=("id",)))
    for task_bytes in (1, 400, 1000, 1 << 30):
        spans = reader.plan(path, task_bytes)
        assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
        assert (spans[0][0], spans[-1][1]) == (0, 95)
        assert all(start % 10 == 0 for start, _ in spans)
        parts = [gather(reader.read_range(path, start, stop)) for start, stop in spans]
        assert [text for part in parts for text in part.texts] == texts
        assert [row for part in parts for row in part.positions] == list(range(95))
        assert [kept for part in parts for kept in part.kept] == [(str(number),) for number in range(95)]
    assert len(reader.plan(path, 1)) == 10
    assert len(reader.plan(path, 1 << 30)) == 1


def test_any_range_of_rows_can_be_read(tmp_path: Path) -> None:
    texts = [str(number) for number in range(40)]
    path = write_parquet(tmp_path / "x.parquet", texts)
    for start, stop in ((0, 40), (3, 4), (9, 11), (15, 40), (39, 100), (7, 7)):
        assert read_parquet(path, start, stop).texts == texts[start:stop]


def test_nested_text_and_kept_columns(tmp_path: Path) -> None:
    rows = [{"body": {"text": "a"}, "n": 1}, None, {"body": None, "n": 2}, {"body": {"text": "b"}, "n": None}]
    times = pa.array([1, None, 3, 4], pa.timestamp("ns"))
    path = tmp_path / "x.parquet"
    tags = [["x", "y"], [], None, ["z"]]
    pq.write_table(pa.table({"doc": rows, "time": times, "tags": tags}), path)
    read = read_parquet(path, text_key="doc.body.text", keep_keys=("doc.n", "time", "tags"))
    assert read.texts == ["a", "b"]
    assert read.kept == [
        ("1", "1970-01-01 00:00:00.000000001", '["x","y"]'),
        (None, "1970-01-01 00:00:00.000000004", '["z"]'),
    ]
    assert [at for at, *_ in read.rejects] == [1, 2]


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([1, 2], {}, "column 'text' has type int64, not string; columns of strings: 'body', 'doc.inner'. Pass --text"),
        ([b"a", b"b"], {}, "column 'text' has type binary, not string"),
        (["a", "b"], {"text_key": "txt"}, "no column 'txt'; columns of strings: 'text', 'body', 'doc.inner'"),
        (["a", "b"], {"text_key": "text.x"}, "no column 'text.x'"),
        (["a", "b"], {"text_key": "doc"}, "column 'doc' has type struct"),
        (["a", "b"], {"keep_keys": ("idd",)}, "no column 'idd' to keep; the columns are 'text', 'body', 'doc'"),
    ],
)
def test_a_column_that_is_no_text_is_refused(tmp_path: Path, column: Any, options: Any, message: str) -> None:
    path = write_parquet(tmp_path / "x.parquet", column, body=["a", "b"], doc=[{"inner": "x"}] * 2)
    with pytest.raises(DataError, match=re.escape(message)):
        read_parquet(path, **options)
    with pytest.raises(DataError, match=re.escape(message)):
        reader_for("parquet", ReadOptions(**options)).plan(path, 100)


def test_text_that_is_not_utf8_or_too_long_is_refused_row_by_row(tmp_path: Path) -> None:
    values = pa.array([b"good", b"\xff\xfe", "\u00e9\u00e9\u00e9".encode(), b"longer", b"end"])
    column = pa.StringArray.from_buffers(5, values.buffers()[1], values.buffers()[2])
    path = write_parquet(tmp_path / "x.parquet", column, id=list("abcde"))
    read = read_parquet(path, max_document_bytes=5, keep_keys=("id",))
    assert read.texts == ["good", "end"]
    assert read.kept == [("a",), ("e",)]
    assert read.rejects == [(1, 1, "invalid-utf8"), (2, 2, "too-long"), (3, 3, "too-long")]


def test_a_column_of_nothing_is_null_text(tmp_path: Path) -> None:
    read = read_parquet(write_parquet(tmp_path / "x.parquet", pa.nulls(3)))
    assert [reason for *_, reason in read.rejects] == ["null-text"] * 3


def test_a_file_without_rows_gives_nothing(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", pa.array([], pa.string()))
    assert read_parquet(path).texts == []
    assert reader_for("parquet", ReadOptions()).plan(path, 100) == []


def test_rows_before_a_damaged_page_are_read_and_the_others_counted(tmp_path: Path) -> None:
    texts = [f"{number:04d} {number * 7919 % 10007} " * 40 for number in range(400)]
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=200, data_page_size=4096, write_batch_size=4,
        use_dictionary=False, compression="zstd", write_page_checksum=True,
    )  # fmt: skip
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 20] = bytes(20)
    path.write_bytes(content)
    reader = reader_for("parquet", ReadOptions())
    batches = list(reader.read_range(path, 0, 400))
    read = gather(batches)
    assert 250 < len(read.texts) < 350
    assert read.texts == texts[: len(read.texts)]
    (reject,) = [reject for batch in batches for reject in batch.rejects]
    assert (reject.reason, reject.position) == ("damaged", len(read.texts))
    assert reject.num_documents == 400 - len(read.texts)
    assert gather(reader.read_range(path, 0, 200)).texts == texts[:200]


@pytest.mark.parametrize("content", [b"PAR1 and no footer", b"PAR1", b""])
def test_a_file_without_a_footer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet: damaged, or not a Parquet file"):
        read_parquet(path)


def test_batches_of_long_rows_are_small(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [f"{number} " * 30_000 for number in range(60)]
    pq.write_table(pa.table({"text": texts}), path, use_dictionary=False)
    batches = list(reader_for("parquet", ReadOptions()).read_range(path, 0, 60))
    assert [text for batch in batches for text in batch.texts] == texts
    assert max(sum(map(len, batch.texts)) for batch in batches) < 4 << 20


# --- hand-made bad files


def nasty_counts() -> dict[str, int]:
    rows = re.findall(r"^\| (\S+) \|.*?\| ([\d,]+) \|", (NASTY / "README.md").read_text(), re.MULTILINE)
    counts = {name: int(count.replace(",", "")) for name, count in rows if not name.startswith("chat")}
    return {**counts, "not_gzip.jsonl.gz": 5}


@pytest.mark.skipif(not NASTY.exists(), reason="needs ../shared/data/nasty")
@pytest.mark.parametrize("name", sorted(nasty_counts()) if NASTY.exists() else [])
def test_nasty_files_give_their_good_documents(name: str) -> None:
    path = NASTY / name
    head = path.read_bytes()[: 1 << 16]
    compression = detect_compression(head, path)
    reader = reader_for(detect_format(path, head, ReadOptions()), ReadOptions())
    texts: list[str] = []
    try:
        if isinstance(reader, ParquetReader):
            texts = gather(reader.read_range(path, 0, reader.num_rows(path))).texts
        else:
            with open_stream(path, compression) as stream:
                texts = gather(reader.read_stream(reader.adapt(stream))).texts
    except DataError as error:
        assert name.endswith(".parquet")
        assert name in str(error)
    assert len(texts) == nasty_counts()[name]
    assert all(text.encode() is not None for text in texts)
