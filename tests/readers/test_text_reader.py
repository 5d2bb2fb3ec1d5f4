"""Plain text: lines, pieces between separators, whole files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import Pieces, block_sizes, blocks_of, cuts, delimited, gather, read_bytes, read_in_ranges
from tokenmill.errors import UsageError
from tokenmill.readers import MARKDOWN, ReadOptions, reader_for


@pytest.fixture(params=[1 << 19, 64, 7], ids=["large-blocks", "small-blocks", "tiny-blocks"])
def block_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    with blocks_of(request.param):
        yield request.param


def test_each_line_is_a_document_and_blank_lines_are_not(block_bytes: int) -> None:
    read = read_bytes(b"one\n\n  \ntwo\r\n\r\n\x00three\n a \nlast", "text")
    assert read.texts == ["one", "two", "\x00three", " a ", "last"]
    assert read.positions == [0, 8, 15, 22, 26]
    assert read.num_lines == 8


def test_pieces_between_separators_are_documents_even_when_empty() -> None:
    read = read_bytes(b"a\nb<end><end>\r\nc<end>", "text", separator="<end>")
    assert read.texts == ["a\nb", "", "\r\nc"]
    assert read.positions == [0, 8, 13]
    bad = read_bytes(b"a<end>\xff<end>long text<end>b", "text", [1], separator="<end>", max_document_bytes=4)
    assert bad.texts == ["a", "b"]
    assert bad.rejects == [(6, -1, "invalid-utf8"), (12, -1, "too-long")]


def split(text: str, separator: str) -> list[str]:
    pieces = text.split(separator)
    return pieces if pieces[-1] else pieces[:-1]


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab\n\u00e9"), max_size=60),
    st.sampled_from(["\n\n", "aba", "aa", "ab", "abb", "\u00e9", "a"]),
    st.lists(st.integers(1, 9), max_size=4),
    cuts,
    block_sizes,
)
def test_separators_cut_as_str_split_does(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, sizes: list[int], cuts: list[int], size: int
) -> None:
    data = text.encode()
    read = read_bytes(data, "text", sizes, separator=separator)
    assert read.texts == split(text, separator)
    assert [data[at : at + len(t.encode())] for at, t in zip(read.positions, read.texts, strict=True)] == [
        t.encode() for t in read.texts
    ]
    reader = delimited("text", separator=separator)
    assert reader.splittable == (separator not in ("\n\n", "aba", "aa"))
    if reader.splittable:
        path = tmp_path_factory.mktemp("ranges") / "x.txt"
        with blocks_of(size):
            assert read_in_ranges(path, data, cuts, "text", separator=separator) == read


def test_a_whole_file_is_one_document() -> None:
    assert read_bytes(b"a\r\n\n", "text", whole_files=True).texts == ["a\r\n\n"]
    assert read_bytes(b"", "text", whole_files=True).texts == [""]
    assert read_bytes(b"x" * 11, "text", whole_files=True, max_document_bytes=10).rejects == [(0, 0, "too-long")]
    assert read_bytes(b"x\xff", "text", whole_files=True).rejects == [(0, 0, "invalid-utf8")]
    long = read_bytes(b"x" * 2_000_000, "text", [1000], whole_files=True, max_document_bytes=10)
    assert (long.rejects, long.num_bytes) == ([(0, 0, "too-long")], 2_000_000)


def test_a_truncated_whole_file_is_not_a_document() -> None:
    reader = delimited("text", whole_files=True)
    assert gather(reader.read_stream(Pieces(b"abc", damage="cut off"))).rejects == [(0, 0, "damaged")]


def test_separator_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        reader_for("text", ReadOptions(separator=""))
    with pytest.raises(UsageError, match="exclude"):
        reader_for("text", ReadOptions(separator="x", whole_files=True))


def test_a_markdown_file_is_one_document_whatever_its_lines_are(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf# Title\n\nText \xc3\xa9.\r\n")
    (batch,) = reader_for(MARKDOWN, ReadOptions(keep_keys=("id",))).read_range(tmp_path / "a.md", 0, None)
    assert list(batch.texts) == ["# Title\n\nText \u00e9.\r\n"]
    assert (batch.positions.tolist(), batch.kept, batch.rejects) == ([0], [(None,)], [])
