"""Checkpoints: complete or absent, of this run or refused, and read without a framework."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import pytest

import tokenmill as tm


class Part:
    """A part of a run whose state is one number; it refuses a negative one."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] < 0:
            raise tm.UsageError("value is negative; pass another")
        self.value = state["value"]


def write(content: dict[str, Any], file: IO[bytes]) -> None:
    pickle.dump(content, file)


def read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def save(folder: Path, steps: list[int], **settings: Any) -> tm.Checkpoints:
    part = Part()
    checkpoints = tm.Checkpoints(folder, {"model": part}, {"width": 4}, **settings)
    for step in steps:
        part.value = 10 * step
        checkpoints.save(step, write, more=f"step {step}")
    return checkpoints


def test_a_run_without_checkpoints_starts_at_the_beginning(tmp_path: Path) -> None:
    assert tm.Checkpoints(tmp_path / "none", {"model": Part()}).resume(read) is None


def test_the_newest_are_kept_in_the_order_of_steps(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1, 99_999_999, 100_000_000], keep=2)
    assert [path.name for path in checkpoints.paths()] == ["step-99999999.pt", "step-100000000.pt"]
    part = Part()
    saved = tm.Checkpoints(tmp_path, {"model": part}, {"width": 4}).resume(read)
    assert saved is not None and (saved["step"], saved["more"]) == (100_000_000, "step 100000000")
    assert saved["path"] == tmp_path / "step-100000000.pt" and part.value == 1_000_000_000


def test_an_unfinished_file_is_ignored_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-00000009.pt.tmp").write_bytes(b"half")
    (tmp_path / "step-notes.pt").write_bytes(b"not a checkpoint")
    save(tmp_path, [1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.pt", "step-notes.pt"]


def test_a_failed_write_leaves_the_one_before_and_names_the_file(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1])

    def fail(content: dict[str, Any], file: IO[bytes]) -> None:
        file.write(b"half")
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904

    with pytest.raises(OSError, match="No space left on device") as error:
        checkpoints.save(2, fail)
    assert error.value.filename == str(tmp_path / "step-00000002.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_a_damaged_file_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = save(tmp_path, [1, 2])
    (tmp_path / "step-00000002.pt").write_bytes(b"damaged")
    saved = checkpoints.resume(read)
    assert saved is not None and saved["step"] == 1
    assert capsys.readouterr().err.startswith(f"tokenmill: {tmp_path / 'step-00000002.pt'} cannot be read: ")
    (tmp_path / "step-00000001.pt").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(tm.UsageError, match="no checkpoint in .* can be read; delete them, or use another folder"):
        checkpoints.resume(read)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [1])
    with pytest.raises(tm.UsageError, match="is of another run: width is 4 there and 8 here; use the settings"):
        tm.Checkpoints(tmp_path, {"model": Part()}, {"width": 8}).resume(read)
    tm.Checkpoints(tmp_path, {"data": Part(-1)}).save(2, write)
    with pytest.raises(tm.UsageError, match="has other data: value is negative; use the settings"):
        tm.Checkpoints(tmp_path, {"data": Part()}).resume(read)
