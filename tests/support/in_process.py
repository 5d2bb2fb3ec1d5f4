"""The command line inside the process of the tests, for tests that do not need a new process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from tokenmill.cli import main


def tokenmill_here(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `tests.support.running.tokenmill`, without the start-up of a process."""
    argv = ["tokenmill", *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = Path.cwd()
    os.chdir(cwd or before)
    try:
        with (
            mock.patch.dict(os.environ, {"COLUMNS": "200", **(env or {})}),
            mock.patch("sys.argv", argv),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            main()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0
    finally:
        os.chdir(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), errors.getvalue())
