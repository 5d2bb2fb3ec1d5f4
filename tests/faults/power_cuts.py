"""Cut the power at every file operation of a run, on a simulated disk; then the same command must finish the store.

    python tests/faults/power_cuts.py

Each run is logged once. For every place in its log, `_disk.py` gives the trees that a power cut there may leave: what
was not synced is lost, torn, or survives in another order. For each tree:

- a manifest that survived proves a whole store, the old one or the new one;
- a run that had reported success is there;
- the same command gives the bytes of an undisturbed run, with nothing left over.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim
from tests.faults._disk import Disk, Tree, read_log, write_tree
from tests.faults._tally import Tally

NUM_MIXED = 1
"""Random mixtures of what survives, per operation."""
PLACE = "new/deep/out"
"""Where the store is, so that directories above it have to be made."""
FLAGS: dict[str, Any] = {
    "tokenizer": "bytes", "task_bytes": 2000, "workers": 1, "memory": "1GB", "on_error": "skip", "val_fraction": 0.2,
}  # fmt: skip
SMALL_TASKS = ("--task-bytes", "2000")


@dataclass(frozen=True)
class Scenario:
    """A logged run: the flags of its command, the store that was there before, and the one that it made."""

    name: str
    inputs: list[str]
    overwrite: bool
    before: dict[str, bytes]
    expected: dict[str, bytes]


@dataclass(frozen=True)
class Cut:
    """The tree that one power cut left; `reported` if the run had reported success."""

    scenario: Scenario
    number: int
    reported: bool
    tree: Tree


def log_run(folder: Path, name: str, inputs: list[str], prepare: Callable[[Path], object]) -> Iterator[Cut]:
    """Log one run after `prepare` has filled its directory; yield each tree that differs from all before."""
    box, log = folder / name, folder / f"{name}.log"
    box.mkdir()
    log.touch()
    prepare(box / PLACE)
    before = _shim.snapshot(box / PLACE) if (box / PLACE / "manifest.json").exists() else {}
    disk = Disk(box)
    overwrite = bool(before)
    command = _shim.command(inputs, box / PLACE, *SMALL_TASKS, *(["--overwrite"] if overwrite else []))
    done = _shim.run_disturbed(command, box, log=log)
    assert done.code == 0, done.said
    scenario = Scenario(name, inputs, overwrite, before, _shim.snapshot(box / PLACE))
    operations = read_log(log, Path(box).resolve())
    rng, seen = random.Random(0), set()
    for number in range(len(operations) + 1):
        reported = number == len(operations)
        for tree in disk.cuts(rng, NUM_MIXED):
            key = hashlib.sha256(repr((sorted(tree.items()), reported)).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield Cut(scenario, number, reported, tree)
        if not reported:
            disk.apply(operations[number])


def all_cuts(folder: Path) -> Iterator[Cut]:
    """A new store, one that a killed run began, and one that replaces another."""
    inputs = _shim.make_corpus(folder / "corpus")

    def kill_half_way(out: Path) -> None:
        done = _shim.run_disturbed(_shim.command(inputs, out, *SMALL_TASKS), out.parents[2], at=120, do="kill-group")
        assert done.code, "the run was not killed"
        assert (out / ".tasks").exists()

    def make_another(out: Path) -> None:
        done = _shim.run(_shim.command(inputs, out, *SMALL_TASKS, "--seed", "5"))
        assert done.code == 0, done.said

    yield from log_run(folder, "new", inputs, lambda _: None)
    yield from log_run(folder, "resumed", inputs, kill_half_way)
    yield from log_run(folder, "overwritten", inputs, make_another)


def check(cut: Cut) -> tuple[str, str]:
    """Write a tree to the real disk and check it; return what was cut, and what is wrong."""
    what = f"{cut.scenario.name} run, cut after operation {cut.number}"
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(_shim.SECONDS)
    with tempfile.TemporaryDirectory(prefix="cut") as folder:
        box = Path(folder) / "box"
        write_tree(cut.tree, box)
        try:
            finding = _judge(cut, box / PLACE)
        except BaseException:
            finding = traceback.format_exc(limit=-3)
        if finding:
            finding += f" (there was: {', '.join(name for name, data in cut.tree.items() if data is not None)})"
    signal.alarm(0)
    return what, finding


def _give_up(*_: object) -> NoReturn:
    raise TimeoutError("the next run does not end")


def _judge(cut: Cut, out: Path) -> str:
    from tests.support.running import tokenize_here

    scenario = cut.scenario
    is_there = (out / "manifest.json").exists()
    if is_there:
        left = _shim.snapshot(out)
        stores = [scenario.expected] if cut.reported else [scenario.expected, scenario.before]
        if not any(store and store.items() <= left.items() for store in stores):
            return "the manifest survived and other files of the store did not"
    elif cut.reported:
        return "the run had reported success, and the store is gone"
    tokenize_here(scenario.inputs, out, **FLAGS, **({"overwrite": True} if scenario.overwrite else {}))
    return _shim.difference(scenario.expected, out)


def main() -> None:
    tally = Tally("power_cuts")
    with tempfile.TemporaryDirectory(prefix="faults") as folder, multiprocessing.Pool(2, maxtasksperchild=400) as pool:
        for what, finding in pool.imap_unordered(check, all_cuts(Path(folder)), chunksize=8):
            tally.case(what, finding)
            tally.note(what.partition(",")[0])
    shutil.rmtree(folder, ignore_errors=True)
    tally.end()


if __name__ == "__main__":
    main()
