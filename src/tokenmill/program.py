"""How a program of tokenmill begins and ends: an error that the user can fix is one sentence and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError

__all__ = ["exit_on_error", "open_standard_streams"]

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|RESOURCE_EXHAUSTED", re.IGNORECASE)
"""What torch and JAX write if memory runs out on a device for which they have no exception type."""


def open_standard_streams() -> None:
    """Open `/dev/null` in place of a standard stream that the caller closed (`>&-`).

    Otherwise the next file that is opened would get its descriptor, and what is printed would go into that file.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is the closed one; child processes need it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (open until the end)
    _move_messages()


def _move_messages() -> None:
    """Print messages to a copy of descriptor 2, which is redirected while a tokenizer library runs in any thread."""
    usual = sys.__stderr__
    if usual is not None and sys.stderr is usual and usual.fileno() == 2:
        usual.flush()
        sys.stderr = open(os.dup(2), "w", 1, usual.encoding, usual.errors, closefd=False)  # noqa: SIM115


@contextmanager
def exit_on_error(memory: str = "use less of it", extra: str | None = None) -> Iterator[None]:
    """End the program with one sentence on the standard error, as the command line does, for errors that users cause.

    These are tokenmill's own errors (exit code 1, or 2 for wrong usage), errors of files (1), a lack of memory (1), for
    which `memory` says what to change, missing packages (1) if an `extra` of tokenmill has them, and Ctrl-C (130). All
    other errors keep their traceback. If the environment has a RANK other than 0, the sentence names it.
    """
    try:
        yield
        return
    except TokenmillError as error:
        reason, code = str(error), 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        reason, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), 1
    except (RuntimeError, MemoryError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(first):
            raise
        reason, code = f"out of memory ({first[:160]}); {memory}", 1
    except ImportError as error:
        if extra is None:
            raise
        reason, code = str(MissingDependencyError(f"{Path(sys.argv[0]).name} ({error.name})", extra)), 1
    except KeyboardInterrupt as stopped:
        # A run that tokenizes says which signal it was, and what it leaves.
        reason = str(stopped) or "stopped; the same command resumes after the last checkpoint"
        code = 128 + getattr(stopped, "signal_number", signal.SIGINT)
    rank = os.environ.get("RANK", "0")
    print(f"error: {reason}" if rank == "0" else f"error on rank {rank}: {reason}", file=sys.stderr)
    sys.exit(code)
