"""Signals end a run with an exception, so that every `finally` on the way out is executed.

A program may receive one press of Ctrl-C several times, from its terminal and from its parent. So signals within a
second count as one. A later one interrupts the clean-up, too: the directory is then as after a kill.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "SignalReceived", "signals_as_exceptions"]


SAME_SECONDS = 1.0


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; the same command resumes it. As Ctrl-C elsewhere, it is no `Exception`."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class SignalReceived(BaseException):
    """SIGINT, SIGTERM or SIGHUP, on its way out of the run."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def name(self) -> str:
        """`SIGINT`, `SIGTERM` or `SIGHUP`."""
        return signal.Signals(self.number).name


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into an exception, in the main thread of a program.

    A terminal that is closed sends SIGHUP. A program that ignores it, as `nohup` makes it do, goes on ignoring it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -SAME_SECONDS

    def handler(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= SAME_SECONDS:
            last = time.monotonic()
            raise SignalReceived(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    except SignalReceived as stopped:
        raise Interrupted(f"stopped by {stopped.name}", stopped.number) from None
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)
