"""Bad and odd input: every defect is an error that names it, or a reject with its place; none is ignored, none crashes.

The defects are made here, so that every machine tests them. If `../shared/data/nasty` exists, its files are read as
well, and compared with their README.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.support.running import (
    compress,
    jsonl,
    rejects_of,
    sentence,
    sources_of,
    texts_of,
    tokenize_here,
    tokenmill,
    zstd,
)

pytestmark = pytest.mark.timeout(120)


class Defect(NamedTuple):
    """A file's bytes, the texts that a careful reader gets out of it, and the lines it cannot."""

    data: bytes
    texts: list[str]
    rejects: dict[int | None, str] = {}


def _lines(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _good(text: str) -> bytes:
    return jsonl([text])[:-1]


ONE, TWO, THREE = (_good(text) for text in ("one", "two", "three"))
SOUND = {
    "blank_lines.jsonl": Defect(b"\n \t\n" + _lines(ONE, b"", b"\r", TWO) + b"   ", ["one", "two"]),
    "bom.jsonl": Defect(b"\xef\xbb\xbf" + _lines(ONE, TWO), ["one", "two"]),
    "crlf.jsonl": Defect(b"\r\n".join([ONE, TWO, b""]), ["one", "two"]),
    "crlf.txt": Defect(b"one\r\n\r\ntwo\r\nthree", ["one", "two", "three"]),
    "duplicate_keys.jsonl": Defect(_lines(b'{"text": "first", "text": "two"}'), ["two"]),
    "empty.jsonl": Defect(b"", []),
    "empty.jsonl.gz": Defect(gzip.compress(b""), []),
    "empty.jsonl.zst": Defect(zstd(b""), []),
    "empty.json": Defect(b"[]", []),
    "zero_bytes.jsonl.zst": Defect(b"", []),
    "only_newlines.jsonl": Defect(b"\n" * 1000, []),
    "empty_strings.jsonl": Defect(jsonl(["", "one", "", ""]), ["", "one", "", ""]),
    "escapes.jsonl": Defect(_lines(rb'{"text": "\u0000\ud83d\ude00\/"}'), ["\0😀/"]),
    "extra_fields.jsonl": Defect(
        _lines(b'{"a": [1e400, {"text": "no"}], "text": "one", "b": 123456789012345678901}'), ["one"]
    ),
    "no_final_newline.jsonl": Defect(_lines(ONE) + TWO, ["one", "two"]),
    "not_gzip.jsonl.gz": Defect(_lines(ONE, TWO), ["one", "two"]),
    "really_gzip.jsonl": Defect(gzip.compress(_lines(ONE)), ["one"]),
    "nul_bytes.txt": Defect(b"one\0\ntwo\n", ["one\0", "two"]),
    "two_frames.jsonl.zst": Defect(zstd(_lines(ONE)) + zstd(ONE[:9]) + zstd(ONE[9:] + b"\n"), ["one", "one"]),
    "two_members.jsonl.gz": Defect(gzip.compress(ONE[:4]) + gzip.compress(ONE[4:]) + b"\0" * 99, ["one"]),
}
BAD = {
    "malformed.jsonl": Defect(
        _lines(ONE, b"{", TWO, b'{"text": "x"', b'{"text": "x"}}', b"{'text': 1}", THREE, b'{"text": "a"} {"text": "b"}'),
        ["one", "two", "three"],
        dict.fromkeys([2, 4, 5, 6, 8], "malformed-json"),
    ),
    "open_string.jsonl": Defect(
        _lines(b'{"text": "one', b'two"}', ONE), ["one"], dict.fromkeys([1, 2], "malformed-json")
    ),
    "invalid_utf8.jsonl": Defect(
        _lines(ONE, b'{"text": "\xff"}', TWO, b'{"text": "\xe2\x82"}', b'{"text": "\xc0\xaf"}', b'{"text": "\xed\xa0\x80"}'),
        ["one", "two"],
        dict.fromkeys([2, 4, 5, 6], "invalid-utf8"),
    ),
    "invalid_utf8.txt": Defect(b"one\n\xff\xfe\ntwo\n", ["one", "two"], {2: "invalid-utf8"}),
    "lone_surrogates.jsonl": Defect(
        _lines(ONE, rb'{"text": "\ud83d"}', rb'{"text": "x\ude00y"}', rb'{"text": "\ud83d\ude00"}'),
        ["one", "😀"],
        dict.fromkeys([2, 3], "lone-surrogate"),
    ),
    "missing_field.jsonl": Defect(_lines(ONE, b'{"body": "x"}', b"{}"), ["one"], dict.fromkeys([2, 3], "missing-field")),
    "non_string_text.jsonl": Defect(
        _lines(*(b'{"text": %s}' % v for v in (b"1", b"1.5", b"true", b"[]", b"{}")), ONE),
        ["one"],
        dict.fromkeys(range(1, 6), "not-a-string"),
    ),
    "not_an_object.jsonl": Defect(
        _lines(b'"one"', b"[1]", b"3", b"null", ONE), ["one"], dict.fromkeys(range(1, 5), "not-an-object")
    ),
    "nul_bytes.jsonl": Defect(_lines(ONE, b'{"text": "a\0b"}'), ["one"], {2: "malformed-json"}),
    "null_text.jsonl": Defect(_lines(b'{"text": null}', ONE, b'{"text": null}'), ["one"], dict.fromkeys([1, 3], "null-text")),
    "nested.jsonl": Defect(_lines(b'{"text": ' + b"[" * 50_000, ONE), ["one"], {1: "malformed-json"}),
    "truncated.jsonl.gz": Defect(gzip.compress(jsonl(["one", "two", "x" * 50]))[:-20], [], {1: "damaged"}),
    "truncated.jsonl.zst": Defect(
        zstd(jsonl(["one"])) + zstd(jsonl(["two", "three"]))[:-6], ["one"], {2: "damaged"}
    ),
    "bad_checksum.jsonl.gz": Defect(gzip.compress(jsonl(["one", "two"]))[:-5] + b"12345", [], {1: "damaged"}),
    "garbage_after.jsonl.gz": Defect(gzip.compress(jsonl(["one"])) + b"garbage", ["one"], {2: "damaged"}),
    "damaged_at_start.jsonl.gz": Defect(gzip.compress(jsonl(["one"] * 9))[:10] + b"\xff" * 300, [], {1: "damaged"}),
    "cut_off.json": Defect(b'[{"text": "one"}, {"text": "two"}, {"tex', ["one", "two"], {3: "damaged"}),
    "no_comma.json": Defect(b'[{"text": "one"} {"text": "two"}]', ["one"], {2: "damaged"}),
}  # fmt: skip


def _parquet(column: pa.Array | None, name: str = "text") -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: column} if column is not None else {"n": [1]}), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


