"""A run in a thread, beside a program that already uses what it makes.

Several processes may want the same store: the ranks of a training, or its loaders for `train` and `val`. One of
them gets the directory and tokenizes; the others wait, and take over if it dies.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenmill.executors.local import start_executor
from tokenmill.pipeline.locking import StoreInUseError, is_in_use
from tokenmill.pipeline.plan import Plan
from tokenmill.pipeline.preparing import Prepared
from tokenmill.pipeline.run import carry_out
from tokenmill.progress import Silence

__all__ = ["BackgroundRun"]

NICENESS = 10
"""Workers step back for the training, which holds the device."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 10.0


class BackgroundRun:
    """A run that goes on by itself; `check` raises what ended it early."""

    def __init__(self, prepared: Prepared, plan: Plan) -> None:
        self._prepared = prepared
        self._plan = plan
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        # Not a daemon's sudden end: a thread that is cut off in the middle of a library takes the program down.
        self._thread = threading.Thread(target=self._work, name="tokenmill-tokenize", daemon=True)
        self._thread.start()
        _running.add(self)

    def check(self) -> None:
        """Raise the error that ended the run, if one did."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Let the run end where it is, to be continued another time."""
        self._stopped.set()

    def stop(self) -> None:
        """Cancel the run, and wait until it has ended."""
        self.cancel()
        self._thread.join(STOP_SECONDS)

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                if not is_in_use(Path(self._prepared.request.out)) and self._try():
                    return
                self._stopped.wait(LOOK_SECONDS)
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error

    def _try(self) -> bool:
        """Finish the store, unless somebody else has just begun to."""
        try:
            with closing(start_executor(NICENESS)) as executor:
                carry_out(self._prepared, _Watch(self._stopped), executor, self._plan)
        except StoreInUseError:
            return False
        return True


class _StoppedError(BaseException):
    """The program ends, or has no more use for the run."""


class _Watch(Silence):
    """Shows nothing, and ends the run at its next word when nobody needs it any more."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped

    def update(self, snapshot: Any) -> None:
        """Called several times a second."""
        if self._stopped.is_set():
            raise _StoppedError("the program that reads it has ended")


_running: weakref.WeakSet[BackgroundRun] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for background in list(_running):
        background.stop()
