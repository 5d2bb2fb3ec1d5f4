"""How programs end: one sentence and an exit code for errors that users cause, a traceback for all others."""

from __future__ import annotations

import errno

import pytest

import tokenmill as tm


def end_with(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """Return the sentence and the exit code."""
    with pytest.raises(SystemExit) as ended, tm.exit_on_error("buy some", extra="torch"):
        raise error
    return capsys.readouterr().err, int(str(ended.value.code))


def test_errors_that_users_cause_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["examples/train.py"])
    assert end_with(tm.UsageError("--a is missing"), capsys) == ("error: --a is missing\n", 2)
    assert end_with(tm.StoreError("damaged"), capsys) == ("error: damaged\n", 1)
    assert end_with(OSError(errno.EFBIG, "File too large", "x.pt"), capsys) == ("error: x.pt: File too large\n", 1)
    assert end_with(MemoryError(), capsys) == ("error: out of memory (MemoryError); buy some\n", 1)
    assert end_with(RuntimeError("CUDA out of memory\nmore"), capsys)[0] == (
        "error: out of memory (CUDA out of memory); buy some\n"
    )
    assert end_with(ImportError(name="torch"), capsys)[0] == (
        "error: train.py (torch) needs a package that is not installed: pip install 'tokenmill[torch]'\n"
    )
    assert end_with(KeyboardInterrupt(), capsys) == (
        "error: stopped; the same command resumes after the last checkpoint\n",
        130,
    )


def test_a_rank_names_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert end_with(tm.DataError("a.jsonl", "no text"), capsys) == ("error on rank 3: a.jsonl: no text\n", 1)


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), tm.exit_on_error():
        raise RuntimeError("shapes differ")
    with pytest.raises(ImportError), tm.exit_on_error():
        raise ImportError(name="torch")
    with tm.exit_on_error():
        pass
