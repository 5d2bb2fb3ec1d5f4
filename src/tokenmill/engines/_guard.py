"""Turn errors of tokenizer libraries into one sentence that names the file.

A panic of a Rust library prints lines to descriptor 2 and raises a `BaseException`; SentencePiece prints there as well.
So descriptor 2 is redirected during each call of a library. If the call fails, the output is dropped, because the
sentence contains it; otherwise it is written out afterwards.

What other threads print meanwhile must not be held back or dropped with it. So a thread beside the main one redirects
nothing, unless the program prints to a descriptor of its own, as the command line does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from tokenmill.errors import DataError, TokenmillError
from tokenmill.text_batch import shorten

__all__ = ["PanicError", "guarded"]


class PanicError(DataError):
    """A library panicked in the middle of its work, which it should not do for any text."""


class _Redirection:
    """Redirects descriptor 2 to a file while at least one thread is inside a library."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._saved = -1
        self._file: BinaryIO | None = None
        os.register_at_fork(after_in_child=self._start_over)

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            try:
                self._saved = os.dup(2)
            except OSError:
                # A program may run without descriptor 2.
                self._saved = -1
                return
            os.dup2(self._file.fileno(), 2)

    def leave(self, *, drop: bool) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth or self._saved < 0 or self._file is None:
                return
            os.dup2(self._saved, 2)
            os.close(self._saved)
            if self._file.tell():
                self._file.seek(0)
                printed = self._file.read()
                self._file.seek(0)
                self._file.truncate()
                if not drop:
                    os.write(2, printed)

    def _start_over(self) -> None:
        """Use another lock and file than the parent process."""
        if self._depth and self._saved >= 0:
            os.dup2(self._saved, 2)
        if self._file is not None:
            self._file.close()
        self._lock, self._depth, self._file = threading.Lock(), 0, None


_redirection = _Redirection()


@contextmanager
def guarded(file: str, what: str = "cannot be loaded") -> Iterator[None]:
    """Run a block that calls a library; turn any exception into a `DataError` about the tokenizer in `file`."""
    is_redirected = _may_redirect()
    if is_redirected:
        _redirection.enter()
    has_failed = True
    try:
        yield
        has_failed = False
    except (TokenmillError, MemoryError, OSError, ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = DataError if isinstance(error, Exception) else PanicError
        raise kind(file, f"{what}: {shorten(reason)}") from None
    finally:
        if is_redirected:
            _redirection.leave(drop=has_failed)


def _may_redirect() -> bool:
    """Whether nothing but a library writes to descriptor 2 now."""
    if threading.current_thread() is threading.main_thread():
        return True
    try:
        return sys.stderr.fileno() != 2
    except (AttributeError, OSError, ValueError):
        # A notebook or a test has replaced it, and may use the descriptor in its own way.
        return False
