"""Inputs that change while a run reads them: an error that names the file; no document is lost silently."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_texts
from tests.support.running import (
    ThreadExecutor,
    compress,
    jsonl,
    snapshot,
    tokenize_here,
    write_parquet,
)
from tokenmill.display import Silence
from tokenmill.errors import DataError, StoreError
from tokenmill.executors.base import Answer, CallEvent
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.pipeline.workers.messages import Finished, decode_answer
from tokenmill.readers import ReadOptions, reader_for

TEXTS = [f"{number} {text}" for number, text in enumerate(make_texts(400, seed=5))]


class Disturbing(ThreadExecutor):
    """Changes an input when the first task is done."""

    def __init__(self, disturb: Callable[[], Any]) -> None:
        super().__init__()
        self._disturb: Callable[[], Any] | None = disturb

    def wait(self, timeout: float) -> list[CallEvent]:
        events = super().wait(timeout)
        if self._disturb is not None and any(map(_is_done, events)):
            self._disturb()
            self._disturb = None
        return events


def _is_done(event: CallEvent) -> bool:
    message = decode_answer(event.data) if isinstance(event, Answer) else None
    return isinstance(message, Finished) and bool(message.records)


def write(path: Path) -> Path:
    """The same documents in the format that the name stands for."""
    if path.suffix == ".parquet":
        return write_parquet(path, TEXTS, rows_per_group=20)
    data = "\n".join(TEXTS).encode() if ".txt" in path.name else jsonl(TEXTS)
    if path.suffix == ".json":
        data = b"[" + b",".join(data.splitlines()) + b"]"
    path.write_bytes(compress(data, path.suffix[1:] if path.suffix in (".gz", ".zst") else "none"))
    return path


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "more"}\n')


def swap(path: Path) -> None:
    """Replace a file by one with other bytes and the same size."""
    data = path.read_bytes()
    new = path.with_name("new")
    new.write_bytes(data[:-9] + bytes(9))
    new.replace(path)


def disturbed(path: Path, out: Path, disturb: Callable[[], Any], **flags: Any) -> None:
    flags = {"task_bytes": 4000, "tokenizer": "bytes", "workers": 1, "on_error": "skip", **flags}
    request = Request.from_flags({"inputs": [str(path)], "out": str(out), **flags})
    run(request, Silence(), Disturbing(disturb))  # type: ignore[arg-type]


NAMES = ["a.jsonl", "a.txt", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("change", [shrink, grow, swap, Path.unlink])
@pytest.mark.parametrize("name", NAMES)
def test_an_input_that_changes_during_a_run_is_an_error_that_names_it(
    name: str, change: Callable[[Path], None], on_error: str, tmp_path: Path
) -> None:
    path, out = write(tmp_path / name), tmp_path / "out"
    reason = "can no longer be read" if change is Path.unlink else "changed while it was read"
    with pytest.raises(DataError, match=reason) as caught:
        disturbed(path, out, lambda: change(path), on_error=on_error)
    assert caught.value.path == str(path)
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("name", NAMES)
def test_a_change_right_before_the_manifest_is_found(name: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / name), tmp_path / "out"
    with pytest.raises(DataError, match="changed while it was read"):
        disturbed(path, out, lambda: shrink(path), task_bytes="100MB")
    with pytest.raises(StoreError, match=r"had .* bytes when .* was begun and has .* now"):
        tokenize_here(path, out, tokenizer="bytes", task_bytes="100MB")


def test_a_touched_input_is_accepted_and_a_restored_one_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    data = path.read_bytes()
    disturbed(path, tmp_path / "expected", lambda: None)
    disturbed(path, tmp_path / "touched", lambda: os.utime(path, (1, 1)))
    with pytest.raises(DataError):
        disturbed(path, tmp_path / "restored", lambda: shrink(path))
    path.write_bytes(data)
    disturbed(path, tmp_path / "restored", lambda: None)
    expected = snapshot(tmp_path / "expected")
    assert snapshot(tmp_path / "touched") == expected
    assert snapshot(tmp_path / "restored") == expected


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_range_that_ends_before_its_plan_is_an_error(format: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    size = path.stat().st_size
    reader = reader_for(format, ReadOptions())
    shrink(path)
    for start in (0, size // 4, size // 2, size - 10):
        with pytest.raises(DataError, match=rf"changed while it was read: {size // 2:,} bytes, and {size:,}"):
            list(reader.read_range(path, start, size))


def test_a_file_that_shrinks_between_two_blocks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x" * 1000] * 4000))
    size = path.stat().st_size
    batches = reader_for("jsonl", ReadOptions()).read_range(path, 0, size)
    next(batches)
    shrink(path)
    with pytest.raises(DataError, match="changed while it was read"):
        list(batches)
