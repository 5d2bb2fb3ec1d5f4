"""Replace, change and cut stores while loaders have them open: no batch may hold tokens of another store.

    python tests/faults/replaced_stores.py [--cases 300]

Each case opens a loader, takes some batches, disturbs the store, and takes the rest. The rest must be the old store's
batches, up to an error in a sentence. Files are cut only before they are mapped: cutting a mapped file ends a process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from pathlib import Path

import tokenmill as tm
from tests.faults._tally import Tally
from tests.support.stores import make_store
from tokenmill.errors import StoreError

NUM_SHARDS = 8


def swap(store: Path, other: Path, random_: random.Random) -> None:
    """Rename another store into place."""
    store.rename(store.with_name("moved"))
    other.rename(store)


def copy_some(store: Path, other: Path, random_: random.Random) -> None:
    """Copy some shards of another store over those of this one, the manifest last or never."""
    names = sorted(path.name for path in other.glob("train/*.bin"))
    for name in random_.sample(names, random_.randint(1, len(names))):
        shutil.copy2(other / "train" / name, store / "train" / f"{name}.new")
        (store / "train" / f"{name}.new").replace(store / "train" / name)
    if random_.random() < 0.5:
        shutil.copy2(other / "manifest.json", store / "manifest.json")


def remove(store: Path, other: Path, random_: random.Random) -> None:
    """Remove the store."""
    shutil.rmtree(store)


def cut(store: Path, other: Path, random_: random.Random) -> None:
    """Cut files that no row was read from: with rows in order, the last ones."""
    path = sorted(store.glob("train/*.bin"))[-1]
    os.truncate(path, random_.randrange(path.stat().st_size))


DISTURBANCES = (swap, copy_some, remove, cut)


def run_case(folder: Path, number: int) -> str:
    """Return what went wrong in one case, or nothing."""
    random_ = random.Random(number)
    disturb = DISTURBANCES[number % len(DISTURBANCES)]
    store = make_store(folder / "tok", [[1] * 50] * 40, num_shards=NUM_SHARDS)
    other = make_store(folder / "other", [[2] * 50] * 40, num_shards=NUM_SHARDS)
    shuffle = disturb is not cut and random_.random() < 0.5
    loader = tm.load(store, seq_len=10, batch_size=1, epochs=1, shuffle=shuffle, seed=number)
    batches = iter(loader)
    for _ in range(random_.randint(0, 20)):
        next(batches)
    disturb(store, other, random_)
    try:
        for batch in batches:
            if set(batch.inputs.ravel().tolist()) != {1}:
                return "a batch has tokens of another store"
    except StoreError as error:
        return "" if "\n" not in str(error) else f"not one sentence: {error}"
    return "a disturbed file was read without an error" if disturb is cut else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    arguments = parser.parse_args()
    tally = Tally("replaced_stores")
    for number in range(arguments.cases):
        with tempfile.TemporaryDirectory() as folder:
            tally.case(f"case {number}", run_case(Path(folder), number))
    tally.end()


if __name__ == "__main__":
    main()
