"""Spans of a stream hold the same documents as ranges of the plain file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import Pieces, blocks_of, delimited, gather, line, read_in_ranges
from tokenmill.files import InputStream
from tokenmill.pipeline.task.streams import CutSpan, cut_stream
from tokenmill.text_batch import Refusal


class Sinks:
    """Files for spans, in a folder of their own."""

    def __init__(self, folder: Path, skipped: set[int] | None = None) -> None:
        self.folder = folder
        self.skipped = skipped or set()
        self.opened: list[BinaryIO] = []

    def __call__(self, number: int) -> BinaryIO | None:
        if number in self.skipped:
            return None
        path = self.folder / str(number)
        path.write_bytes(b"left over from an earlier span" * 9)
        self.opened.append(path.open("r+b", buffering=0))
        return self.opened[-1]

    def content(self, number: int) -> bytes:
        return (self.folder / str(number)).read_bytes()


def check_spans(spans: list[CutSpan], sinks: Sinks, data: bytes, task_bytes: int) -> None:
    """Spans follow each other, start where their number says and hold their bytes."""
    position = num_lines = 0
    for span in spans:
        assert (span.start, span.first_line) == (position, num_lines)
        assert span.number == span.start // task_bytes
        if span.stop > span.start and span.number not in sinks.skipped:
            assert sinks.content(span.number) == data[span.start : span.stop]
        position, num_lines = span.stop, num_lines + span.num_lines
    numbers = [span.number for span in spans]
    assert numbers == sorted(set(numbers))
    assert all(file.closed for file in sinks.opened)


documents = st.lists(st.sampled_from([b"", b" ", b"ab", b"bad", line("x"), line("y" * 30), b"z" * 25]), max_size=25)


@settings(deadline=None)
@given(documents, st.integers(1, 60), st.lists(st.integers(1, 40), max_size=4), st.booleans(), st.data())
def test_spans_hold_the_documents_of_the_same_ranges(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
    task_bytes: int,
    sizes: list[int],
    last: bool,
    draw: st.DataObject,
) -> None:
    format, separator = draw.draw(st.sampled_from([("jsonl", None), ("text", None), ("text", "abb"), ("text", "<>")]))
    delimiter = (separator or "\n").encode()
    data = delimiter.join(pieces) + (delimiter if last else b"")
    folder = tmp_path_factory.mktemp("spans")
    reader = delimited(format, separator=separator)
    sinks = Sinks(folder)
    spans = list(cut_stream(Pieces(data, sizes), delimiter=delimiter, task_bytes=task_bytes, sink=sinks))
    check_spans(spans, sinks, data, task_bytes)
    assert sum(span.stop - span.start for span in spans) == len(data)
    path = folder / "plain"
    path.write_bytes(data)
    with_documents = {}
    for number in range(len(data) // task_bytes + 1):
        read = gather(reader.read_range(path, number * task_bytes, min((number + 1) * task_bytes, len(data))))
        if read.num_bytes:
            with_documents[number] = read
    assert [span.number for span in spans] == list(with_documents)
    for span in spans:
        stream = Pieces(sinks.content(span.number), sizes)
        assert gather(reader.read_stream(stream, position=span.start)) == with_documents[span.number]
        assert span.num_lines == with_documents[span.number].num_lines


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab\n"), max_size=80),
    st.sampled_from(["\n\n", "aba", "aa", "abab"]),
    st.integers(1, 30),
    st.lists(st.integers(1, 9), max_size=4),
)
def test_delimiters_that_overlap_themselves_are_cut_as_str_split_does(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, task_bytes: int, sizes: list[int]
) -> None:
    reader = delimited("text", separator=separator)
    data = text.encode()
    sinks = Sinks(tmp_path_factory.mktemp("spans"))
    spans = list(cut_stream(Pieces(data, sizes), delimiter=reader.delimiter, task_bytes=task_bytes, sink=sinks))
    check_spans(spans, sinks, data, task_bytes)
    parts = [gather(reader.read_stream(Pieces(sinks.content(s.number)), position=s.start)) for s in spans]
    whole = gather(reader.read_stream(Pieces(data)))
    assert [text for part in parts for text in part.texts] == whole.texts
    assert [at for part in parts for at in part.positions] == whole.positions
    for span, part in zip(spans, parts, strict=True):
        assert all(at // task_bytes == span.number for at in part.positions)


def test_spans_inside_a_huge_document_are_left_out(tmp_path: Path) -> None:
    data = b"a\n" + b"x" * 100 + b"\nb\n"
    sinks = Sinks(tmp_path)
    spans = list(cut_stream(Pieces(data, [7]), delimiter=b"\n", task_bytes=10, sink=sinks))
    assert [(span.number, span.start, span.stop) for span in spans] == [(0, 0, 103), (10, 103, 105)]
    assert [(span.first_line, span.num_lines) for span in spans] == [(0, 2), (2, 1)]


def test_spans_without_a_sink_are_skipped_and_counted(tmp_path: Path) -> None:
    data = b"".join(b"%d\n" % number for number in range(1000))
    everything = list(cut_stream(Pieces(data), delimiter=b"\n", task_bytes=500, sink=Sinks(tmp_path)))
    sinks = Sinks(tmp_path, skipped={0, 2, 3})
    assert list(cut_stream(Pieces(data), delimiter=b"\n", task_bytes=500, sink=sinks)) == everything
    assert len(sinks.opened) == len(everything) - 3


@settings(deadline=None)
@given(documents, st.integers(1, 60), st.lists(st.integers(1, 40), max_size=4), st.sampled_from([b"\n", b"<>"]))
def test_damage_drops_the_document_it_cuts(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], task_bytes: int, sizes: list[int], delimiter: bytes
) -> None:
    data = delimiter.join(pieces)
    whole = data[: data.rfind(delimiter) + len(delimiter)] if delimiter in data else b""
    sinks = Sinks(tmp_path_factory.mktemp("spans"))
    stream = Pieces(data, sizes, damage="cut off")
    spans = list(cut_stream(stream, delimiter=delimiter, task_bytes=task_bytes, sink=sinks))
    check_spans(spans, sinks, whole, task_bytes)
    assert sum(span.stop - span.start for span in spans) == len(whole)
    assert [span.damage for span in spans] == [None] * (len(spans) - 1) + [Refusal("damaged", "cut off")]
    assert sum(span.num_lines for span in spans) == whole.count(delimiter)


def test_without_a_delimiter_there_is_one_span(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path)
    spans = list(cut_stream(Pieces(b"a\nb\n" * 20, [9]), delimiter=b"", task_bytes=10, sink=sinks))
    assert [(span.number, span.start, span.stop) for span in spans] == [(0, 0, 80)]
    assert sinks.content(0) == b"a\nb\n" * 20


def test_an_empty_stream_has_no_spans(tmp_path: Path) -> None:
    assert list(cut_stream(Pieces(b""), delimiter=b"\n", task_bytes=10, sink=Sinks(tmp_path))) == []


def test_a_sink_is_closed_when_the_cutting_is_given_up(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path)
    spans = cut_stream(Pieces(b"abc\n" * 100, [50]), delimiter=b"\n", task_bytes=100, sink=sinks)
    next(spans)
    next(spans)
    spans.close()  # type: ignore[attr-defined]
    assert all(file.closed for file in sinks.opened)


def test_a_compressed_file_is_cut_like_the_plain_one(tmp_path: Path) -> None:
    data = b"".join(line("x" * (number % 50)) + b"\n" for number in range(3000))
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data[:30_000]) + gzip.compress(data[30_000:]))
    sinks = Sinks(tmp_path)
    with InputStream(path, "gzip") as stream:
        spans = list(cut_stream(stream, delimiter=b"\n", task_bytes=10_000, sink=sinks))
    check_spans(spans, sinks, data, 10_000)
    reader = delimited("jsonl")
    texts = []
    for span in spans:
        with InputStream(tmp_path / str(span.number), "none") as spool, blocks_of(100):
            texts += gather(reader.read_stream(spool, position=span.start)).texts
    whole = read_in_ranges(tmp_path / "plain", data, range(0, len(data), 10_000), "jsonl")
    assert texts == whole.texts
