"""The program `tokenmill`, also as `python -m tokenmill`.

Imports take most of a second, in which many a user presses Ctrl-C to correct a command. Modules that are interrupted
while they are imported print a traceback or raise another error, so the program ends at once then.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

IMPORTING = "<frozen importlib._bootstrap>"


def main() -> None:
    """Run the command line."""
    # A program that was started with SIGINT ignored goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    started = None
    if sys.argv[1:2] == ["tokenize"] and len(sys.argv) > 2:
        # The process that workers are forked from imports most of the program, and this one does at the same time.
        from tokenmill.executors import create
        from tokenmill.pipeline import PRELOAD
        from tokenmill.program import open_standard_streams

        open_standard_streams()
        try:
            started = create("local", PRELOAD)
        except KeyboardInterrupt:
            _end()
    from tokenmill.cli import main as run

    run(started)


def _end() -> NoReturn:
    os.write(2, b"error: stopped\n")
    os._exit(128 + signal.SIGINT)


def _stop(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
