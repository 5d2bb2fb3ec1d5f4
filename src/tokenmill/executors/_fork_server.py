"""The process that workers are forked from: `python -m tokenmill.executors._fork_server FD NICENESS`.

Imports and a loaded tokenizer cost half a second and a hundred megabytes; paid once here, every worker shares them.
Unlike multiprocessing's fork server, this one never imports the caller's main module, so `tokenmill.tokenize` works in
a script without a main guard; it can load an engine before it forks; and it reports how each worker ended.

It reads one JSON line at a time from a socket: `warm` calls a function, `fork` starts a worker whose channel comes
along as a file descriptor. It answers with the worker's pid, and reports each worker's end. It ends when the socket
closes, and a worker ends when its channel does.
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
    """Serve requests until the other side closes the connection."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    descriptors: list[int] = []
    # Not `select.select`, which fails for a descriptor above 1,023: the program may have that many files open.
    poller = select.poll()
    for watched in (control.fileno(), wake_read):
        poller.register(watched, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
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
                _handle(json.loads(line), descriptors, control, (wake_read, wake_write))


def _handle(request: dict[str, str], descriptors: list[int], control: socket.socket, own: tuple[int, int]) -> None:
    if request["do"] == "warm":
        resolve(request["target"])(request["payload"].encode())
        # Workers share the objects that exist now: keep the garbage collector from writing to them.
        gc.freeze()
        return
    channel = descriptors.pop(0)
    pid = os.fork()
    if pid == 0:
        control.close()
        for descriptor in (*own, *descriptors):
            os.close(descriptor)
        _process_main(channel)
    os.close(channel)
    _send(control, {"started": pid})


def _process_main(descriptor: int) -> None:
    """Run calls until the channel hangs up."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=_exit_on_hangup, args=(descriptor,), daemon=True).start()
        _run_calls(Connection(descriptor))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_calls(channel: Connection) -> None:
    """Receive a context (`c...`) and then calls (`rTARGET\\0PAYLOAD`); send notes (`n...`) and answers (`a...`)."""
    context = b""

    def post(data: bytes) -> None:
        channel.send_bytes(b"n" + data)

    while True:
        message = channel.recv_bytes()
        if message[:1] == b"c":
            context = message[1:]
            continue
        target, _, payload = message[1:].partition(b"\0")
        channel.send_bytes(b"a" + resolve(target.decode())(post, context, payload))


def _exit_on_hangup(descriptor: int) -> None:
    """End this process at once when the run that started it is gone."""
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
        # The run is gone, and its workers notice it by themselves.
        os._exit(0)


if __name__ == "__main__":
    os.nice(int(sys.argv[2]))
    main(int(sys.argv[1]))
