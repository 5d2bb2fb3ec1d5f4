"""The recipes of `docs/recipes`, run inside the trainers themselves: trained, killed, resumed, losses compared.

    make test-trainers

Builds an environment for each trainer if it is missing, and prints a table. With names as arguments, only those run.
Trainers that are a repository and no package are taken from a copy on this machine (see `checkout`), or skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.interop.environments import checkout, trainer_environment

PROGRAMS = Path(__file__).parent / "trainers"
COLUMNS = ("trainer", "version", "steps", "resume", "loss compared with", "its data tests", "needs a GPU")


@dataclass(frozen=True)
class Trainer:
    """A program in `trainers/`, its environment, and the repository that it needs a copy of, if any."""

    program: str
    environment: str
    repository: str | None = None
    paths: tuple[str, ...] = ()
    """What to take of the repository."""


TRAINERS = {
    "torchtitan": Trainer("in_torchtitan.py", "torchtitan"),
    "torchtitan-main": Trainer(
        "in_torchtitan.py",
        "torchtitan",
        "pytorch+torchtitan",
        ("torchtitan", "tests/__init__.py", "tests/unit_tests", "tests/assets/tokenizer"),
    ),
    "torchdata": Trainer("in_torchdata.py", "torchdata", "pytorch+data", ("test",)),
    "hf": Trainer("in_hf.py", "hf"),
    "megatron": Trainer("in_megatron.py", "megatron"),
    "olmo": Trainer("in_olmo.py", "olmo"),
    "litgpt": Trainer("in_litgpt.py", "litgpt"),
    "nanogpt": Trainer("in_nanogpt.py", "plain", "karpathy+nanoGPT", ("train.py", "model.py", "configurator.py")),
    "nanochat": Trainer("in_nanochat.py", "nanochat", "karpathy+nanochat", ("nanochat", "scripts", "tasks")),
}


def prepare(folder: Path) -> None:
    """Make the store that the recipes assume, of ids below 258."""
    write_jsonl(folder / "corpus" / "a.jsonl", make_texts(3000, seed=4))
    source = str(folder / "corpus" / "*.jsonl")
    tm.tokenize(source, folder / "data" / "tok", tokenizer="bytes", val_fraction=0.1)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run one trainer's program and return its row of the table."""
    trainer = TRAINERS[name]
    variables = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": ""}
    if trainer.repository is not None:
        place = checkout(trainer.repository, *trainer.paths)
        if place is None:
            return {"version": f"skipped: no copy of {trainer.repository} here (TOKENMILL_CHECKOUTS)"}
        variables |= {"CHECKOUT": str(place), "PYTHONPATH": str(place)}
    work = folder / name
    work.mkdir()
    (work / "data").symlink_to(folder / "data")
    (work / "corpus").symlink_to(folder / "corpus")
    command = [str(trainer_environment(trainer.environment)), str(PROGRAMS / trainer.program), str(work)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=1500)
    rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or len(rows) != 1:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        return {"version": "FAILED"}
    found: dict[str, Any] = json.loads(rows[0].removeprefix("ROW "))
    return found


def main(names: list[str]) -> None:
    """Run trainers one after the other and print the table."""
    print("| " + " | ".join(COLUMNS) + " | seconds |\n" + "|---" * (len(COLUMNS) + 1) + "|", flush=True)
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in names or TRAINERS:
            began = time.monotonic()
            found = run(name, Path(folder))
            num_failed += found["version"] == "FAILED"
            cells = [name, *(str(found.get(column, "")) for column in COLUMNS[1:]), f"{time.monotonic() - began:.0f}"]
            print("| " + " | ".join(cells) + " |", flush=True)
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main(sys.argv[1:])
