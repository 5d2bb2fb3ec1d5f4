"""Calls in processes of this machine, forked from a warm fork server.

A process keeps what a call has loaded, and an idle one is given the next call. A call whose process dies is run
once more; a second death is reported, because the call may be what kills.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tokenmill.errors import TokenmillError
from tokenmill.executors.base import ONE_THREAD, Answer, Call, CallEvent, Capacity, Lost, Note, Place, Started

__all__ = ["LocalExecutor"]

STATUS_SECONDS = 2.0
PYTHON = sys.executable
MEMORY_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=268435456"
"""Huge pages if the system gives them on request, and no return of blocks of a megabyte to the system between two
batches: this saves 5% of a worker's time. Engines read their tables at random, so small pages would cost a TLB miss
each."""
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""The server must have no thread but its own when it forks, because a lock that another one holds stays locked in the
worker. pyarrow's allocator starts one on import, and OpenBLAS one per core unless told otherwise."""

_forking = threading.Lock()
"""Held while the other end of a new channel is open here: a process forked in between would keep it open."""
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release)


@dataclass(eq=False)
class LocalProcess:
    """A forked process, the channel to it, and the call that it runs."""

    place: Place
    connection: Connection
    context: bytes | None = None
    call: Call | None = None

    def start(self, call: Call) -> None:
        """Send a call. If the process has died, `wait` reports it."""
        with suppress(OSError):
            if call.context is not self.context:
                self.connection.send_bytes(b"c" + call.context)
                self.context = call.context
            self.connection.send_bytes(b"r" + call.target.encode() + b"\0" + call.payload)
        self.call = call

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            os.kill(self.place.pid, signal.SIGKILL)


