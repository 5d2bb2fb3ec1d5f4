"""What the pipeline needs of every reader: each document once, wherever a file is cut, and rejects with their places."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reading import (
    Pieces,
    Read,
    block_sizes,
    blocks_of,
    cuts,
    delimited,
    gather,
    line,
    read_bytes,
    read_in_ranges,
)
from tests.support.running import write_damaged_parquet
from tokenmill.errors import DataError, UsageError
from tokenmill.readers import MARKDOWN, READERS, ReadOptions, reader_for
from tokenmill.text_batch import Reject

MARK = b"\xef\xbb\xbf"
LIMIT = 40
BAD: dict[str, bytes] = {"invalid-utf8": b"bad \xff", "too-long": b"x" * (LIMIT + 1)}


class Case(NamedTuple):
    """A backend, and how a test writes texts (of any bytes) for it."""

    format: str
    write: Callable[[Path, list[bytes]], object]
    options: dict[str, Any] = {}

    def read(self, path: Path, start: int = 0, stop: int | None = None, **options: Any) -> Read:
        """Read a span with texts as strings and packed, which have to be the same."""
        options = {**self.options, **options}
        read, packed = (
            gather(reader_for(self.format, ReadOptions(**options, packed=packed)).read_range(path, start, stop))
            for packed in (False, True)
        )
        assert packed == read
        return read


def write_parquet(path: Path, texts: list[bytes], **columns: Any) -> None:
    values = pa.array(texts, pa.binary())
    column = pa.StringArray.from_buffers(len(texts), *values.buffers()[1:])
    pq.write_table(pa.table({"text": column, **columns}), path, row_group_size=7)


def as_json(text: bytes) -> bytes:
    return b'{"text": "' + text + b'"}'


CASES = {
    "jsonl": Case("jsonl", lambda path, texts: path.write_bytes(b"".join(as_json(text) + b"\n" for text in texts))),
    "json-array": Case("json", lambda path, texts: path.write_bytes(b"[%b]" % b",\n".join(map(as_json, texts)))),
    "json-values": Case("json", lambda path, texts: path.write_bytes(b" ".join(map(as_json, texts)))),
    "parquet": Case("parquet", write_parquet),
    "text": Case("text", lambda path, texts: path.write_bytes(b"\n".join(texts))),
    "text-separator": Case("text", lambda path, texts: path.write_bytes(b"<end>".join(texts)), {"separator": "<end>"}),
    "text-overlap": Case("text", lambda path, texts: path.write_bytes(b"\n\n".join(texts)), {"separator": "\n\n"}),
}
TEXTS = [f"{number} \u00e9 text {'word ' * (number % 5)}".strip() for number in range(30)]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def path(tmp_path: Path, case: Case) -> Path:
    """A file with `TEXTS`."""
    case.write(tmp_path / "x", [text.encode() for text in TEXTS])
    return tmp_path / "x"


def test_every_backend_is_here() -> None:
    # A Markdown file is one document, so most of this suite does not apply to it; see tests/readers/test_text_reader.py.
    assert {case.format for case in CASES.values()} == set(READERS) - {MARKDOWN}
    with pytest.raises(UsageError, match=r"'csv'.*json, jsonl, markdown, parquet, text"):
        reader_for("csv", ReadOptions())


def test_documents_come_in_order_with_ascending_positions(case: Case, path: Path) -> None:
    read = case.read(path)
    assert read.texts == TEXTS
    assert read.rejects == []
    assert read.num_lines == len(TEXTS)
    assert all(first < second for first, second in itertools.pairwise(read.positions))


@pytest.mark.parametrize("task_bytes", [1, 50, 300, 1 << 30])
def test_the_spans_of_a_plan_give_every_document_once(case: Case, path: Path, task_bytes: int) -> None:
    reader = reader_for(case.format, ReadOptions(**case.options))
    spans = reader.plan(path, task_bytes)
    assert spans[0][0] == 0
    assert all(first[1] == second[0] for first, second in itertools.pairwise(spans))
    assert spans[-1][1] == (len(TEXTS) if reader.counts_rows else path.stat().st_size)
    assert len(spans) == 1 or reader.splittable
    parts = [case.read(path, start, stop) for start, stop in spans]
    assert [text for part in parts for text in part.texts] == TEXTS
    assert [at for part in parts for at in part.positions] == case.read(path).positions


def test_a_file_can_be_cut_anywhere_or_not_at_all(case: Case, path: Path) -> None:
    reader = reader_for(case.format, ReadOptions(**case.options))
    if not reader.splittable:
        assert reader.plan(path, 1) == [(0, path.stat().st_size)]
        return
    end = len(TEXTS) if reader.counts_rows else path.stat().st_size
    for edges in ([0, *range(1, end, 7), end], [0, 1, end - 1, end], [0, 13, 13, end]):
        parts = [(start, stop, case.read(path, start, stop)) for start, stop in itertools.pairwise(edges)]
        assert [text for *_, part in parts for text in part.texts] == TEXTS
        assert all(start <= at < stop for start, stop, part in parts for at in part.positions)


def test_a_document_count_is_exact_or_unknown(case: Case, path: Path) -> None:
    assert reader_for(case.format, ReadOptions(**case.options)).count_documents(path) in (None, len(TEXTS))


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_document_is_a_reject_with_its_place_and_costs_only_itself(
    tmp_path: Path, case: Case, reason: str
) -> None:
    good = [b"one", b"two", b"three"]
    case.write(tmp_path / "bad", [good[0], BAD[reason], good[1], BAD[reason], good[2]])
    read = case.read(tmp_path / "bad", max_document_bytes=LIMIT)
    assert read.texts == ["one", "two", "three"]
    assert [why for *_, why in read.rejects] == [reason] * 2
    assert [at for _, at, _ in read.rejects] == ([-1, -1] if case.options else [1, 3])
    places = sorted([*read.positions, *(at for at, *_ in read.rejects)])
    assert [at for at, *_ in read.rejects] == [places[1], places[3]]


def test_kept_values_go_with_their_documents(tmp_path: Path, case: Case) -> None:
    if case.format == "text":
        case.write(tmp_path / "x", [b"a", b"b"])
        assert case.read(tmp_path / "x", keep_keys=("id", "url")).kept == [(None, None), (None, None)]
        return
    records = [{"text": "a", "id": 1, "url": "u"}, {"text": None, "id": 2}, {"text": "b", "id": None}]
    write_records(tmp_path / "x", case.format, records)
    read = case.read(tmp_path / "x", keep_keys=("id", "url"))
    assert (read.texts, read.kept) == (["a", "b"], [("1", "u"), (None, None)])
    assert [(at, reason) for _, at, reason in read.rejects] == [(1, "null-text")]


def write_records(path: Path, format: str, records: list[dict[str, Any]]) -> None:
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif format == "json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("format", ["jsonl", "json", "parquet"])
def test_fields_of_supervised_data_come_as_records(tmp_path: Path, format: str) -> None:
    records = [{"q": {"x": "a"}, "r": [1, 2], "id": 5}, {"q": None, "r": [3], "id": 6}]
    write_records(tmp_path / "x", format, records)
    options = ReadOptions(record_keys=("q", "r", "q.x", "gone"), keep_keys=("id",))
    (batch,) = reader_for(format, options).read_range(tmp_path / "x", 0, None)
    assert batch.records == [({"x": "a"}, [1, 2], "a", None), (None, [3], None, None)]
    assert (batch.texts, batch.kept, batch.lines.tolist()) == ([], [("5",), ("6",)], [0, 1])


def test_plain_text_has_no_records() -> None:
    with pytest.raises(UsageError, match="plain text has no field 'q'"):
        reader_for("text", ReadOptions(record_keys=("q",)))


def test_a_missing_file_is_a_data_error_that_names_it(tmp_path: Path, case: Case) -> None:
    with pytest.raises(DataError, match=r"gone\.x"):
        list(reader_for(case.format, ReadOptions(**case.options)).read_range(tmp_path / "gone.x", 0, 10))


def test_damage_is_one_reject_after_the_documents_before_it(tmp_path: Path, case: Case) -> None:
    if case.format == "parquet":
        texts = [f"{number:04d} {number * 7919 % 10007} " * 40 for number in range(60)]
        path = write_damaged_parquet(tmp_path / "x.parquet", texts, damaged_group=2, rows_per_group=20)
        batches = list(reader_for("parquet", ReadOptions()).read_range(path, 0, None))
    else:
        texts = ["a", "b", "c"]
        case.write(tmp_path / "x", [text.encode() for text in texts])
        reader = delimited(case.format, **case.options)
        stream = Pieces((tmp_path / "x").read_bytes()[:-3], [9], damage="cut off")
        batches = list(reader.read_stream(reader.adapt(stream)))
    read = gather(batches)
    assert texts[: len(read.texts)] == read.texts
    assert 0 < len(read.texts) < len(texts) or (case.format == "text" and len(read.texts) <= 2)
    (reject,) = rejects_in(batches)
    assert reject.reason == "damaged"
    assert reject is batches[-1].rejects[-1]
    assert all(at < reject.position for at in read.positions)


def rejects_in(batches: Any) -> list[Reject]:
    return [reject for batch in batches for reject in batch.rejects]


@pytest.mark.parametrize("size", [1 << 19, 64, 7])
@pytest.mark.parametrize("pieces", [[1], [5, 9], []])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.format != "parquet"],
    ids=[name for name in CASES if name != "parquet"],
)
def test_a_stream_gives_what_the_file_gives_however_its_bytes_arrive(
    case: Case, path: Path, size: int, pieces: list[int]
) -> None:
    with blocks_of(size):
        assert read_bytes(path.read_bytes(), case.format, pieces, **case.options) == case.read(path)
        marked = read_bytes(MARK + path.read_bytes(), case.format, pieces, **case.options)
    assert marked.texts == TEXTS
    assert read_bytes(MARK, case.format, pieces, **case.options).texts == []


any_lines = st.lists(
    st.sampled_from([line("a"), line("\u00e9" * 5), line("b" * 30), b"", b" ", b"{}", b"bad", b'{"text": 1}\r', b"\r"])
    | st.text(max_size=5).map(line),
    max_size=20,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("ranges") / "x"


@settings(deadline=None)
@given(any_lines, cuts, block_sizes, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
def test_ranges_of_any_lines_cut_anywhere_give_every_document_once(
    scratch: Path, lines: list[bytes], cuts: list[int], size: int, end: bytes, mark: bool, last: bool
) -> None:
    data = (MARK if mark else b"") + end.join(lines) + (end if last else b"")
    for format in ("jsonl", "text"):
        with blocks_of(size):
            read = read_in_ranges(scratch, data, cuts, format)
        assert read == read_bytes(data, format)
