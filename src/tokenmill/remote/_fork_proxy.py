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
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.remote.client import perform, reachable
from tokenmill.remote.object_request import ObjectRequest
from tokenmill.remote.remote_errors import RemoteError

__all__ = ["send", "serve"]

NUM_THREADS = 32
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
    """The forked process's end of the connection. Answers arrive in any order."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        program = f"from tokenmill.remote._fork_proxy import serve; serve({theirs.fileno()}, {sorted(reachable)})"
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._channel = Connection(ours.detach())
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._last = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, request: ObjectRequest) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._last += 1
            self._pending[self._last] = answer
            self._channel.send((self._last, request))
        return answer.result()

    def _receive(self) -> None:
        while True:
            try:
                number, error, result = self._channel.recv()
            except (EOFError, OSError):
                break
            answer = self._pending.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
        for answer in self._pending.values():
            answer.set_exception(RemoteError("the process that makes requests to the object store has ended"))


def serve(descriptor: int, servers: Sequence[str] = ()) -> None:
    """Perform requests until the other end of a socket is closed; `servers` have answered before."""
    reachable.update(servers)
    channel = Connection(descriptor)
    lock = threading.Lock()
    # Protocol 5 pickles a buffer without a copy of its own.
    copyreg.pickle(memoryview, lambda view: (memoryview, (pickle.PickleBuffer(view),)))

    def answer(number: int, request: ObjectRequest) -> None:
        error, result = None, None
        try:
            result = perform(request)
        except Exception as failure:
            # Another error may not be picklable, and without an answer the other process would wait forever.
            error = failure if isinstance(failure, TokenmillError) else RemoteError(f"{request.url}: {failure!r}")
        data = pickle.dumps((number, error, result), protocol=5)
        with lock:
            channel.send_bytes(data)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while True:
            try:
                number, request = channel.recv()
            except (EOFError, OSError):
                os._exit(0)
            pool.submit(answer, number, request)
