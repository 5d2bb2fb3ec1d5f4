"""What the checks of trainers share: recipes out of the pages, ranks that are killed, losses that are compared.

A check is a program that `run.py` starts in the trainer's own environment, in a folder with the store `data/tok`. It
prints lines of text, and last a JSON object with one row of the table.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PEER_BLOCK = "^```python in {name}\n(.*?)^```"
TIMEOUT = 300
Losses = dict[int, float]


def recipe(page: str, name: str) -> str:
    """Return the code of a page in `docs/recipes` that is marked to run inside a trainer."""
    found = re.findall(PEER_BLOCK.format(name=name), (ROOT / "docs" / "recipes" / page).read_text(), re.M | re.S)
    assert found, f"docs/recipes/{page} has no block 'python in {name}'"
    return "\n".join(found)


def report(step: int, loss: float) -> None:
    """Tell `run_ranks` the loss of a step."""
    # One write, because a trainer may report from several threads.
    sys.stdout.write("\n" + json.dumps({"step": int(step), "loss": float(loss)}) + "\n")
    sys.stdout.flush()


def run_ranks(
    program: Sequence[str], world_size: int = 1, *, kill_after: int | None = None, until: Path | None = None
) -> Losses:
    """Run a program as some ranks of torch.distributed and return the losses that rank 0 reports.

    With `kill_after`, all ranks are killed as soon as that step is reported and the file `until` exists.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    ranks, logs = [], [Path("-".join(["log", *program[1:], str(rank)])) for rank in range(world_size)]
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        log = logs[rank].open("w")
        ranks.append(
            subprocess.Popen(
                [sys.executable, *program],
                env={**os.environ, **place, **address, "LOCAL_WORLD_SIZE": str(world_size)},
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
        )
    losses: Losses = {}
    is_killed = False
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if not line.startswith('{"step"'):
            continue
        found_loss = json.loads(line)
        losses[found_loss["step"]] = found_loss["loss"]
        if kill_after is not None and found_loss["step"] >= kill_after:
            _wait_for(until)
            is_killed = True
            for one in ranks:
                one.send_signal(signal.SIGKILL)
            break
    codes = [one.wait(TIMEOUT) for one in ranks]
    if not is_killed and any(codes):
        raise AssertionError(f"ranks ended with {codes}:\n" + "".join(log.read_text()[-3000:] for log in logs))
    assert not is_killed or any(codes), "the run had ended before it was killed"
    return losses


def together(*runs: Callable[[], Losses]) -> list[Losses]:
    """Run several runs of `run_ranks` at the same time."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [done.result() for done in [pool.submit(run) for run in runs]]


def _wait_for(path: Path | None) -> None:
    for _ in range(600):
        if path is None or path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"there is no checkpoint {path}")


def check_equal(losses: Losses, expected: Losses, what: str, tolerance: float = 0.0) -> int:
    """Check that losses of the same steps are equal; return the number of steps compared."""
    assert losses and set(losses) <= set(expected), (what, sorted(losses), sorted(expected))
    for step, loss in losses.items():
        assert abs(loss - expected[step]) <= tolerance * abs(expected[step]), (what, step, loss, expected[step])
    return len(losses)


def row(**columns: Any) -> None:
    """Print the row of the table: version, steps, resume, compared, tests, and what needs a GPU."""
    print("ROW " + json.dumps(columns), flush=True)


def run_tests(path: str, plugin: str, *settings: str) -> str:
    """Run a trainer's own tests from its checkout with a plugin that puts tokenmill into them; return the tally."""
    checkout = os.environ["CHECKOUT"]
    # Not the settings of the tests of tokenmill, in whose folder the checkout may be.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", checkout, "-p", "no:cacheprovider"]
    command += ["-p", plugin, str(Path(checkout, path)), *settings]
    variables = os.environ | {"PYTHONPATH": f"{checkout}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=900)
    opened = re.search(r"^OPENED (\d+)$", done.stdout, re.M)
    Path("tests.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0 and opened and int(opened[1]), done.stdout[-4000:] + done.stderr[-2000:]
    tally = done.stdout.strip().splitlines()[-1]
    return f"{tally.partition(' in ')[0].strip('= ')}; {opened[1]} data sets were tokenmill's"
