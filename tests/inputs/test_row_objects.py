"""Rows that a program holds as inputs: a DataFrame, an Arrow table, a list of records; and texts in place of paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.running import ThreadExecutor, ids_of, snapshot, sources_of, texts_of
from tokenmill.errors import UsageError

TEXTS = [text for text in make_texts(700, seed=3) if text]
NUMBERS = list(range(len(TEXTS)))
HELD: dict[str, Any] = {
    "frame": pd.DataFrame({"text": TEXTS, "n": NUMBERS}),
    "shuffled index": pd.DataFrame({"text": TEXTS, "n": NUMBERS}, index=NUMBERS[::-1]),
    "objects": pd.DataFrame({"text": pd.Series(TEXTS, dtype=object), "n": NUMBERS, "odd": [object()] * len(TEXTS)}),
    "table": pa.table({"text": TEXTS, "n": NUMBERS}),
    "batch": pa.table({"text": TEXTS, "n": NUMBERS}).to_batches()[0],
    "views": pa.table({"text": pa.array(TEXTS, pa.string_view()), "n": NUMBERS}),
    "records": [{"text": text, "n": number} for number, text in enumerate(TEXTS)],
}


def tokenize(inputs: Any, out: Path, **flags: Any) -> tm.TokenStore:
    settings = {"tokenizer": "bytes", "executor": ThreadExecutor(), "display": "quiet", **flags}
    store = tm.tokenize(inputs, out, **settings)
    assert isinstance(store, tm.TokenStore)
    return store


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tm.TokenStore:
    dataset = Dataset.from_dict({"text": TEXTS, "n": NUMBERS})
    return tokenize(dataset, tmp_path_factory.mktemp("expected") / "out", keep_keys=["n"])


@pytest.mark.parametrize("kind", HELD)
def test_rows_of_any_kind_give_the_tokens_of_the_same_dataset(
    kind: str, expected: tm.TokenStore, tmp_path: Path
) -> None:
    store = tokenize(HELD[kind], tmp_path / "out", keep_keys=["n"])
    assert ids_of(store) == ids_of(expected)
    assert sources_of(store)["key.n"].to_pylist() == sources_of(expected)["key.n"].to_pylist()
    again = tokenize(HELD[kind], tmp_path / "again", keep_keys=["n"])
    assert snapshot(store.path) == snapshot(again.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "out"]


def test_a_frame_of_polars_is_read(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    assert texts_of(tokenize(polars.DataFrame({"body": TEXTS}), tmp_path / "out")) == TEXTS


def test_the_only_column_of_strings_is_the_text(tmp_path: Path) -> None:
    frame = pd.DataFrame({"body": TEXTS, "n": NUMBERS})
    assert texts_of(tokenize(frame, tmp_path / "out")) == TEXTS


def test_conversations_of_a_frame_become_supervised_documents(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "response": f"answer {number}"} for number in range(20)]
    write_jsonl(tmp_path / "a.jsonl", [""] * 20, **{key: [row[key] for row in rows] for key in rows[0]})
    keys = {"prompt_key": "prompt", "response_key": "response"}
    of_file = tokenize(tmp_path / "a.jsonl", tmp_path / "file", **keys)
    for name, held in (("frame", pd.DataFrame(rows)), ("records", rows)):
        assert ids_of(tokenize(held, tmp_path / name, **keys)) == ids_of(of_file)


def test_a_record_without_a_text_is_a_reject(tmp_path: Path) -> None:
    for name, held in (
        ("frame", pd.DataFrame({"text": ["one", None, "three"]})),
        ("records", [{"text": "one"}, {"n": 2}, {"text": "three"}]),
    ):
        with pytest.raises(tm.DataError, match="the dataset row 2: "):
            tokenize(held, tmp_path / name)
        store = tokenize(held, tmp_path / name, on_error="skip")
        assert store.manifest.num_rejects == 1
        assert texts_of(store) == ["one", "three"]


REFUSED = {
    "'one text' is a text, and inputs are paths; to tokenize texts of this program, pass records": ["one text"],
    "'two.nlines' is a text": "two\nlines",
    "is a text, and inputs are paths": "word" * 400,
    "input 5 .int. is no path; expected paths, or a Dataset, a DataFrame": 5,
    "input 7 .int. is no path": ["a.jsonl", 7],
    "may be texts or paths; pass a DataFrame with a column of texts, or a list of paths": pd.Series(["a", "b"]),
    "input .* is no path; pass records as a list: .*, and columns as a DataFrame": {"text": ["a"]},
    "input {'text': 'a'} .dict. is no path; pass records as a list": iter([{"text": "a"}]),
    "the dataset has no rows": pd.DataFrame({"text": []}),
    "the dataset has no column 'text'; it has 'a', 'b': pass text_key": [{"a": "x", "b": "y"}],
    "column 'text' of the dataset has type int64, and texts are strings": pd.DataFrame({"text": [1, 2]}),
    "column 'text' of the DataFrame has values that do not go together": pd.DataFrame({"text": ["a", 5]}),
    "several columns named 'text'": pd.DataFrame([["a", "b"]], columns=["text", "text"]),
    "rows are an input by themselves": [pd.DataFrame({"text": ["a"]}), pd.DataFrame({"text": ["b"]})],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_neither_paths_nor_rows_is_refused_in_a_sentence(said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        tokenize(REFUSED[said], tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_paths_with_spaces_and_generators_of_paths_are_read(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"my corpus {number}.jsonl", TEXTS[:3]) for number in range(2)]
    assert tokenize((path for path in paths), tmp_path / "out").num_documents == 6
    assert tokenize(str(paths[0]), tmp_path / "one").num_documents == 3


def test_other_functions_say_that_they_read_files(expected: tm.TokenStore, tmp_path: Path) -> None:
    frame = HELD["frame"]
    with pytest.raises(UsageError, match="estimate reads files; rows of a program are counted with tokenmill.tokenize"):
        tm.estimate(frame, tokenizer="bytes")
    with pytest.raises(UsageError, match="stream reads files; make a store of rows with tokenmill.tokenize"):
        tm.load(HELD["records"], 8, 8, tokenizer="bytes", cache=tmp_path / "cache")
    with pytest.raises(UsageError, match="cannot be read again; leave against out"):
        tm.verify(expected, against=frame)


def test_a_surrogate_in_a_frame_or_a_record_is_named(tmp_path: Path) -> None:
    bad = json.loads('["ok", "b\\ud800"]')
    with pytest.raises(UsageError, match="lone surrogate .ud800 in row 2"):
        tokenize([{"text": text} for text in bad], tmp_path / "records")
    with pytest.raises(UsageError, match="column 'text' of the DataFrame"):
        tokenize(pd.DataFrame({"text": pd.Series(bad, dtype=object)}), tmp_path / "frame")
