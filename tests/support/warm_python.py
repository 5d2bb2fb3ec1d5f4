"""Run Python programs without their start-up: as forks of a process that has imported the heavy packages.

The folder of a `WarmPython` goes to the front of PATH. Its two programs, `python` and `tokenmill`, are small clients. A
client sends its arguments, its environment and its standard streams to a server. The server forks, and the fork runs
the program in a new `__main__`. Output, exit code and signals are those of a program that was started the usual way.

Servers import other projects' packages only: a program imports tokenmill itself, so that a missing import of ours still
fails. There is one server per framework, because tokenmill asks `sys.modules` which framework the caller uses.
To a warm program, `sys.executable` is the client, so that the fork servers and the ranks it starts are warm too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

COMMON = (
    "msgspec",
    "numpy",
    "pandas",
    "psutil",
    "pyarrow.parquet",
    "rich.live",
    "tokenizers",
    "typer.rich_utils",
    "yaml",
)
PACKAGES = {
    "": ("datasets", "huggingface_hub"),
    "torch": ("torch", "torch._dynamo"),  # the first step of an optimizer imports _dynamo, in 2 s
    "jax": ("jax", "optax", "orbax.checkpoint", "grain"),
}
"""What a server imports, by the framework of its programs."""
USES_FRAMEWORK = re.compile(r'^\s*(?:import|from) (torch|jax)\b|framework="(torch|jax)"', re.MULTILINE)
READ_ON_IMPORT = ("HF", "JAX", "OMP", "PYTHON", "TORCH", "XLA")
"""First letters of variables that these packages read when they are imported."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Threads that wait for each other are many times slower on a busy machine; executors set this too."""
FORK_SERVER = ("-m", "tokenmill.executors._fork_server")
MODULES = ("tokenmill", "tokenmill.executors._fork_server", "torch.distributed.run")
"""What a fork runs for `python -m`; other modules are run by a new interpreter."""


class WarmPython:
    """Servers, and a folder with the programs that use them."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = dict(environment)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        for program in ("python", "tokenmill"):
            # With -I and -S, a client starts in 20 ms: it needs neither PYTHONPATH nor site-packages.
            command = shlex.join([sys.executable, "-IS", __file__, "client", str(folder), program])
            (folder / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (folder / program).chmod(0o755)

    @property
    def search_path(self) -> str:
        """PATH with the warm programs first."""
        return f"{self.folder}:{Path(sys.executable).parent}:{self._environment['PATH']}"

    def start(self, *frameworks: str) -> None:
        """Start the servers of frameworks; programs of a framework without a server start the usual way."""
        for framework in frameworks:
            if framework not in self._servers:
                self._servers[framework] = self._start(framework)

    def _start(self, framework: str) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.folder / f"{framework}.socket"))
            listener.listen(16)
            return subprocess.Popen(
                [sys.executable, __file__, "server", framework, str(listener.fileno())],
                env=self._environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )

    def stop(self) -> None:
        """Stop the servers. They also stop if this process is killed, because that closes their standard input."""
        for server in self._servers.values():
            server.communicate()


@cache
def shared_warm_python() -> WarmPython:
    """Servers for all tests of this process: most of them tokenize a few lines, which takes less than two imports."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # the path of a socket must be short
    warm = WarmPython(folder, os.environ | ONE_THREAD)
    warm.start("")
    atexit.register(shutil.rmtree, folder)
    atexit.register(warm.stop)
    return warm