class LocalExecutor:
    """Starts its fork server at once, so that imports overlap with planning; `niceness` lets other work go first."""

    shares_disk = True
    memory_per_call: int | None = None
    may_grow = False

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._pins: Sequence[int] = ()
        self._processes: dict[int, LocalProcess] = {}
        self._idle: list[LocalProcess] = []
        self._events: list[CallEvent] = []
        self._retried: set[Call] = set()
        self._codes: dict[int, int] = {}
        self._warmings: list[dict[str, str]] = []
        self._num_workers = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._start_server()

    def join(self, num_calls: int | None) -> None:
        """Start the fork server again, if the executor was closed."""
        if self._server is None:
            self._start_server()

    def pin(self, cpus: Sequence[int]) -> None:
        """Give each process that is started from now on one of these CPUs, in turn."""
        self._pins = cpus

    def warm(self, target: str, payload: bytes) -> None:
        """Let the fork server call a function; processes that are forked later share what it leaves in memory."""
        request = {"do": "warm", "target": target, "payload": payload.decode()}
        self._warmings.append(request)
        self._request(request)

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        """One call per core."""
        from tokenmill.machine import available_memory, usable_cores

        cores = usable_cores()
        return Capacity(cores, available_memory() // cores)

    def submit(self, call: Call, lost: str | None = None) -> None:
        """Run a call at once, in an idle process or in a new one; `lost` says what ended its first attempt."""
        process = self._idle.pop() if self._idle and not call.is_last else self._fork(call)
        process.start(call)
        self._events.append(Started(call, process.place, lost))

    def wait(self, timeout: float) -> list[CallEvent]:
        """Return what has happened; a loss comes after the last note of its process."""
        by_connection = {process.connection: process for process in self._processes.values()}
        control = self._control
        for ready in wait([*by_connection, control], 0.0 if self._events else timeout):
            if ready is control:
                # Asking how a process ended may have started a new fork server in the meantime.
                if control is self._control:
                    self._read_control(block=False)
                continue
            self._receive(by_connection[ready])  # type: ignore[index]
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Kill all processes and the fork server, and wait until they are gone."""
        for process in self._processes.values():
            process.kill()
        deadline = time.monotonic() + STATUS_SECONDS
        while any(map(self._lives, self._processes)) and time.monotonic() < deadline:
            if self._alive and wait([self._control], 0.05):
                self._read_control(block=True)
            elif not self._alive:
                time.sleep(0.01)
        for process in self._processes.values():
            process.connection.close()
        self._processes, self._idle, self._events, self._retried = {}, [], [], set()
        self._stop_server()

    def _receive(self, process: LocalProcess) -> None:
        try:
            data = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._remove(process)
            return
        call = process.call
        assert call is not None
        if data[:1] == b"n":
            self._events.append(Note(call, data[1:]))
            return
        self._events.append(Answer(call, data[1:]))
        self._retried.discard(call)
        process.call = None
        if call.is_last:
            process.kill()
        else:
            self._idle.append(process)

    def _remove(self, process: LocalProcess) -> None:
        """Forget a process that has ended, and run its call again, once."""
        del self._processes[process.place.pid]
        process.connection.close()
        call = process.call
        if call is None:
            if process in self._idle:
                self._idle.remove(process)
            return
        how = f"was lost with {process.place}, which {self._describe_end(process.place.pid)}"
        if call in self._retried:
            self._retried.discard(call)
            self._events.append(Lost(call, f"{how}, the last of 2 attempts"))
        else:
            self._retried.add(call)
            self.submit(call, how)

    def _fork(self, call: Call) -> LocalProcess:
        """Fork a process from the server, which is restarted if it was killed."""
        for attempt in (1, 2):
            with _forking:
                ours, theirs = socket.socketpair()
                self._request({"do": "fork"}, theirs.fileno())
                theirs.close()
            pid = self._read_until_started()
            if pid is not None:
                # The system may have reused the process id of an earlier one.
                self._codes.pop(pid, None)
                process = LocalProcess(self._name(pid, call), Connection(ours.detach()))
                self._processes[pid] = process
                return process
            ours.close()
            if attempt == 1:
                self._start_server()
        raise TokenmillError("no worker process could be started; run the same command again to continue")

    def _name(self, pid: int, call: Call) -> Place:
        if call.is_last:
            return Place("", pid, "a helper")
        self._num_workers += 1
        if self._pins:
            with suppress(OSError):
                os.sched_setaffinity(pid, {self._pins[(self._num_workers - 1) % len(self._pins)]})
        return Place("", pid, f"worker {self._num_workers}")

    def _start_server(self) -> None:
        """Start the server, or replace the one before."""
        self._stop_server()
        with _forking:
            ours, theirs = socket.socketpair()
            arguments = [str(theirs.fileno()), str(self._niceness)]
            command = [PYTHON, "-m", "tokenmill.executors._fork_server", *arguments]
            environment = {"GLIBC_TUNABLES": MEMORY_TUNABLES, **os.environ, **ONE_THREAD, **SINGLE_THREADED}
            # Block SIGINT until the server ignores it, or Ctrl-C could print a traceback while it starts.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self._server = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()
        self._control = ours
        self._buffer = b""
        self._alive = True
        for request in self._warmings:
            self._request(request)

    def _stop_server(self) -> None:
        """Kill the server. Waiting for it to end by itself would mean waiting for its imports."""
        if self._server is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
            self._server = None

    def _lives(self, pid: int) -> bool:
        """Whether a killed process is still there; if the server is dead, ask the system."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return pid not in self._codes

    def _request(self, request: dict[str, str], *descriptors: int) -> None:
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
        """Read what the server says, and remember the exit codes of processes."""
        try:
            data = self._control.recv(1 << 16, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._alive = False
            if not block:
                # The socket of a dead server stays readable forever.
                self._start_server()
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[dict[str, int]] = [json.loads(line) for line in lines]
        self._codes.update({m["ended"]: m["code"] for m in messages if "ended" in m})
        return messages

    def _describe_end(self, pid: int) -> str:
        deadline = time.monotonic() + STATUS_SECONDS
        while pid not in self._codes and time.monotonic() < deadline and self._alive:
            if wait([self._control], 0.05):
                self._read_control(block=False)
        code = self._codes.get(pid)
        if code is None:
            return "ended unexpectedly"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"
