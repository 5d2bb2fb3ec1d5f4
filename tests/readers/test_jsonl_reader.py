"""JSON lines: every bad line is refused with a reason, and every other one is a document."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import (
    Pieces,
    blocks_of,
    delimited,
    gather,
    json_values,
    line,
    read_bytes,
    rejects_of,
)
from tokenmill.errors import UsageError
from tokenmill.readers import ReadOptions, reader_for
from tokenmill.text_batch import PackedTexts

NASTY = Path(__file__).parents[3] / "shared" / "data" / "nasty"


@pytest.fixture(params=[1 << 19, 64, 7], ids=["large-blocks", "small-blocks", "tiny-blocks"])
def block_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    with blocks_of(request.param):
        yield request.param


def test_documents_come_with_the_position_of_their_line(block_bytes: int) -> None:
    data = line("a") + b"\n" + line("", id=1) + b"\n\n  \n" + line("\u00e9\U0001f600") + b"\r\n" + line("end")
    read = read_bytes(data)
    assert read.texts == ["a", "", "\u00e9\U0001f600", "end"]
    assert read.positions == [0, 14, data.index(b'{"text": "\xc3'), data.index(b'{"text": "end')]
    assert (read.rejects, read.num_lines, read.num_bytes) == ([], 6, len(data))


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


def test_a_suggested_field_can_be_pasted_into_a_terminal() -> None:
    (reject,) = rejects_of(b'{"the text": "long text"}')
    assert reject.detail.endswith("Pass --text-key 'the text'")
    (reject,) = rejects_of(b'{"a\\n\\u001b[2J": "long text"}')
    assert reject.detail == "no field 'text'; the record has 'a \N{SYMBOL FOR ESCAPE}[2J'"


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
    read = read_bytes(data, text_key="doc.text", keep_keys=("doc.id", "doc", "doc.text"))
    assert read.texts == ["a", "b"]
    assert read.kept == [("7", '{"text":"a","id":7}', "a"), (None, '{"text":"b"}', "b")]
    assert [reason for *_, reason in read.rejects] == ["null-text"]


def test_a_lone_surrogate_in_a_kept_field_refuses_the_document() -> None:
    assert [r.reason for r in rejects_of(b'{"text": "a", "id": "\\ud800"}', keep_keys=("id",))] == ["lone-surrogate"]


records = st.dictionaries(st.sampled_from(["text", "id", "x"]), json_values, max_size=3) | json_values


def expected_reason(value: Any) -> str | None:
    """The expected document or reject of a record, from its plain Python value."""
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


escapes = st.sampled_from(
    [
        *(rb"\n", rb"\t", rb"\r", rb"\b", rb"\f", rb"\\", rb"\"", rb"\/", rb"\u0041", rb"\u00e9", rb"\ud83d\ude00"),
        *(rb"\ud800", rb"\u12", rb"\x41", rb"\a", rb"\0", rb"\'", b"\\", b"\x01", b"\t", b"\x7f"),
        *(
            b"u",
            b"/",
            b"n",
            b"a",
            b"'",
            b"plain",
            "\u00e9\u4e2d\U0001f600".encode(),
            b"\xff",
            b"\xed\xa0\x80",
            b"\xc0\x80",
        ),
    ]
)
strings = st.lists(escapes, max_size=6).map(lambda parts: b'"' + b"".join(parts) + b'"')
field_lines = st.tuples(st.sampled_from([b"text", b"id"]), strings | st.sampled_from([b"null", b"1", b'["a"]', b"{}"]))


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(field_lines, max_size=3), max_size=8), st.booleans())
def test_packed_texts_are_the_texts_whatever_escapes_they_have(records: list[Any], kept: bool) -> None:
    lines = [b"{%b}" % b", ".join(b'"%b": %b' % field for field in fields) for fields in records]
    read_bytes(b"\n".join(lines), keep_keys=("id",) if kept else ())


@pytest.mark.parametrize("first", ["plain", "", "\u00e9", "back\\slash", "\\u0041", 'quote"', "\\"])
@pytest.mark.parametrize("last", ["plain", "", "\\u", 'quote"', "/", "\\"])
def test_texts_are_packed_in_one_buffer(first: str, last: str) -> None:
    texts = [first, *["between \u2019"] * 9, last]
    (batch,) = delimited("jsonl", packed=True).read_stream(Pieces(b"\n".join(map(line, texts)) + b"\n"))
    assert isinstance(batch.texts, PackedTexts)
    assert batch.texts.data == PackedTexts.of(texts).data
    assert (list(batch.texts), batch.texts[1:3], batch.texts[-1], len(batch.texts)) == (texts, texts[1:3], last, 11)
    assert batch.texts.longest >= max(len(text.encode()) for text in texts)


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_document_above_the_limit_is_skipped_in_bounded_memory(format: str, end: bytes) -> None:
    class Endless:
        def __init__(self) -> None:
            self.pieces = [line("a") + b"\n", b'{"text": "', *[b"x" * (1 << 19)] * 60, b'"}' + end]

        def read(self, size: int, /) -> bytes:
            return self.pieces.pop(0) if self.pieces else b""

    stream = Endless()
    reader = delimited(format, max_document_bytes=1_000_000)
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
