"""Requests from a process that was forked.

obstore's threads do not survive a fork, and a child that used them would wait for ever; workers of
`torch.utils.data.DataLoader` are such children. They get a process of their own kind, started afresh, that makes
requests for them. It ends when the other side of its socket does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError
from tokenmill.remote.client import (
    AlreadyThere,
    ChangedObject,
    NoSuchObject,
    Refused,
    RemoteError,
    Request,
    Unreachable,
    perform,
    reached,
)

__all__ = ["carry_out", "serve"]

NUM_THREADS = 32
_ERRORS = {
    kind.__name__: kind
    for kind in (AlreadyThere, ChangedObject, NoSuchObject, Refused, RemoteError, Unreachable, UsageError)
}
_home: int | None = None
_courier: _Courier | None = None
_lock = threading.Lock()


def carry_out(request: Request) -> Any:
    """Carry out a request here, or through a courier where this process was forked from one that made requests."""
    global _home, _courier
    here = os.getpid()
    if _home is None:
        _home = here
    if _home == here:
        return perform(request)
    with _lock:
        if _courier is None or _courier.owner != here:
            _courier = _Courier()
    return _courier.carry_out(request)


def _renew_lock() -> None:
    """A lock that another thread held when the process was forked would stay so."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class _Courier:
    """The forked process's side: requests go out as they come, answers come back in any order."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        ours, theirs = socket.socketpair()
        program = f"from tokenmill.remote.courier import serve; serve({theirs.fileno()}, {sorted(reached)})"
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._channel = Connection(ours.detach())
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._last = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def carry_out(self, request: Request) -> Any:
        answer: Future[Any] = Future()
        with self._sending:
            self._last += 1
            self._waiting[self._last] = answer
            self._channel.send_bytes(msgspec.msgpack.encode((self._last, request)))
        return answer.result()

    def _receive(self) -> None:
        while True:
            try:
                number, problem, result = msgspec.msgpack.decode(self._channel.recv_bytes())
            except (EOFError, OSError):
                break
            answer = self._waiting.pop(number)
            if problem is None:
                answer.set_result(result)
            else:
                answer.set_exception(_raised(*problem))
        for answer in self._waiting.values():
            answer.set_exception(RemoteError("the process that makes requests to the object store has ended"))


def _raised(kind: str, message: list[str]) -> TokenmillError:
    if kind == "MissingDependencyError":
        return MissingDependencyError(*message)
    return _ERRORS.get(kind, RemoteError)(message[0])


def serve(descriptor: int, servers: Sequence[str] = ()) -> None:
    """Be a courier until the other side is gone; it knows `servers` that have answered."""
    reached.update(servers)
    channel = Connection(descriptor)
    sending = threading.Lock()

    def answer(number: int, request: Request) -> None:
        problem, result = None, None
        try:
            result = perform(request)
        except MissingDependencyError as error:
            problem = (type(error).__name__, [error.what, error.extra])
        except TokenmillError as error:
            problem = (type(error).__name__, [str(error)])
        data = msgspec.msgpack.encode((number, problem, result))
        with sending:
            channel.send_bytes(data)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while True:
            try:
                data = channel.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            pool.submit(answer, *msgspec.msgpack.decode(data, type=tuple[int, Request]))
