"""torchdata's own `test_state_dict.py` with tokenmill's data sets, and a training run in its `StatefulDataLoader`."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks, run_tests

STEPS = 24


def train(folder: str, workers: str) -> None:
    """A run that continues from its last checkpoint."""
    names: dict[str, Any] = {"__name__": "__main__", "num_workers": int(workers)}
    exec(recipe("torchdata.md", "torchdata"), names)
    loader, state = names["dataloader"], Path(folder, "state.json")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(258, 32), torch.nn.Linear(32, 258))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 1
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
        saved = torch.load(Path(folder, "model.pt"))
        model.load_state_dict(saved["model"])
        first = saved["step"] + 1
    for step, (x, y) in zip(range(first, STEPS + 1), loader, strict=False):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 10:
            Path(folder).mkdir(exist_ok=True)
            torch.save({"model": model.state_dict(), "step": step}, Path(folder, "model.pt"))
            state.write_text(json.dumps(loader.state_dict()))
        report(step, loss.item())


def main(work: str) -> None:
    os.chdir(work)
    whole = run_ranks([__file__, "train", "whole", "0"])
    compared = check_equal(whole, run_ranks([__file__, "train", "workers", "2"]), "two worker processes")
    run_ranks([__file__, "train", "killed", "2"], kill_after=11, until=Path("killed/state.json"))
    again = run_ranks([__file__, "train", "killed", "2"])
    check_equal(again, whole, "a run that was not killed")
    tests = run_tests("test/stateful_dataloader/test_state_dict.py", "torchdata_rows")
    row(
        version=version("torchdata"),
        steps=len(whole),
        resume=f"killed at step 11, from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{"loss compared with": f"0 and 2 worker processes, {compared} steps, equal", "its data tests": tests},
    )


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
