"""Signals end a run with an exception, so that every `finally` on the way out is executed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tokenmill.errors import TokenmillError

__all__ = ["Interrupted", "SignalReceived", "signals_as_exceptions"]


class Interrupted(TokenmillError):
    """A signal ended the run; the same command resumes it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class SignalReceived(BaseException):
    """SIGINT or SIGTERM, on its way out of the run."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def name(self) -> str:
        """`SIGINT` or `SIGTERM`."""
        return signal.Signals(self.number).name


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception, in the main thread of a program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        # A second signal must not interrupt the clean-up.
        if len(received) == 1:
            raise SignalReceived(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SignalReceived as stopped:
        raise Interrupted(f"stopped by {stopped.name}", stopped.number) from None
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)
