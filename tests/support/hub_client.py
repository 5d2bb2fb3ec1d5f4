"""Users of the loopback Hub, each with a cache of their own, in processes that start at once.

The Hub's client and the `datasets` library read the environment when they are imported, and importing them takes a
second. So one process imports them, and forks a child for each call, which reads the environment again.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.hub_server import Hub

UNSET = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
TIMEOUT_SECONDS = 90


class WarmProcess:
    """A process that has imported everything and forks children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hub_client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, action: str, arguments: Any, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run an action in a child to its end."""
        with tempfile.TemporaryDirectory() as folder:
            request = {"action": action, "arguments": arguments, "env": env, "cwd": str(cwd), "output": folder}
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def warm_process() -> Iterator[WarmProcess]:
    process = WarmProcess()
    try:
        yield process
    finally:
        process.close()


class Client:
    """A user with their own cache."""

    def __init__(self, hub: Hub, folder: Path, process: WarmProcess) -> None:
        self.folder = folder
        # Hidden, and with the characters of a glob: the `datasets` library looks for files below it.
        self.home = folder / ".cache" / "hf[1]"
        self._process = process
        self._env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def environment(self, **env: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in UNSET}
        return {**kept, "COLUMNS": "200", **self._env, **env}

    def find(self, *items: str | list[str], limit: int | None = None, **env: str) -> list[dict[str, Any]]:
        """The files that each of some items, or lists of them, stands for."""
        asked = [[[item] if isinstance(item, str) else item for item in items], limit]
        done = self._process.call("find", asked, self.environment(**env), self.folder)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def names(self, *items: str | list[str], **env: str) -> list[list[str]]:
        """The names of the files, without the beginning that all of them share."""
        found = self.find(*items, **env)
        assert all("files" in answer for answer in found), found
        return [[file[0].removeprefix("datasets/") for file in answer["files"]] for answer in found]

    def refusals(self, *items: str | list[str], **env: str) -> list[str]:
        found = self.find(*items, **env)
        assert all("error" in answer for answer in found), found
        assert not any("\n" in answer["error"] for answer in found)
        return [answer["error"] for answer in found]

    def tokenmill(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        return self._process.call("tokenmill", arguments, self.environment(**env), self.folder)

    def tokenize(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.tokenmill("tokenize", *arguments, "--tokenizer", "bytes", "--workers", "1", **env)


def find(items: list[list[str]], limit: int | None) -> None:
    """Print what each list of items stands for, or why it is refused."""
    import tokenmill.display
    import tokenmill.errors
    import tokenmill.inputs

    class Notes(tokenmill.display.Silence):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def say(self, text: str, *, style: str = "") -> None:
            self.notes.append(text)

    for several in items:
        display = Notes()
        try:
            found = tokenmill.inputs.expand_inputs(several, display, limit)
        except tokenmill.errors.TokenmillError as error:
            answer: dict[str, Any] = {"error": str(error)}
        else:
            files = [[file.name, file.path, file.text_key, file.origin] for file in found]
            answer = {"files": files, "notes": display.notes}
        print(json.dumps(answer))


def _serve() -> None:
    """Answer requests until the input ends; one child each."""
    import datasets.load
    import huggingface_hub.hf_api
    import pyarrow.parquet

    import tokenmill.cli
    import tokenmill.inputs.hub

    del datasets, huggingface_hub, pyarrow, tokenmill
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _act(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _act(action: str, arguments: Any, env: dict[str, str], cwd: str, output: str) -> None:
    """Do what a request asks for, with its environment and output, and end."""
    code = 1
    for number, target in enumerate((os.devnull, f"{output}/out", f"{output}/err")):
        os.dup2(os.open(target, os.O_RDWR | os.O_CREAT), number)
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        _read_environment()
        if action == "find":
            find(*arguments)
        else:
            from tokenmill.cli import main

            sys.argv = ["tokenmill", *arguments]
            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read_environment() -> None:
    """Have the imported libraries read the environment again."""
    import datasets.config
    from huggingface_hub import constants

    importlib.reload(constants)
    importlib.reload(datasets.config)
    settings = {name: value for name, value in vars(constants).items() if name.isupper()}
    copies = [module for name, module in sys.modules.items() if name.startswith("huggingface_hub.")]
    for module in copies:
        vars(module).update({name: settings[name] for name in settings.keys() & vars(module).keys()})


if __name__ == "__main__":
    _serve()
