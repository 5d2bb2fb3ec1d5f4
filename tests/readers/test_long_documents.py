"""Documents that do not fit memory: those above the limit are skipped without being held, others are an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.running import tokenmill
from tokenmill.readers.base import ExceedsMemory, ReadOptions
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.readers.text import TextReader

MEGABYTE = 1 << 20
SMALL = {"memory_bytes": 2 * MEGABYTE, "max_document_bytes": 8 * MEGABYTE}


def found(reader: JsonlReader | TextReader, path: Path) -> tuple[list[str], list[str]]:
    """The first letters of texts, and the reasons of rejects."""
    batches = list(reader.read_range(path, 0, None))
    texts = [text[:3] for batch in batches for text in batch.texts]
    return texts, [reject.reason for batch in batches for reject in batch.rejects]


def jsonl(path: Path, num_bytes: int) -> Path:
    path.write_bytes(b'{"text":"one"}\n{"text":"' + b"x" * num_bytes + b'"}\n{"text":"two"}\n')
    return path


def test_a_line_that_is_too_long_is_a_reject_on_every_machine(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", 20 * MEGABYTE)
    roomy = ReadOptions(max_document_bytes=8 * MEGABYTE)
    for options in (ReadOptions(**SMALL), roomy):
        assert found(JsonlReader(options), path) == (["one", "two"], ["too-long"])
        assert found(TextReader(options), path) == (['{"t', '{"t'], ["too-long"])


def test_a_line_that_fits_no_memory_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", 5 * MEGABYTE)
    assert found(JsonlReader(ReadOptions(max_document_bytes=8 * MEGABYTE)), path) == (["one", "xxx", "two"], [])
    for reader in (JsonlReader(ReadOptions(**SMALL)), TextReader(ReadOptions(**SMALL))):
        with pytest.raises(ExceedsMemory, match=r"the document at byte 15 has 5,242,\d+ bytes, more than the memory"):
            found(reader, path)
    with pytest.raises(ExceedsMemory, match="the document at byte 0 has"):
        found(TextReader(ReadOptions(**SMALL, whole_files=True)), path)


def test_a_run_says_what_to_do_about_such_a_document(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", 240 * MEGABYTE)
    run = ("tokenize", path, "-o", tmp_path / "out", "--tokenizer", "bytes", "--memory", "420MB", "--workers", 1)
    done = tokenmill(*run, check=False)
    assert done.returncode == 1
    assert "a.jsonl: the document at byte 15 has 251,658," in done.stderr
    assert "raise --memory, lower --workers, or lower --max-document-bytes" in done.stderr
