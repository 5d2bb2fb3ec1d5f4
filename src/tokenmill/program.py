"""How a program of tokenmill ends: an error that the user can fix is one sentence and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError

__all__ = ["exit_on_error"]

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|RESOURCE_EXHAUSTED", re.IGNORECASE)
"""What torch and JAX write if memory runs out on a device for which they have no exception type."""


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
