"""The process that workers are forked from: `python -m tokenmill.executors.nursery FD NICENESS`.

Imports and a loaded tokenizer cost half a second and a hundred megabytes; paid once here, every
worker shares them. Unlike multiprocessing's fork server it never imports the caller's main
module, so `tokenmill.tokenize` works in a script without a main guard.

It obeys one JSON line at a time on a socket: `warm` calls a function, `fork` starts a worker
whose channel comes along as a file descriptor. It answers with the worker's pid, and reports
each worker's end. It ends when the socket closes, and a worker ends when its channel does.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

from tokenmill.executors.base import resolve

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve requests until the other side is gone."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    descriptors: list[int] = []
    while True:
        ready, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_deaths(control)
        if control.fileno() in ready:
            try:
                data, received, _, _ = socket.recv_fds(control, 1 << 16, 16)
            except ConnectionResetError:
                data = b""
            if not data:
                os._exit(0)
            descriptors += received
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), descriptors, control, (wake_read, wake_write))


def _obey(request: dict[str, str], descriptors: list[int], control: socket.socket, own: tuple[int, int]) -> None:
    if request["do"] == "warm":
        resolve(request["target"])(request["payload"].encode())
        # What exists now is shared with every worker: keep the collector from touching it.
        gc.collect()
        gc.freeze()
        return
    channel = descriptors.pop(0)
    pid = os.fork()
    if pid == 0:
        control.close()
        for descriptor in own:
            os.close(descriptor)
        for descriptor in descriptors:
            os.close(descriptor)
        _live(request, channel)
    os.close(channel)
    _send(control, {"started": pid})


def _live(request: dict[str, str], descriptor: int) -> None:
    """Be a worker until its function returns or its channel hangs up."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=_exit_on_hangup, args=(descriptor,), daemon=True).start()
        channel = Connection(descriptor)
        resolve(request["target"])(channel, channel.recv_bytes())
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_on_hangup(descriptor: int) -> None:
    """End this process when the run that started it is gone, whatever it is doing."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    poller.poll()
    os._exit(1)


def _report_deaths(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, int]) -> None:
    try:
        control.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        # The run is gone, and its workers know by themselves.
        os._exit(0)


if __name__ == "__main__":
    os.nice(int(sys.argv[2]))
    main(int(sys.argv[1]))
