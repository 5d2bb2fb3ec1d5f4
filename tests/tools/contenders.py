"""Functions that the tests of `bench` run in fresh processes; this module imports little, so that these start fast."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.tools.bench.contenders import stopwatch


def answer(value: int) -> dict[str, Any]:
    return {"value": value, "pid": os.getpid()}


def append(path: str, letter: str) -> dict[str, Any]:
    with Path(path).open("a") as file:
        file.write(letter)
    return {}


def refuse() -> dict[str, Any]:
    raise UsageError("this cannot work")


def crash() -> dict[str, Any]:
    raise ValueError("out of luck")


def die() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hold(size: int) -> dict[str, Any]:
    data = bytearray(b"x") * size
    time.sleep(0.3)
    return {"size": len(data)}


def hold_in_a_child(size: int) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        hold(size)
        os._exit(0)
    os.waitpid(child, 0)
    return {}


def leave_a_child() -> dict[str, Any]:
    return {"pid": subprocess.Popen(["sleep", "60"]).pid}


def burn(seconds: float) -> dict[str, Any]:
    with stopwatch() as taken:
        child = os.fork()
        started = time.process_time()
        while time.process_time() - started < seconds:
            pass
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return {"cpu_seconds": taken["cpu_seconds"]}
