"""A look into files: which column holds the text, and a lower bound on the number of documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.inputs import Input, text_key_of
from tokenmill.inputs._peek import count_documents, only_text_column, text_column_of_card, text_column_of_file


def test_the_text_is_in_text_or_in_the_only_column_of_strings() -> None:
    assert only_text_column({"id": "string", "text": "string"}) == "text"
    assert only_text_column({"id": "int64", "content": "large_string"}) == "content"
    assert only_text_column({"id": "string", "content": "string"}) is None
    features = [{"name": "n", "dtype": "int64"}, {"name": "story", "dtype": "string"}]
    assert text_column_of_card({"dataset_info": {"features": features}}, None) == "story"
    several = [{"config_name": "a", "features": features}, {"config_name": "b", "features": features[:1]}]
    assert text_column_of_card({"dataset_info": several}, "a") == "story"
    assert text_column_of_card({"dataset_info": several}, "b") is None
    assert text_column_of_card({"dataset_info": several}, None) is None
    assert text_column_of_card({"dataset_info": ["odd", 7]}, None) is None
    assert text_column_of_card({}, None) is None


def test_the_first_records_show_the_only_field_of_strings(tmp_path: Path) -> None:
    files = {
        '{"content": "a", "n": 1}\n{"content": "b"}\n': "content",
        '{"content": "a", "title": null}\n{"content": "b", "title": "c"}\n': None,
        '{"content": "a", "text": null}\n': "text",
        '{"content": "a"}\nbroken': "content",
        "[1]": None,
        "": None,
    }
    for content, key in files.items():
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        assert text_column_of_file(str(path)) == key


def test_inputs_with_their_text_in_different_fields_need_a_text_key() -> None:
    inputs = [Input("a", text_key="content"), Input("b")]
    assert text_key_of(inputs, "body") == "body"
    assert text_key_of(inputs[:1], None) == "content"
    assert text_key_of(inputs[1:], None) == "text"
    with pytest.raises(UsageError, match="different fields, content, text; pass --text-key"):
        text_key_of(inputs, None)


def test_documents_are_never_counted_too_many(tmp_path: Path) -> None:
    contents = {
        "a.jsonl": (b'{"text": "a"}\n{"text": "b"}\nbroken\n', 2),
        "a.json": (b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}', 2),
        "array.json": (b'[\n{"text": "a"},\n{"text": "b"}\n]', 1),
        "one.json": (b'{"data": [\n{"text": "a"},\n{"text": "b"}\n]}', 1),
        "empty.json": (b"[]", 0),
        "a.txt": (b"a\nb\n", 1),
        "blank.txt": (b" \n\n", 0),
        "bad.parquet": (b"PAR1", 0),
    }
    for name, (content, count) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert count_documents(str(tmp_path / name), 100) == count, name
