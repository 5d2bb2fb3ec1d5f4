"""Requests from a forked process, such as a worker of `torch.utils.data.DataLoader`.

obstore's threads do not survive a fork, so a request in the child would never return. The child starts a new process
that makes its requests and that ends when the child does. It is a plain subprocess because `multiprocessing` does not
let daemonic processes, as these workers are, have children.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.remote.client import perform, reachable
from tokenmill.remote.object_request import ObjectRequest
from tokenmill.remote.remote_errors import RemoteError

__all__ = ["send", "serve"]

_has_requested = False
_is_forked = False
"""Whether an ancestor of this process had made requests before the fork."""
_proxy: _Proxy | None = None
_lock = threading.Lock()


def send(request: ObjectRequest) -> Any:
    """Perform a request here, or through a proxy if this process was forked from one that had made requests."""
    global _has_requested, _proxy
    if not _is_forked:
        _has_requested = True
        return perform(request)
    with _lock:
        _proxy = _proxy or _Proxy()
    return _proxy.send(request)


def _after_fork() -> None:
    """Leave the parent's proxy alone, and replace a lock that another thread may have held."""
    global _lock, _proxy, _is_forked
    _lock, _proxy = threading.Lock(), None
    _is_forked = _is_forked or _has_requested


os.register_at_fork(after_in_child=_after_fork)


class _Proxy:
    """The process that makes requests, and the connections to it that no thread is using."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        program = f"from tokenmill.remote._fork_proxy import serve; serve({theirs.fileno()}, {sorted(reachable)})"
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._idle: list[Connection] = []

    def send(self, request: ObjectRequest) -> Any:
        try:
            channel = self._connect()
            channel.send(request)
            error, result = channel.recv()
        except (EOFError, OSError):
            raise RemoteError("the process that makes requests to the object store has ended") from None
        self._idle.append(channel)
        if error is not None:
            raise error
        return result

    def _connect(self) -> Connection:
        with suppress(IndexError):
            return self._idle.pop()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return Connection(ours.detach())


def serve(descriptor: int, servers: Sequence[str] = ()) -> None:
    """Perform requests until the other end of a socket is closed; `servers` have answered before.

    Each byte on the socket brings the descriptor of a connection, which carries one request at a time.
    """
    reachable.update(servers)
    # Protocol 5 pickles a buffer without a copy of its own.
    copyreg.pickle(memoryview, lambda view: (memoryview, (pickle.PickleBuffer(view),)))
    control = socket.socket(fileno=descriptor)
    while connection := socket.recv_fds(control, 1, 1)[1]:
        threading.Thread(target=_answer, args=(Connection(connection[0]),), daemon=True).start()
    os._exit(0)


def _answer(channel: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            request = channel.recv()
            error, result = None, None
            try:
                result = perform(request)
            except Exception as failure:
                # Another error may not be picklable, and without an answer the other process would wait forever.
                error = failure if isinstance(failure, TokenmillError) else RemoteError(f"{request.url}: {failure!r}")
            channel.send_bytes(pickle.dumps((error, result), protocol=5))
