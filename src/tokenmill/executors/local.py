"""Workers on this machine: processes forked from a warm nursery."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from tokenmill.errors import TokenmillError
from tokenmill.executors.base import Death, Event, Message

__all__ = ["LocalExecutor", "start_executor"]

STATUS_SECONDS = 2.0
NO_THREADS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Workers are the parallelism: libraries must not start thread pools of their own."""
MEMORY_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=268435456"
"""Huge pages where the system gives them on request, and blocks of a megabyte that stay with the process between two
batches: 5% of a worker's time. The tables of engines are read at random, one miss of the page table each."""

_forking = threading.Lock()
"""Held while the other end of a new channel is open here: a program that forks then would keep it open."""
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release)


def start_executor(niceness: int = 0) -> LocalExecutor:
    """An executor whose nursery is already importing what workers need, while the run is being planned."""
    executor = LocalExecutor(niceness)
    executor.warm("tokenmill.pipeline.worker:preload", b"")
    return executor


class LocalWorker:
    """A forked process and the channel to it."""

    def __init__(self, name: str, pid: int, connection: Connection) -> None:
        self.name = name
        self.pid = pid
        self.connection = connection

    def send(self, data: bytes) -> None:
        """Send one message; a dead worker is reported by the executor's `wait`."""
        with suppress(OSError):
            self.connection.send_bytes(data)

    def kill(self) -> None:
        """End the worker at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class LocalExecutor:
    """Starts a nursery at once, so that its imports overlap with planning; `niceness` lets other work go first."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._workers: dict[int, LocalWorker] = {}
        self._codes: dict[int, int] = {}
        self._warmings: list[dict[str, str]] = []
        self._start_nursery()

    def warm(self, target: str, payload: bytes) -> None:
        """Let the nursery call a function; workers that are started later share what it leaves."""
        request = {"do": "warm", "target": target, "payload": payload.decode()}
        self._warmings.append(request)
        self._request(request, [])

    def launch(self, name: str, target: str, payload: bytes) -> LocalWorker:
        """Fork a worker from the nursery, which is started anew if it was killed."""
        for attempt in (1, 2):
            with _forking:
                ours, theirs = socket.socketpair()
                self._request({"do": "fork", "target": target}, [theirs.fileno()])
                theirs.close()
            pid = self._read_until_started()
            if pid is not None:
                # The number may have been another worker's before.
                self._codes.pop(pid, None)
                worker = LocalWorker(name, pid, Connection(ours.detach()))
                self._workers[pid] = worker
                worker.send(payload)
                return worker
            ours.close()
            if attempt == 1:
                self._restart_nursery()
        raise TokenmillError("no worker process could be started; run the same command again to continue")

    def wait(self, timeout: float) -> list[Event]:
        """Messages and deaths; a death is reported after the worker's last message."""
        by_connection = {worker.connection: worker for worker in self._workers.values()}
        events: list[Event] = []
        control = self._control
        for ready in wait([*by_connection, control], timeout):
            if ready is control:
                # Asking how a worker ended may have put a new nursery in its place meanwhile.
                if control is self._control:
                    self._read_control(block=False)
                continue
            worker = by_connection[ready]  # type: ignore[index]
            try:
                events.append(Message(worker, worker.connection.recv_bytes()))
            except (EOFError, OSError):
                events.append(Death(worker, self._describe_end(worker)))
                worker.connection.close()
                del self._workers[worker.pid]
        return events

    def close(self) -> None:
        """Kill all workers and the nursery, and wait until they are gone."""
        for worker in self._workers.values():
            worker.kill()
        deadline = time.monotonic() + STATUS_SECONDS
        while any(map(self._lives, self._workers)) and time.monotonic() < deadline:
            if self._alive and wait([self._control], 0.05):
                self._read_control(block=True)
            elif not self._alive:
                time.sleep(0.01)
        for worker in self._workers.values():
            worker.connection.close()
        self._workers.clear()
        self._control.close()
        # It has no children left; waiting would mean waiting for its imports when a run ends at once.
        self._nursery.kill()
        self._nursery.wait()

    def _start_nursery(self) -> None:
        with _forking:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "tokenmill.executors.nursery", str(theirs.fileno()), str(self._niceness)]
            environment = {"GLIBC_TUNABLES": MEMORY_TUNABLES, **os.environ, **NO_THREADS}
            # Blocked until the nursery ignores it, Ctrl-C cannot print a traceback out of its start.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self._nursery = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()
        self._control = ours
        self._buffer = b""
        self._alive = True

    def _restart_nursery(self) -> None:
        self._control.close()
        self._nursery.kill()
        self._nursery.wait()
        self._start_nursery()
        for request in self._warmings:
            self._request(request, [])

    def _lives(self, pid: int) -> bool:
        """Whether a killed worker is still there; when the nursery is dead, only the system knows."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return pid not in self._codes

    def _request(self, request: dict[str, str], descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], descriptors)
        except OSError:
            self._alive = False

    def _read_until_started(self) -> int | None:
        while self._alive:
            for message in self._read_control(block=True):
                if "started" in message:
                    return message["started"]
        return None

    def _read_control(self, *, block: bool) -> list[dict[str, int]]:
        """Read what the nursery says; remember the exit codes of workers."""
        try:
            data = self._control.recv(1 << 16, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._alive = False
            if not block:
                # A dead nursery stays readable forever.
                self._restart_nursery()
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[dict[str, int]] = [json.loads(line) for line in lines]
        self._codes.update({m["ended"]: m["code"] for m in messages if "ended" in m})
        return messages

    def _describe_end(self, worker: LocalWorker) -> str:
        deadline = time.monotonic() + STATUS_SECONDS
        while worker.pid not in self._codes and time.monotonic() < deadline and self._alive:
            if wait([self._control], 0.05):
                self._read_control(block=False)
        code = self._codes.get(worker.pid)
        if code is None:
            return "ended unexpectedly"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"
