"""Disturb every single file operation of a run, one run per operation; then the same command must finish the store.

    python tests/faults/operations.py kill-group kill-one     killed just before the operation
    python tests/faults/operations.py eio enospc              the operation fails
    python tests/faults/operations.py eintr short             it is interrupted, or writes half of the bytes

A killed or failed run leaves no traceback, and the next one gives the bytes of an undisturbed run. Interrupted calls
and short writes are normal, so the first run must succeed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim
from tests.faults._tally import Tally

ACTIONS = ("kill-group", "kill-one", "eio", "enospc", "eintr", "short")


class Torment:
    """One corpus, its undisturbed store, and runs that are disturbed."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self._folder = folder
        self._tally = tally
        self._inputs = _shim.make_corpus(folder / "corpus")
        done = _shim.run(_shim.command(self._inputs, folder / "undisturbed"))
        assert done.code == 0, done.said
        self._expected = _shim.snapshot(folder / "undisturbed")

    def every_operation(self, action: str, step: int) -> None:
        """One run per operation, two at a time."""
        reads = {"reads": 1} if action in ("eio", "eintr") else {}
        count = _shim.run_disturbed(
            _shim.command(self._inputs, self._box("count")), self._folder / "count", do=action, **reads
        )
        assert count.code == 0, count.said
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda at: self._one(action, at, reads), range(1, count.num_operations + 1, step)))
        self._tally.note(f"operations of a run ({action})", count.num_operations)

    def _box(self, name: str) -> Path:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        (self._folder / name).mkdir()
        return self._folder / name / "out"

    def _one(self, action: str, at: int, reads: dict[str, int]) -> None:
        out = self._box(f"{action}-{at}")
        arguments = _shim.command(self._inputs, out)
        first = _shim.run_disturbed(arguments, out.parent, at=at, do=action, **reads)
        finding = first.complaint()
        if not finding and first.code:
            self._tally.note(f"runs that ended ({action})")
            if action in ("eintr", "short"):
                finding = f"exit code {first.code}: {first.said[-500:]}"
            elif not action.startswith("kill") and not first.said.strip():
                finding = f"exit code {first.code} without a word"
        if not finding and (first.code or (action in ("eio", "enospc") and _shim.difference(self._expected, out))):
            # A file that a finished run could not remove is removed by the next one.
            again = _shim.run(arguments)
            finding = again.complaint() or (f"then {again.code}: {again.said[-500:]}" if again.code else "")
        finding = finding or _shim.difference(self._expected, out)
        self._tally.case(f"{action} at {at}", finding)
        shutil.rmtree(out.parent, ignore_errors=True)


def main() -> None:
    actions = [argument for argument in sys.argv[1:] if argument in ACTIONS] or list(ACTIONS)
    tally = Tally("-".join(actions))
    step = int(os.environ.get("FAULT_STEP", "1"))
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        torment = Torment(Path(folder), tally)
        for action in actions:
            torment.every_operation(action, step)
    tally.end()


if __name__ == "__main__":
    main()
