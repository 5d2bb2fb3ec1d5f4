"""Flip single bits in the files of a store: `verify` finds each one, and so does a loader with `verify="background"`.

    python tests/faults/bit_flips.py [--flips 10000] [--loads 300]

Bits are chosen at random in all files of a supervised store, which has a mask and weights. For a share of the flips in
files that loading reads, a loader without the check must give other batches or the same ones, and one with it must stop
with the name of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

import tokenmill as tm
from tests.faults._tally import Tally
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.tools.verify import verify

LOADED = (".bin", ".idx", ".mask", ".weight")
SECONDS = 30


def make_supervised(folder: Path) -> Path:
    """A store with a mask, weights, rejects and two shards."""
    rows = [{"prompt": f"ask {number}", "response": f"say {number}", "w": 0.5} for number in range(300)]
    lines = [json.dumps(row) for row in rows]
    lines[7] = "{"
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    inputs = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    flags = {"prompt_key": "prompt", "response_key": "response", "weight_key": "w"}
    tm.tokenize(inputs, folder / "store", tokenizer="bytes", workers=1, on_error="skip", task_bytes=8000, **flags)
    return folder / "store"


def flip(path: Path, bit: int) -> None:
    """Flip a bit in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def is_found(store: Path) -> bool:
    """Whether `verify` reports a problem or refuses the store in a sentence."""
    try:
        return bool(verify(store).problems)
    except TokenmillError as error:
        return "\n" not in str(error)


def load_until_stopped(store: Path, name: str) -> str:
    """Return a finding, or nothing if the loader stops with an error that names the file."""
    deadline = time.monotonic() + SECONDS
    try:
        for _ in tm.load(store, seq_len=16, batch_size=8, document_mask=True, verify="background"):
            if time.monotonic() > deadline:
                return f"no error in {SECONDS} s"
            time.sleep(0.001)
    except StoreError as error:
        return "" if name in str(error) and "\n" not in str(error) else f"an error about something else: {error}"
    return "the loader ended"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--loads", type=int, default=300)
    arguments = parser.parse_args()
    tally, rng = Tally("bit_flips"), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOKENMILL_CACHE"] = f"{folder}/cache"
        store = make_supervised(Path(folder))
        assert not verify(store).problems
        files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
        loaded = [path for path in files if path.suffix in LOADED]
        for number in range(arguments.flips + arguments.loads):
            is_load = number >= arguments.flips
            path = rng.choice(loaded if is_load else files)
            bit = rng.randrange(8 * path.stat().st_size)
            flip(path, bit)
            if is_load:
                finding = load_until_stopped(store, path.name)
            else:
                finding = "" if is_found(store) else "verify says sound"
            tally.case(f"bit {bit} of {path.relative_to(store)}", finding)
            tally.note(f"in {path.suffix or path.name}{', loading' if is_load else ''}")
            flip(path, bit)
        tally.case("the store after all", "" if not verify(store).problems else "is damaged")
    tally.end()


if __name__ == "__main__":
    main()