def run_client(folder: str, program: str, *arguments: str) -> None:
    """Run a program in a fork of a server, or start it the usual way where a fork could behave differently."""
    real = Path(sys.executable).with_name(program)
    framework = _find_framework(program, arguments)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"{folder}/{framework}.socket")
    except OSError:
        os.execv(real, [str(real), *arguments])
    request = {
        "program": str(real),
        "client": f"{folder}/python",
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "numbers": [0, 1, 2, *([int(arguments[2])] if arguments[:2] == FORK_SERVER else [])],
    }
    socket.send_fds(connection, [b"\n"], request["numbers"])
    with connection.makefile("rw") as channel:
        print(json.dumps(request), file=channel, flush=True)
        if channel.readline() != "accepted\n":
            os.execv(real, [str(real), *arguments])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: connection.sendall(b"%d\n" % number))
        code = int(channel.readline() or 1)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _find_framework(program: str, arguments: tuple[str, ...]) -> str:
    """Name the server that has imported what the program will import; "fresh" if only an interpreter can run it."""
    if program == "tokenmill":
        return ""
    if arguments[:1] == ("-m",) and arguments[1] in MODULES:
        return "torch" if arguments[1].startswith("torch") else ""
    if arguments[:1] == ("-c",):
        text = arguments[1]
    elif arguments and arguments[0].endswith(".py"):
        text = Path(arguments[0]).read_text("utf-8")
    else:
        return "fresh"
    found = {name for names in USES_FRAMEWORK.findall(text) for name in names if name}
    return "".join(found) if len(found) < 2 else "fresh"


def serve(framework: str, descriptor: int) -> dict[str, Any] | None:
    """Fork for every client; return the request in the fork, and None when the tests have ended."""
    environment = dict(os.environ)
    del sys.path[0]  # the folder of this file, whose modules could shadow a package
    for name in COMMON + PACKAGES[framework]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks
    poller = select.poll()
    with socket.socket(fileno=descriptor) as listener:
        for watched in (listener, sys.stdin):
            poller.register(watched, select.POLLIN)
        while True:
            if sys.stdin.fileno() in dict(poller.poll()):
                return None
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return _fork_program(connection, environment)


def _fork_program(connection: socket.socket, before: dict[str, str]) -> dict[str, Any]:
    """Fork again: the parent passes signals to the program and its exit code back, the child returns the request."""
    _, received, _, _ = socket.recv_fds(connection, 1, 4)
    channel = connection.makefile("rw")
    request: dict[str, Any] = json.loads(channel.readline())
    asked = request["environment"]
    names = [name for name in {*asked, *before} if name.startswith(READ_ON_IMPORT)]
    if any(asked.get(name) != before.get(name) for name in names):
        print("refused", file=channel, flush=True)
        os._exit(0)
    print("accepted", file=channel, flush=True)
    if (program := os.fork()) != 0:
        threading.Thread(target=_pass_signals, args=(channel, program), daemon=True).start()
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    channel.close()
    asked |= {name: value for name, value in os.environ.items() if before.get(name) != value}  # packages set some
    return {**request, "received": received}


def _pass_signals(channel: Any, program: int) -> None:
    """Send the program the signals that its client gets; kill it when its client has been killed."""
    with contextlib.suppress(ProcessLookupError):  # the program has just ended
        for line in channel:
            os.kill(program, int(line))
        os.kill(program, signal.SIGKILL)


def run_program(request: dict[str, Any]) -> None:
    """Do what an interpreter does after its start: run a command, a module or a file."""
    _take_descriptors(request["received"], request["numbers"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it may have been read from another TMPDIR
    sys.executable = request["client"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    program, arguments = request["program"], request["arguments"]
    path = arguments.pop(0) if program.endswith("python") else program
    if path == "-m":
        sys.argv = arguments
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    if path == "-c":
        sys.argv, text = ["-c", *arguments[1:]], arguments[0]
        sys.path.insert(0, "")
    else:
        sys.argv, text = [path, *arguments], Path(path).read_text("utf-8")
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        main.__file__ = os.path.abspath(path)
    exec(compile(text, "<string>" if path == "-c" else os.path.abspath(path), "exec"), vars(main))


def _take_descriptors(received: list[int], numbers: list[int]) -> None:
    """Give the descriptors that came from the client the numbers they had there, by way of numbers none of them has."""
    free = max(*received, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        run_client(*sys.argv[2:])
    elif (request := serve(sys.argv[2], int(sys.argv[3]))) is not None:
        run_program(request)
