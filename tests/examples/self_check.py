"""Train the tiny model of `examples/train_torch.py` on a device, resume it from the middle, and check both runs.

`python examples/train_torch.py --test` runs this. The text is Python's standard library, which every machine has.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import train_torch

import tokenmill as tm


def check(device: str) -> bool:
    """Print each property and whether it holds."""
    if device == "cpu":
        torch.set_num_threads(1)  # Threads that wait for each other are many times slower on a busy machine.
    with tempfile.TemporaryDirectory(prefix="train-torch-") as folder:
        home = Path(folder)
        given = ["--data", str(make_store(home)), "--checkpoint-path", str(home / "run"), "--steps", "30"]
        given += ["--seq-len", "128", "--checkpoint-every", "20", "--log-every", "1", "--validate-every", "0"]
        given += ["--device", device]
        losses, clock = train_torch.train(train_torch.parse_flags(given))
        (home / "run" / "step-00000030.pt").unlink()
        resumed, _ = train_torch.train(train_torch.parse_flags(given))
    apart = max(abs(loss - losses[step]) for step, loss in resumed.items())
    waiting = clock.shares()["data"]
    checks = {
        f"the loss falls from {losses[1]:.2f} to {losses[30]:.2f}": losses[30] < losses[1] - 1,
        f"the losses of a resumed run differ by {apart}": apart == 0 if device == "cpu" else apart < 0.01,
        f"steps wait for data {waiting:.1%} of the time": waiting < 0.05,
    }
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return all(checks.values())


def make_store(home: Path) -> Path:
    """Tokenize some modules of the standard library into a store of bytes."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    lines = [json.dumps({"text": module.read_text("utf-8", errors="replace")}) + "\n" for module in modules]
    (home / "text.jsonl").write_text("".join(lines))
    tm.tokenize(home / "text.jsonl", home / "store", tokenizer="bytes")
    return home / "store"


if __name__ == "__main__":
    sys.exit(0 if check(sys.argv[1]) else 1)
