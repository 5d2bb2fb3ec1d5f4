"""How a run ends early: signals become an exception, and whatever ends it becomes a sentence."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tokenmill.errors import TokenmillError
from tokenmill.pipeline.messages import Failed

__all__ = ["Interrupted", "SignalReceived", "in_words", "signals_raise"]


class Interrupted(TokenmillError):
    """A signal ended the run; the directory can be continued."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def in_words(error: BaseException, store: Path) -> BaseException:
    """What the user reads when a run ends early."""
    if isinstance(error, SignalReceived):
        return Interrupted(
            f"stopped by {signal.Signals(error.number).name}; run the same command again to continue {store}",
            error.number,
        )
    if isinstance(error, OSError):
        return Failed.from_error(error, str(store)).to_error()
    return error


class SignalReceived(BaseException):
    """SIGINT or SIGTERM, on its way out of the run."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception, in the main thread of a program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        # One is enough: a second must not break into the cleaning up.
        if len(received) == 1:
            raise SignalReceived(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SignalReceived as stopped:
        raise Interrupted(f"stopped by {signal.Signals(stopped.number).name}", stopped.number) from None
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)
