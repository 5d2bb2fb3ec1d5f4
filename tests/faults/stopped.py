"""Stop processes of a run with SIGSTOP at random instants, continue them later, and compare the store.

    python tests/faults/stopped.py [ROUNDS]

A stopped process is not a dead one: its tasks are not done twice, and the run ends when it is continued. A parent that
is killed while a worker is stopped leaves a lock that the next run waits for.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim, kills
from tests.faults._tally import Tally

ROUNDS = 25
KINDS = ("a worker", "all workers", "the parent", "all", "orphan")


def pick(process: subprocess.Popen[bytes], kind: str, rng: random.Random) -> list[psutil.Process]:
    """The processes to stop."""
    parent = psutil.Process(process.pid)
    below = parent.children(recursive=True)
    if kind in ("a worker", "orphan"):
        return rng.sample(below, min(1, len(below)))
    return {"the parent": [parent], "all workers": below, "all": [parent, *below]}[kind]


def send(processes: list[psutil.Process], number: int) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def one_round(command: list[str], kind: str, rng: random.Random) -> str:
    """Stop, wait, continue; return what was wrong."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env={**os.environ, **_shim.OURS}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            time.sleep(rng.uniform(0.1, 1.5))
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen = pick(process, kind, rng)
                send(chosen, signal.SIGSTOP)
                if kind == "orphan":
                    process.kill()
                time.sleep(rng.uniform(0.2, 2.0))
                send(chosen, signal.SIGCONT)
            code = process.wait(_shim.SECONDS)
        except subprocess.TimeoutExpired:
            return f"no end after {_shim.SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        words = said.read().decode(errors="replace")
    if "Traceback" in words or (code and kind != "orphan"):
        return f"exit code {code}: {words[-1500:]}"
    return ""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    tally, rng = Tally("stopped"), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        inputs = kills.make_corpus(folder / "corpus")
        assert _shim.run(kills.command(inputs, folder / "undisturbed", "bytes")).code == 0
        expected = _shim.snapshot(folder / "undisturbed")
        for number in range(rounds):
            out, kind = folder / "out", KINDS[number % len(KINDS)]
            command = kills.command(inputs, out, "bytes")
            finding = one_round(command, kind, rng)
            if kind == "orphan" and not finding:
                again = _shim.run(command)
                finding = again.complaint() or (again.said[-500:] if again.code else "")
            tally.case(f"stopped {kind}", finding or _shim.difference(expected, out))
            shutil.rmtree(out, ignore_errors=True)
    tally.end()


if __name__ == "__main__":
    main()