BAD |= {
    "nulls.parquet": Defect(
        _parquet(pa.array(["one", None, "two", None])), ["one", "two"], dict.fromkeys([2, 4], "null-text")
    ),
    "int_column.parquet": Defect(_parquet(pa.array([1, 2])), [], {None: "no-text-column"}),
    "wrong_column.parquet": Defect(_parquet(pa.array(["x", "y"]), "body"), [], {None: "no-text-column"}),
    "binary_column.parquet": Defect(
        _parquet(pa.array([b"one", b"\xff", "\u00e9".encode(), None])),
        ["one", "\u00e9"],
        {2: "invalid-utf8", 4: "null-text"},
    ),
    "truncated.parquet": Defect(_parquet(pa.array(["one"] * 9))[:60], [], {None: "damaged"}),
}
SOUND |= {
    "no_rows.parquet": Defect(_parquet(pa.array([], pa.string())), []),
    "large_string.parquet": Defect(_parquet(pa.array(["one", "two"], pa.large_string())), ["one", "two"]),
    "dictionary.parquet": Defect(_parquet(pa.array(["one", "two", "one"]).dictionary_encode()), ["one", "two", "one"]),
}
DEFECTS = SOUND | BAD


def _check_skipped(
    store: tm.TokenStore, names: list[str], texts: dict[str, list[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Compare the texts of every input; return the rejects of each."""
    manifest = store.manifest
    assert manifest.num_documents_in == manifest.num_documents + manifest.num_rejects
    found: dict[str, list[str]] = {name: [] for name in names}
    for input, text in zip(sources_of(store)["input"].to_pylist(), texts_of(store), strict=True):
        found[names[input]].append(text)
    assert found == {name: texts[name] for name in names}
    rejects: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for row in rejects_of(store.path):
        rejects[row["file"]].append(row)
    assert [name for name in names for _ in rejects[name]] == [row["file"] for row in rejects_of(store.path)]
    assert sum(row.get("documents", 1) for row in rejects_of(store.path)) == manifest.num_rejects
    return rejects


def _place(row: dict[str, Any]) -> int | None:
    return next(row[unit] for unit in ("row", "element", "line") if unit in row)  # type: ignore[no-any-return]


def _unit(name: str) -> str:
    return {".parquet": "row", ".json": "element"}.get(Path(name).suffix, "line")


@pytest.mark.parametrize("task_bytes", [1 << 22, 25, 7], ids=lambda size: f"{size}-bytes-per-task")
def test_skip_keeps_good_records_and_reports_the_place_of_the_others(
    task_bytes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = sorted(
        DEFECTS if task_bytes > 7 else ["malformed.jsonl", "truncated.jsonl.gz", "invalid_utf8.txt", "cut_off.json"]
    )
    for name in names:
        (tmp_path / name).write_bytes(DEFECTS[name].data)
    store = tm.tokenize(
        [str(tmp_path / name) for name in names],
        tmp_path / "out",
        tokenizer="bytes",
        on_error="skip",
        task_bytes=task_bytes,
        workers=2,
    )
    rejects = _check_skipped(store, names, {name: DEFECTS[name].texts for name in names})
    for name in names:
        assert {_place(row): row["reason"] for row in rejects[name]} == DEFECTS[name].rejects, name
        for row in rejects[name]:
            assert row["detail"]
            if name.endswith(".jsonl") and name != "really_gzip.jsonl":
                start = row["byte"]
                assert DEFECTS[name].data[:start].count(b"\n") + 1 == row["line"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_lines_are_skipped_by_the_same_numbers(kind: str, tmp_path: Path) -> None:
    names = [name for name in BAD if name.endswith(".jsonl") and name != "nested.jsonl"]
    for name in names:
        (tmp_path / name).write_bytes(compress(BAD[name].data, kind))
    store = tokenize_here(
        [str(tmp_path / name) for name in names],
        tmp_path / "out",
        tokenizer="bytes",
        on_error="skip",
        task_bytes=40,
        workers=2,
    )
    rejects = _check_skipped(store, names, {name: BAD[name].texts for name in names})
    for name in names:
        assert {row["line"]: row["reason"] for row in rejects[name]} == BAD[name].rejects, name


def test_sound_but_odd_inputs_need_no_skipping(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, defect in SOUND.items():
        (tmp_path / name).write_bytes(defect.data)
    store = tokenize_here([str(tmp_path / name) for name in SOUND], tmp_path / "out", tokenizer="bytes", workers=1)
    _check_skipped(store, list(SOUND), {name: defect.texts for name, defect in SOUND.items()})
    assert capfd.readouterr().err == ""


DAMAGED_FRAMES = [name for name in BAD if "damaged" in BAD[name].rejects.values() and name.endswith((".gz", ".zst"))]
"""The message names the bytes of the damaged frame."""


@pytest.mark.parametrize("name", list(BAD))
def test_fail_names_the_file_and_the_first_bad_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(BAD[name].data)
    with pytest.raises(tm.DataError) as caught:
        tokenize_here(tmp_path / name, tmp_path / "out", tokenizer="bytes", workers=1)
    message = str(caught.value)
    first = None if name in DAMAGED_FRAMES else next(iter(BAD[name].rejects))
    where = tmp_path / name
    assert message.startswith(f"{where}: " if first is None else f"{where} {_unit(name)} {first}: ")
    assert "\n" not in message
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_fail_counts_lines_through_all_tasks_of_a_file(tmp_path: Path) -> None:
    data = jsonl(f"text {number}" for number in range(200)) + b"broken\n" + jsonl(["x"] * 5)
    for kind in ("none", "gz", "zst"):
        path = tmp_path / f"{kind}.jsonl"
        path.write_bytes(compress(data, kind))
        with pytest.raises(tm.DataError, match=rf"{kind}\.jsonl line 201: not JSON"):
            tokenize_here(path, tmp_path / f"out-{kind}", tokenizer="bytes", task_bytes=500, workers=2)


def test_max_errors_stops_a_run_that_skips_too_much(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(ONE, *[b"broken"] * 5))
    flags = ["tokenize", path, "-o", tmp_path / "out", "--tokenizer", "bytes", "--on-error", "skip"]
    done = tokenmill(*flags, "--max-errors", "4")
    assert done.returncode == 1
    assert "more than --max-errors 4" in sentence(done)
    done = tokenmill(*flags, "--max-errors", "5")
    assert done.returncode == 0
    assert "6 in = 1 out + 5 rejects" in done.stdout


def test_a_corrupt_parquet_page_costs_rows_of_its_row_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {number} " + "x" * 3000 for number in range(100)]
    pq.write_table(
        pa.table({"text": texts}),
        path,
        row_group_size=25,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    data = bytearray(path.read_bytes())
    at = data.index(b"row 60 ")
    data[at : at + 6] = b"ROW 60"
    path.write_bytes(data)
    with pytest.raises(tm.DataError, match=r"a\.parquet row \d+: damaged Parquet data"):
        tokenize_here(path, tmp_path / "fail", tokenizer="bytes", workers=1)
    store = tokenize_here(path, tmp_path / "out", tokenizer="bytes", on_error="skip", workers=1)
    kept = texts_of(store)
    assert kept[:50] == texts[:50]
    assert kept[-25:] == texts[75:]
    assert store.manifest.num_documents_in == 100
    assert store.manifest.rejects == {"damaged": 100 - len(kept)}


UNSUPPORTED: dict[str, bytes] = {
    "a.jsonl.bz2": b"BZh91AY&SY" + b"\0" * 20,
    "a.jsonl.xz": b"\xfd7zXZ\x00" + b"\0" * 20,
    "a.zip": b"PK\x03\x04" + b"\0" * 20,
    "a.dat": b"\x00\x01\x02 binary",
}


@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_an_unknown_format_is_refused_by_name(mode: str, tmp_path: Path) -> None:
    (tmp_path / "ok.jsonl").write_bytes(_lines(ONE))
    for name, data in UNSUPPORTED.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(tm.DataError, match=name):
            tokenize_here(
                [str(tmp_path / "ok.jsonl"), str(tmp_path / name)], tmp_path / "out", tokenizer="bytes", on_error=mode
            )
    assert not (tmp_path / "out").exists()


# The files of ../shared/data/nasty, as its README describes them.

LINES: dict[str, tuple[str, list[int | None]]] = {
    "bad_checksum.jsonl.zst": ("damaged", [1]),
    "int_column.parquet": ("no-text-column", [None]),
    "invalid_utf8.jsonl": ("invalid-utf8", [3, 6, 8]),
    "invalid_utf8.txt": ("invalid-utf8", [2]),
    "lone_surrogates.jsonl": ("lone-surrogate", [2, 3]),
    "malformed.jsonl": ("malformed-json", [4, 10, 15, 18]),
    "missing_field.jsonl": ("missing-field", [6, 12]),
    "non_string_text.jsonl": ("not-a-string", [11, 12, 13, 14, 15]),
    "not_an_object.jsonl": ("not-an-object", [2, 3, 4, 5]),
    "nul_bytes.jsonl": ("malformed-json", [3]),
    "null_text.jsonl": ("null-text", [1, 20]),
    "nulls.parquet": ("null-text", [*range(4, 100, 10)]),
    "truncated.jsonl.gz": ("damaged", [1]),
    "truncated.jsonl.zst": ("damaged", [1]),
    "truncated.parquet": ("damaged", [None]),
    "wrong_column.parquet": ("no-text-column", [None]),
}
UNCONFIRMED = {"bad_checksum.jsonl.zst": 0, "truncated.jsonl.gz": 0, "truncated.jsonl.zst": 0}
"""Some documents of these can be read, but their only frame is damaged."""
OTHER_COUNTS = {"not_gzip.jsonl.gz": 5, "binary_column.parquet": 20} | UNCONFIRMED
"""The content of a file decides, not its name; bytes that are UTF-8 are text."""
LARGE = ("many_tiny.jsonl.zst", "one_huge_line.jsonl.zst", "one_huge_word.jsonl.zst")


@pytest.fixture(scope="module")
def nasty(shared_data: Path) -> Path:
    return shared_data / "nasty"


@pytest.fixture(scope="module")
def good_documents(nasty: Path) -> dict[str, int]:
    """How many documents the README promises of each file."""
    rows = [line.split("|") for line in (nasty / "README.md").read_text().splitlines() if line.startswith("| ")]
    counts = {row[1].strip(): int(row[3].replace(",", "")) for row in rows if row[3].strip().replace(",", "").isdigit()}
    del counts["chat_bad.jsonl"]
    assert len(counts) > 35
    return counts | OTHER_COUNTS


@pytest.mark.parametrize("task_bytes", [1 << 22, 300])
def test_skip_gives_the_documents_that_the_readme_counts(
    task_bytes: int, nasty: Path, good_documents: dict[str, int], tmp_path: Path
) -> None:
    left_out = ("wrong_column.parquet", "int_column.parquet", *(LARGE if task_bytes == 300 else ()))
    names = [name for name in sorted(good_documents) if name not in left_out]
    store = tm.tokenize(
        [str(nasty / name) for name in names],
        tmp_path / "out",
        tokenizer="bytes",
        on_error="skip",
        task_bytes=task_bytes,
        workers=2,
    )
    counts = dict.fromkeys(names, 0)
    for input in sources_of(store)["input"].to_pylist():
        counts[names[input]] += 1
    assert counts == {name: good_documents[name] for name in names}
    places: dict[str, list[tuple[str, int | None]]] = {}
    for row in rejects_of(store.path):
        places.setdefault(row["file"], []).append((row["reason"], _place(row)))
    expected = {name: LINES[name] for name in LINES if name in names}
    assert places == {name: [(reason, line) for line in lines] for name, (reason, lines) in expected.items()}
    for name in ("wrong_column.parquet", "int_column.parquet"):
        with pytest.raises(tm.DataError, match=f"{name}: no record that was read has the text"):
            tokenize_here(nasty / name, tmp_path / name, tokenizer="bytes", on_error="skip", task_bytes=task_bytes)


def test_sound_files_of_the_readme_need_no_skipping(
    nasty: Path, good_documents: dict[str, int], tmp_path: Path
) -> None:
    names = [name for name in sorted(good_documents) if name not in LINES]
    store = tm.tokenize([str(nasty / name) for name in names], tmp_path / "out", tokenizer="bytes", workers=2)
    assert store.manifest.num_documents == sum(good_documents[name] for name in names)
    texts: dict[str, list[str]] = {name: [] for name in names}
    for input, text in zip(sources_of(store)["input"].to_pylist(), texts_of(store), strict=True):
        texts[names[input]].append(text)
    assert texts["crlf.jsonl"] == texts["no_final_newline.jsonl"][:10]


@pytest.mark.parametrize("name", list(LINES))
def test_fail_names_what_is_wrong_with_a_file_of_the_readme(name: str, nasty: Path, tmp_path: Path) -> None:
    with pytest.raises(tm.DataError) as caught:
        tokenize_here(nasty / name, tmp_path / "out", tokenizer="bytes", workers=1)
    line = LINES[name][1][0] if name not in UNCONFIRMED else None
    place = "" if line is None else f" {_unit(name)} {line}"
    assert str(caught.value).startswith(f"{nasty / name}{place}: ")


def test_another_text_key_reads_the_file_with_another_column(nasty: Path, tmp_path: Path) -> None:
    store = tokenize_here(
        nasty / "wrong_column.parquet", tmp_path / "out", tokenizer="bytes", text_key="body", workers=1
    )
    assert store.num_documents == 50


def _without_text(count: int) -> bytes:
    return _lines(*(b'{"content": "text %d", "url": "x"}' % number for number in range(count)))


FIELDS = "no field 'text'; the record has 'content', 'url'. Pass --text-key content"


@pytest.mark.parametrize("kind", ["none", "zst"])
@pytest.mark.parametrize("task_bytes", [1 << 22, 6_000])
def test_a_field_that_no_record_of_a_file_has_stops_a_run_that_skips(
    kind: str, task_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "good.jsonl").write_bytes(_lines(ONE, TWO))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_bytes(compress(_without_text(1000) + b"broken\n", kind))
    for _ in range(2):
        with pytest.raises(tm.DataError) as caught:
            tokenize_here(
                [str(tmp_path / "good.jsonl"), str(wrong)], tmp_path / "out", tokenizer="bytes", on_error="skip",
                task_bytes=task_bytes, workers=1,
            )  # fmt: skip
        assert str(caught.value) == f"{wrong}: no record that was read has the text: {FIELDS}"
        assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_parquet_file_without_the_column_stops_a_run_that_skips(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(_lines(ONE, TWO))
    (tmp_path / "wrong.parquet").write_bytes(_parquet(pa.array(["x"] * 10), "body"))
    with pytest.raises(tm.DataError, match=r"wrong\.parquet: no record .* no column 'text'.* Pass --text-key body"):
        tokenize_here(
            sorted(map(str, tmp_path.iterdir())), tmp_path / "out", tokenizer="bytes", on_error="skip", workers=1
        )


def test_records_without_the_field_are_rejects_where_others_have_it_or_they_are_few(tmp_path: Path) -> None:
    contents = {
        "few.jsonl": _without_text(9),
        "good.jsonl": _lines(ONE),
        "late.jsonl": _without_text(2000) + _lines(ONE),
        "null.jsonl": _without_text(2000) + _lines(b'{"text": null}'),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in contents]
    store = tokenize_here(paths, tmp_path / "out", tokenizer="bytes", on_error="skip", workers=1)
    assert store.manifest.rejects == {"missing-field": 4009, "null-text": 1}
    assert store.manifest.num_documents == 2


def test_the_first_ten_thousand_records_show_that_a_field_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "late.jsonl").write_bytes(_without_text(40_000) + _lines(ONE))
    with pytest.raises(tm.DataError, match="no record that was read has the text"):
        tokenize_here(tmp_path / "late.jsonl", tmp_path / "out", tokenizer="bytes", on_error="skip", workers=1)


def test_a_run_that_rejects_every_document_publishes_no_store(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(_lines(b"broken", b'{"text": null}') + _without_text(3))
    flags = ["tokenize", path, "-o", out, "--tokenizer", "bytes", "--on-error", "skip"]
    runs = [tokenmill(*flags), tokenmill(*flags), tokenmill("finish", out)]
    for done in runs:
        assert done.returncode == 1
        said = sentence(done)
        assert "all 5 documents were rejected, 3 of them as missing-field, so there is no store" in said
        assert FIELDS in said
        assert not (out / "manifest.json").exists()
    done = tokenmill(*flags, "--text-key", "content", "--overwrite")
    assert done.returncode == 0
    assert "5 in = 3 out + 2 rejects" in done.stdout


def test_a_file_without_the_field_is_an_error_where_each_part_has_few_records(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(_lines(ONE))
    bad.write_bytes(b'{"content": "%s", "url": "u"}\n' % (b"x" * 20_000) * 60)
    flags: dict[str, Any] = {"tokenizer": "bytes", "on_error": "skip", "workers": 1, "task_bytes": 100_000}
    with pytest.raises(tm.DataError, match=r"bad\.jsonl: no record that was read has the text: no field 'text'"):
        tokenize_here([str(good), str(bad)], tmp_path / "out", **flags)
    assert not (tmp_path / "out" / "manifest.json").exists()
    bad.write_bytes(bad.read_bytes() + _lines(ONE))
    store = tokenize_here([str(good), str(bad)], tmp_path / "out", overwrite=True, **flags)
    assert store.manifest.rejects == {"missing-field": 60}


def test_the_last_rank_says_that_every_document_was_rejected(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(_without_text(5))
    flags: dict[str, Any] = {"tokenizer": "bytes", "on_error": "skip", "workers": 1, "world_size": 2, "task_bytes": 200}
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert tm.tokenize(inputs, tmp_path / "out", rank=0, **flags) is None
    with pytest.raises(tm.TokenmillError, match="all 10 documents were rejected, 10 of them as missing-field"):
        tm.tokenize(inputs, tmp_path / "out", rank=1, **flags)
    assert not (tmp_path / "out" / "manifest.json").exists()
