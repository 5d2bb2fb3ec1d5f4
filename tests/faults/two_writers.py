"""Start two or three runs on the same directory at about the same time, some of which replace the store.

    python tests/faults/two_writers.py [ROUNDS]

Each finishes the store, finds it finished, or is refused with a sentence that names the other. At least one succeeds,
and the store has the bytes of a run that was alone.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim
from tests.faults._tally import Tally

ROUNDS = 25


def start_late(command: list[str], delay: float) -> _shim.Run:
    time.sleep(delay)
    return _shim.run(command)


def one_round(folder: Path, inputs: list[str], expected: dict[str, bytes], rng: random.Random, tally: Tally) -> None:
    """Start runs within a second; some of them with --overwrite, some as two ranks."""
    out = folder / "out"
    kind = rng.choice(("two", "three", "overwrite", "ranks"))
    command = _shim.command(inputs, out, "--task-bytes", "2000")
    commands = [command] * (3 if kind == "three" else 2)
    if kind == "overwrite":
        commands = [command, [*command, "--overwrite"]]
    if kind == "ranks":
        ranks = [[*command, "--world-size", "2", "--rank", str(rank)] for rank in (0, 1)]
        commands = [*ranks, ranks[rng.randrange(2)]]
    with ThreadPoolExecutor(len(commands)) as pool:
        runs = list(pool.map(start_late, commands, [rng.uniform(0, 1.2) for _ in commands]))
    finding = next(filter(None, (run.complaint() for run in runs)), "")
    for run in runs:
        refused = run.code == 1 and "is in use by" in run.said
        tally.note("refused" if refused else "succeeded")
        if run.code and not refused:
            finding = finding or f"exit code {run.code}: {run.said[-500:]}"
    if not finding and not any(run.code == 0 for run in runs):
        finding = "no run succeeded"
    if not (out / "manifest.json").exists():
        # The missing rank runs later.
        for later in commands:
            _shim.run(later)
    tally.case(f"round of kind {kind}", finding or _shim.difference(expected, out))
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    tally, rng = Tally("two_writers"), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        inputs = _shim.make_corpus(folder / "corpus")
        assert _shim.run(_shim.command(inputs, folder / "alone", "--task-bytes", "2000")).code == 0
        expected = _shim.snapshot(folder / "alone")
        for _ in range(rounds):
            one_round(folder, inputs, expected, rng, tally)
    tally.end()


if __name__ == "__main__":
    main()
