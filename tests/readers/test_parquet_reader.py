"""Parquet: string columns of every kind, spans of row groups, damaged pages."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.reading import Read, gather
from tests.support.running import write_damaged_parquet
from tokenmill.errors import DataError
from tokenmill.readers import ReadOptions, reader_for
from tokenmill.text_batch import PackedTexts


def write_parquet(path: Path, column: Any, rows_per_group: int = 10, **more: Any) -> Path:
    table = pa.table({"text": column, **more})
    pq.write_table(table, path, row_group_size=rows_per_group, data_page_size=256, compression="zstd")
    return path


def read_parquet(path: Path, start: int = 0, stop: int | None = None, **options: Any) -> Read:
    """Rows of a file, with texts as strings and packed, which have to be the same."""
    read, packed = (
        gather(reader_for("parquet", ReadOptions(**options, packed=packed)).read_range(path, start, stop))
        for packed in (False, True)
    )
    assert packed == read
    return read


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_texts_are_packed_in_one_buffer(tmp_path: Path, kind: Any) -> None:
    texts = ["a", "", "\u00e9 \u2019", 'quote"', "back\\slash", '"', "end"]
    path = write_parquet(tmp_path / "x.parquet", pa.array(texts).cast(kind))
    (batch,) = reader_for("parquet", ReadOptions(packed=True)).read_range(path, 1, 7)
    assert isinstance(batch.texts, PackedTexts)
    assert (batch.texts.data, batch.texts.longest) == (PackedTexts.of(texts[1:]).data, 10)
    assert list(batch.texts) == texts[1:]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_columns_of_any_string_type_are_read(tmp_path: Path, kind: Any) -> None:
    texts = [f"text {number % 7} \u00e9" if number % 5 else None for number in range(35)]
    try:
        path = write_parquet(tmp_path / "x.parquet", pa.array(texts).cast(kind))
    except pa.ArrowNotImplementedError:
        pytest.skip(f"this pyarrow does not write {kind}")
    read = read_parquet(path)
    assert read.texts == [text for text in texts if text is not None]
    assert read.positions == [number for number in range(35) if number % 5]
    assert read.rejects == [(number, number, "null-text") for number in range(0, 35, 5)]
    assert read.num_lines == 35


def test_a_plan_cuts_between_row_groups(tmp_path: Path) -> None:
    texts = [f"text {number} " * (number % 9) for number in range(95)]
    path = write_parquet(tmp_path / "x.parquet", texts, id=list(range(95)))
    reader = reader_for("parquet", ReadOptions(keep_keys=("id",)))
    for task_bytes in (1, 400, 1000, 1 << 30):
        spans = reader.plan(path, task_bytes)
        assert all(start % 10 == 0 for start, _ in spans)
        parts = [gather(reader.read_range(path, start, stop)) for start, stop in spans]
        assert [kept for part in parts for kept in part.kept] == [(str(number),) for number in range(95)]
    assert [len(reader.plan(path, size)) for size in (1, 1 << 30)] == [10, 1]


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


def test_a_column_whose_name_has_dots_is_found_before_a_nested_one(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a.b": ["flat", "two"], "c.d": ["x", "y"]}), path)
    assert read_parquet(path, text_key="a.b", keep_keys=("c.d",)).texts == ["flat", "two"]
    assert read_parquet(path, text_key="a.b", keep_keys=("c.d",)).kept == [("x",), ("y",)]
    assert [reason for *_, reason in read_parquet(path).rejects] == ["no-text-column"]
    pq.write_table(pa.table({"a": [{"b": "nested"}], "a.b": ["flat"]}), path)
    assert read_parquet(path, text_key="a.b").texts == ["flat"]


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([1, 2], {}, "column 'text' has type int64, not string; columns of strings: 'body', 'doc.inner'. Pass --text"),
        ([[b"a"], [b"b"]], {}, "column 'text' has type list<element: binary>, not string"),
        (["a", "b"], {"text_key": "txt"}, "no column 'txt'; columns of strings: 'text', 'body', 'doc.inner'"),
        (["a", "b"], {"text_key": "text.x"}, "no column 'text.x'"),
        (["a", "b"], {"text_key": "doc"}, "column 'doc' has type struct"),
        (["a", "b"], {"keep_keys": ("idd",)}, "no column 'idd' to keep; the columns are 'text', 'body', 'doc'"),
    ],
)
def test_a_file_without_the_wanted_column_is_refused(tmp_path: Path, column: Any, options: Any, message: str) -> None:
    path = write_parquet(tmp_path / "x.parquet", column, body=["a", "b"], doc=[{"inner": "x"}] * 2)
    reader = reader_for("parquet", ReadOptions(**options))
    with pytest.raises(DataError, match=re.escape(message)):
        reader.plan(path, 100)
    if "keep_keys" in options:
        with pytest.raises(DataError, match=re.escape(message)):
            read_parquet(path, **options)
        return
    (batch,) = reader.read_range(path, 1, None)
    (reject,) = batch.rejects
    assert (reject.position, reject.line, reject.reason, reject.num_documents) == (1, -1, "no-text-column", 1)
    assert message in reject.detail


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


BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_columns_of_bytes_are_text_if_they_are_utf8(tmp_path: Path, kind: Any) -> None:
    values = [b"plain", b"\xff\xfe", "\u00e9".encode(), None, b"", b"longer than five"]
    column = pa.array(values)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    path = write_parquet(tmp_path / "x.parquet", column, rows_per_group=4, doc=[{"inner": v} for v in values])
    for key in ("text", "doc.inner"):
        read = read_parquet(path, text_key=key, max_document_bytes=5)
        assert read.texts == ["plain", "\u00e9", ""]
        assert read.positions == [0, 2, 4]
        assert read.rejects == [(1, 1, "invalid-utf8"), (3, 3, "null-text"), (5, 5, "too-long")]
    sound = write_parquet(tmp_path / "y.parquet", column.slice(4, 1))
    (batch,) = reader_for("parquet", ReadOptions(packed=True)).read_range(sound, 0, None)
    assert isinstance(batch.texts, PackedTexts)


def test_kept_bytes_are_text_and_a_value_that_is_not_utf8_refuses_its_row(tmp_path: Path) -> None:
    url = [b"http://a", None, b"\xff", b"http://d"]
    tags = pa.array([[b"x", b"y"], [], [b"z"], [b"\xfe"]], pa.list_(pa.binary()))
    path = write_parquet(tmp_path / "x.parquet", ["a", "b", "c", "d"], meta=[{"url": u} for u in url], tags=tags)
    read = read_parquet(path, keep_keys=("meta.url", "tags"))
    assert read.texts == ["a", "b"]
    assert read.kept == [("http://a", '["x","y"]'), (None, "[]")]
    assert read.rejects == [(2, 2, "invalid-utf8"), (3, 3, "invalid-utf8")]


def test_records_of_bytes_are_read_as_text(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.large_binary())]))
    messages = pa.array([[{"role": b"user", "content": b"hi"}], [{"role": b"user", "content": b"\xff"}], None], kind)
    path = write_parquet(tmp_path / "x.parquet", messages)
    batches = list(reader_for("parquet", ReadOptions(record_keys=("text", "tools"))).read_range(path, 0, None))
    records = [record for batch in batches for record in batch.records or ()]
    assert records == [([{"role": "user", "content": "hi"}], None), (None, None)]
    assert [(r.position, r.reason) for batch in batches for r in batch.rejects] == [(1, "invalid-utf8")]


def test_a_file_with_bytes_alone_suggests_them_as_the_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [1], body=[b"a"])
    (batch,) = reader_for("parquet", ReadOptions()).read_range(path, 0, None)
    assert "columns of bytes: 'body'. Pass --text-key body" in batch.rejects[0].detail


PAGES: list[dict[str, Any]] = [
    {"compression": "zstd", "use_dictionary": False},
    {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    {"compression": "snappy", "use_dictionary": True},
]


@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_any_damage_costs_rows_of_its_row_group_alone(tmp_path: Path, pages: dict[str, Any]) -> None:
    chance = random.Random(str(pages))
    texts = [f"{row} " + "".join(chance.choices("abcdef \u00e9", k=chance.randrange(300))) for row in range(290)]
    path, reader = tmp_path / "x.parquet", reader_for("parquet", ReadOptions(keep_keys=("id",)))
    pq.write_table(
        pa.table({"text": texts, "id": range(290)}), path, row_group_size=40, data_page_size=1024, write_batch_size=4,
        write_page_checksum=True, **pages,
    )  # fmt: skip
    content, metadata = path.read_bytes(), pq.read_metadata(path)
    num_damaged = 0
    for _ in range(60):
        group = chance.randrange(metadata.num_row_groups)
        column = metadata.row_group(group).column(chance.randrange(2))
        first = column.dictionary_page_offset or column.data_page_offset
        at = chance.randrange(first, first + column.total_compressed_size)
        size = chance.choice([1, 20])
        flipped = bytes(byte ^ 1 << chance.randrange(8) for byte in content[at : at + size])
        path.write_bytes(content[:at] + flipped + content[at + size :])
        stop = first + column.total_compressed_size
        inside = {group} if at + size <= stop else {group, group + 1}
        batches = list(reader.read_range(path, 0, None))
        read = gather(batches)
        rejects = [reject for batch in batches for reject in batch.rejects]
        assert read.texts == [texts[row] for row in read.positions]
        assert read.kept == [(str(row),) for row in read.positions]
        hidden = [row for reject in rejects for row in range(reject.position, reject.position + reject.num_documents)]
        assert sorted([*read.positions, *hidden]) == list(range(290))
        assert {row // 40 for row in hidden} <= inside
        assert {reject.reason for reject in rejects} <= {"damaged"}
        num_damaged += bool(rejects)
        if rejects:
            row = rejects[0].position
            again = gather(reader.read_range(path, max(0, row - 3), row + 50))
            assert again.positions == [at for at in read.positions if row - 3 <= at < row + 50]
    assert num_damaged > 30


def test_rows_before_a_damaged_page_are_read_and_the_others_counted(tmp_path: Path) -> None:
    texts = [f"{number:04d} {number * 7919 % 10007} " * 40 for number in range(400)]
    path = write_damaged_parquet(tmp_path / "x.parquet", texts, damaged_group=1, rows_per_group=200)
    reader = reader_for("parquet", ReadOptions())
    batches = list(reader.read_range(path, 0, 400))
    read = gather(batches)
    assert 250 < len(read.texts) < 350
    assert read.texts == texts[: len(read.texts)]
    (reject,) = [reject for batch in batches for reject in batch.rejects]
    assert (reject.reason, reject.position) == ("damaged", len(read.texts))
    assert reject.num_documents == 400 - len(read.texts)
    assert gather(reader.read_range(path, 0, 200)).texts == texts[:200]
    assert gather(reader.read_range(path, 230, 240)).texts == texts[230:240]


def test_how_far_rows_are_rescued_does_not_depend_on_where_reading_starts(tmp_path: Path) -> None:
    texts = ["short"] * 3000 + [f"{number:04d} {number * 7919 % 10007} " * 900 for number in range(300)]
    path = write_damaged_parquet(tmp_path / "x.parquet", texts, damaged_group=10, rows_per_group=300)
    reader = reader_for("parquet", ReadOptions())
    whole, group = (gather(reader.read_range(path, start, 3300)) for start in (0, 3000))
    assert 0 < len(group.texts) < 300
    assert [row for row in whole.positions if row >= 3000] == group.positions


@pytest.mark.parametrize("content", [b"PAR1 and no footer", b"PAR1", b""])
def test_a_file_without_a_footer_is_one_reject(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    reader = reader_for("parquet", ReadOptions())
    (batch,) = reader.read_range(path, 0, None)
    (reject,) = batch.rejects
    assert reject.reason == "damaged"
    assert reject.detail.startswith("damaged, or not a Parquet file")
    assert reader.count_documents(path) == reject.num_documents == 1
    with pytest.raises(DataError, match=r"x\.parquet: damaged, or not a Parquet file"):
        reader.plan(path, 100)


def test_batches_of_long_rows_are_small(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [f"{number} " * 30_000 for number in range(60)]
    pq.write_table(pa.table({"text": texts}), path, use_dictionary=False)
    batches = list(reader_for("parquet", ReadOptions()).read_range(path, 0, 60))
    assert [text for batch in batches for text in batch.texts] == texts
    assert max(sum(map(len, batch.texts)) for batch in batches) < 4 << 20
