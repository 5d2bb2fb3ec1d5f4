"""Delete and cut short every file of a finished store and of an unfinished run.

    python tests/faults/missing_files.py

`verify` finds all of it in a finished store, except that run.json may be deleted; opening and loading give what was
there or a sentence. The command that made the store gives equal bytes again, or a sentence.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim
from tests.faults._tally import Tally

FLAGS: dict[str, Any] = {
    "tokenizer": "bytes", "task_bytes": 2000, "workers": 1, "memory": "1GB", "on_error": "skip", "val_fraction": 0.2,
}  # fmt: skip
Case = tuple[Path, str, int, list[str], dict[str, bytes]]


def lengths_of(size: int) -> list[int]:
    """Lengths to cut a file to; -1 deletes it."""
    return [-1, *sorted({0, 1, 4, 33, size // 4, size // 2, size // 2 + 1, size - 8, size - 1} & set(range(size)))]


def all_cases(folder: Path) -> Iterator[Case]:
    """Each file of each directory, at each length."""
    inputs = _shim.make_corpus(folder / "corpus")
    command = _shim.command(inputs, folder / "finished", "--task-bytes", "2000")
    assert _shim.run(command).code == 0
    expected = _shim.snapshot(folder / "finished")
    unfinished = _shim.command(inputs, folder / "unfinished", "--task-bytes", "2000")
    assert _shim.run_disturbed(unfinished, folder / "unfinished", at=200, do="kill-group").code
    for store in (folder / "finished", folder / "unfinished"):
        for path in sorted(store.rglob("*")):
            if path.is_file() and not path.name.endswith((".tmp", "lock")):
                for length in lengths_of(path.stat().st_size):
                    yield store, str(path.relative_to(store)), length, inputs, expected


def check(case: Case) -> tuple[str, str]:
    store, name, length, inputs, expected = case
    what = f"{store.name}: {name} {'deleted' if length < 0 else f'cut to {length} bytes'}"
    with tempfile.TemporaryDirectory(prefix="missing") as folder:
        out = shutil.copytree(store, Path(folder) / "out")
        if length < 0:
            (out / name).unlink()
        else:
            os.truncate(out / name, length)
        try:
            finding = _judge(out, name, length, inputs, expected)
        except Exception:
            finding = traceback.format_exc(limit=-4)
    return what, finding


def _judge(out: Path, name: str, length: int, inputs: list[str], expected: dict[str, bytes]) -> str:
    """Describe what is wrong; an exception is, unless it is a `TokenmillError`."""
    import tokenmill as tm
    from tests.support.running import tokenize_here
    from tokenmill.tools.verify import verify

    is_optional = name == "run.json" and length < 0
    try:
        if verify(out).is_sound and not is_optional:
            return "verify says sound"
    except tm.TokenmillError:
        pass
    try:
        for batch in tm.load(out, 16, 4, epochs=1, shuffle=False, framework="numpy"):
            assert batch is not None
    except tm.TokenmillError as error:
        if "\n" in str(error):
            return f"more than a sentence: {error}"
    try:
        tokenize_here(inputs, out, **FLAGS)
    except tm.TokenmillError as error:
        return f"more than a sentence: {error}" if "\n" in str(error) else ""
    return _shim.difference(expected, out)


def main() -> None:
    tally = Tally("missing_files")
    with tempfile.TemporaryDirectory(prefix="faults") as folder, multiprocessing.Pool(2) as pool:
        for what, finding in pool.imap_unordered(check, all_cases(Path(folder)), chunksize=4):
            tally.case(what, finding)
            tally.note(f"files of a store, {what.partition(':')[0]}")
    tally.end()


if __name__ == "__main__":
    main()
