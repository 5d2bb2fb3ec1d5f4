"""What `RayExecutor` promises, on one cluster that it starts on this machine: `python -m tests.cluster.ray_here CORPUS FOLDER`.

This is a program of its own, because a process can have one Ray only, which listens on every interface.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.inline import local_store, request_of
from tokenmill.display import Silence
from tokenmill.executors.base import Answer, Call, CallEvent, Lost, Note, Post, Started
from tokenmill.executors.ray import RayExecutor
from tokenmill.pipeline.run import run

THIS = "tests.cluster.ray_here"
MEMORY = 100_000_000


def echo(post: Post, context: bytes, payload: bytes) -> bytes:
    post(b"at it")
    time.sleep(0.5)
    return payload.upper() + b" %d" % os.getpid()


def die_once(post: Post, context: bytes, payload: bytes) -> bytes:
    """The path in the payload remembers."""
    if not Path(payload.decode()).exists():
        Path(payload.decode()).touch()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return b"alive"


def die(post: Post, context: bytes, payload: bytes) -> bytes:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def events_of(executor: RayExecutor, *calls: Call) -> dict[str, list[CallEvent]]:
    """Collect the events of calls until each of them has ended."""
    found: dict[str, list[CallEvent]] = {call.name: [] for call in calls}
    for call in calls:
        executor.submit(call)
    while not all(any(isinstance(e, (Answer, Lost)) for e in events) for events in found.values()):
        for event in executor.wait(0.2):
            found[event.call.name].append(event)
    return found


def check_calls(executor: RayExecutor, folder: Path) -> None:
    assert executor.capacity().num_calls == 2
    assert executor.capacity(1 << 50).num_calls == 0
    found = events_of(
        executor,
        Call("echo", f"{THIS}:echo", b"", b"word", MEMORY),
        Call("last", f"{THIS}:echo", b"", b"word", MEMORY, is_last=True),
        Call("once", f"{THIS}:die_once", b"", str(folder / "mark").encode(), MEMORY),
        Call("always", f"{THIS}:die", b"", b"", MEMORY),
    )
    (begun, note, answer), last = found["echo"], found["last"][-1]
    assert isinstance(begun, Started) and begun.lost is None
    assert isinstance(note, Note) and note.data == b"at it"
    assert isinstance(answer, Answer) and answer.data == b"WORD %d" % begun.place.pid
    assert isinstance(last, Answer)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(last.data.split()[1])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(last.data.split()[1])), "a last call's process lives on"
    first, again, alive = found["once"]
    assert isinstance(first, Started) and isinstance(again, Started) and again.lost == f"was lost with {first.place}"
    assert isinstance(alive, Answer) and alive.data == b"alive"
    *attempts, loss = found["always"]
    assert [isinstance(event, Started) for event in attempts] == [True, True]
    assert isinstance(loss, Lost)
    assert loss.how == f"was lost with {attempts[1].place}, the last of 2 attempts", loss.how


class Heard(Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self.lines.append(text)


def kill_a_task(store: Path) -> None:
    """As soon as something is published: a process that is at a task."""
    while not list(store.glob(".tasks/0*-*.json")):
        time.sleep(0.01)
    kill_one_at_work(store)


def kill_one_at_work(store: Path, *, but: int = 0) -> int:
    """Kill a process of this program's cluster in the middle of a task, and return its process id."""
    while True:
        for process in psutil.Process().children(recursive=True):
            if process.pid != but and _is_killed_at_work(process, store):
                return process.pid
        time.sleep(0.005)


def _is_killed_at_work(process: psutil.Process, store: Path) -> bool:
    """Stop the process while looking at it: if it has a temporary file open, it has not published it yet."""
    try:
        if process.cmdline()[:1] != ["ray::tokenmill"]:
            return False
        process.suspend()
        if any(file.path.startswith(f"{store}/") and file.path.endswith(".tmp") for file in process.open_files()):
            process.kill()
            return True
        process.resume()
    except psutil.Error:
        pass
    return False


def check_store(executor: RayExecutor, corpus: Path, folder: Path) -> None:
    flags: dict[str, Any] = {"task_bytes": "4kB", "on_error": "skip", "val_fraction": 0.2, "keep_keys": ["id"]}
    request = request_of(corpus, folder / "ray", **flags)
    expected = local_store(request, folder / "local")
    killer = threading.Thread(target=kill_a_task, args=(folder / "ray",), daemon=True)
    killer.start()
    display = Heard()
    run(request, display, executor)
    killer.join(1)
    assert any("was lost with process" in line and "trying it again" in line for line in display.lines), display.lines
    found = {
        str(path.relative_to(folder / "ray")): path.read_bytes()
        for path in sorted((folder / "ray").rglob("*"))
        if path.is_file() and path.name != "run.json"
    }
    assert found == expected


def main(corpus: Path, folder: Path) -> None:
    import ray

    executor = RayExecutor()
    executor.join(2)
    check_calls(executor, folder)
    check_store(executor, corpus, folder)
    assert not ray.is_initialized(), "the cluster was not ended"
    print("all as it should be")


if __name__ == "__main__":
    # Under its own name, so that a call finds the functions in the module that it names.
    from tests.cluster import ray_here

    ray_here.main(Path(sys.argv[1]), Path(sys.argv[2]))
