"""Which reader an input gets: content decides before the name, and nothing is guessed."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.support.reading import gather
from tokenmill.errors import DataError
from tokenmill.files import InputStream, detect_compression
from tokenmill.inputs import Input
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.readers import ReadOptions, delimited_reader_for, detect_format, reader_for

NASTY = Path(__file__).parents[3] / "shared" / "data" / "nasty"
COMPRESSORS = [gzip.compress, zstandard.ZstdCompressor().compress]


@pytest.mark.parametrize(
    ("name", "head", "format"),
    [
        ("a.jsonl", b"", "jsonl"),
        ("a.NDJSON", b"not json", "jsonl"),
        ("a.jsonl.gz", b'{"text": "a"}', "jsonl"),
        ("a.txt.zst", b'{"text": "a"}', "jsonl"),
        ("a.txt", b'{"text": "a"}\n\n{"text": "' + b"a" * 70_000, "jsonl"),
        ("a.txt", b'{"text": "a"}\nand a line of text\n', "text"),
        ("a.txt", b'{"text": "a"}{"text": "b"}\n', "text"),
        ("a.txt", b'{"text": "' + b"a" * 70_000, "text"),
        ("a.md", b"{curly}\n", "markdown"),
        ("a.jsonl", b'[{"text": "a"},\n {"text": "b"}]', "json"),
        ("a.jsonl", b'[{"text": "a"}, {"text": "' + b"a" * 70_000, "json"),
        ("a.jsonl", b'[1, 2]\n{"text": "b"}\n', "jsonl"),
        ("a.jsonl", b'[{"text": "a"}]\n{"text": "b"}\n', "jsonl"),
        ("a.json", b'{"text":"a"}\n{\n "text":\n "b"\n}\n', "json"),
        ("a.json", b'{"text":"a"}\n{"text":"c"}{"text":"d"}', "json"),
        ("a.json", b'{"text":"a"}\n{"text":"c"} {"text":"d"}\n{"text":"e"}\n', "json"),
        ("a.json", b'{"text":"a"}\n{\n "text": "' + b"a" * 70_000, "json"),
        ("a.json", b'{"text":"a"}\n{"text": oh\n{"text":"b"}\n', "jsonl"),
        ("a.json", b'{"text":"a"}\n{"text":"b"} garbage\n{"text":"c"}\n', "jsonl"),
        ("a.json", b'{"text":"a"}\n{"text":"' + b"a" * 70_000, "jsonl"),
        ("part-0", b'[{"text": "a"}]', "json"),
        ("part-0", b'{\n "text": "a"\n}\n', "json"),
        ("a.md", b"# a", "markdown"),
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
def test_the_format_is_detected_by_content_then_name(name: str, head: bytes, format: str) -> None:
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


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_the_format_inside_a_compressed_file_is_looked_at(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "a.json.zst"
    path.write_bytes(compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert detect_format(path, path.read_bytes(), ReadOptions()) == "jsonl"


@pytest.mark.parametrize("compress", COMPRESSORS)
@pytest.mark.parametrize("format", ["auto", "parquet"])
def test_parquet_inside_a_compressed_file_is_refused(tmp_path: Path, compress: Any, format: str) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(compress(b"PAR1 and more"))
    with pytest.raises(DataError, match="compressed Parquet; decompress it"):
        inspect_inputs([Input(str(path))], format, ReadOptions())


def nasty_counts() -> dict[str, int]:
    rows = re.findall(r"^\| (\S+) \|.*?\| ([\d,]+) \|", (NASTY / "README.md").read_text(), re.MULTILINE)
    counts = {name: int(count.replace(",", "")) for name, count in rows if not name.startswith("chat")}
    return {**counts, "not_gzip.jsonl.gz": 5, "binary_column.parquet": 20}


@pytest.mark.skipif(not NASTY.exists(), reason="needs ../shared/data/nasty")
@pytest.mark.parametrize("name", sorted(nasty_counts()) if NASTY.exists() else [])
def test_nasty_files_give_their_good_documents(name: str) -> None:
    path = NASTY / name
    head = path.read_bytes()[: 1 << 16]
    compression = detect_compression(head, path)
    format = detect_format(path, head, ReadOptions())
    if compression == "none":
        read = gather(reader_for(format, ReadOptions()).read_range(path, 0, None))
    else:
        with InputStream(path, compression) as stream:
            reader = delimited_reader_for(format, ReadOptions())
            read = gather(reader.read_stream(reader.adapt(stream)))
    assert len(read.texts) == nasty_counts()[name]
    assert all(text.encode() is not None for text in read.texts)
    if path.stem in {"int_column", "truncated", "wrong_column"} and format == "parquet":
        assert [reason for *_, reason in read.rejects] == ["damaged" if path.stem == "truncated" else "no-text-column"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "no suffix"])
@pytest.mark.parametrize(
    ("encoding", "codec"),
    [("UTF-16", "utf-16"), ("UTF-16", "utf-16-be"), ("UTF-32", "utf-32"), ("UTF-32", "utf-32-be")],
)
def test_another_encoding_is_named_with_the_command_that_converts_it(
    name: str, encoding: str, codec: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    mark = "" if codec in ("utf-16", "utf-32") else "\ufeff"
    path.write_bytes(f'{mark}{{"text": "größer"}}\n'.encode(codec))
    with pytest.raises(DataError, match=f"is {encoding} text, and UTF-8 is read. Convert it: iconv -f {encoding} -t"):
        detect_format(path, path.read_bytes(), ReadOptions())


@pytest.mark.parametrize("name", ["a.csv", "b.CSV.gz", "c.tsv"])
def test_a_table_of_text_is_named_with_what_reads_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(DataError, match=r"is (CSV|TSV), which is not read. Write it as JSON lines or Parquet, or: tok"):
        detect_format(path, b"id,text\n1,one\n", ReadOptions())
