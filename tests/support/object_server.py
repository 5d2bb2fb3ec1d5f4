"""An S3 server on loopback for tests: moto, or the server that `TOKENMILL_S3` names; and a proxy that injects faults.

moto runs in its own virtual environment, because its dependencies clash with ours; it is installed at first use.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import hmac
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".interop" / "moto"
PACKAGES = ["moto[server,s3]>=5.0.20"]
KEYS = {
    "AWS_ACCESS_KEY_ID": "tokenmill",
    "AWS_SECRET_ACCESS_KEY": "tokenmill-secret",
    "AWS_REGION": "us-east-1",
}


class Unavailable(Exception):
    """No server is installed, and none can be."""


def moto_server() -> Path:
    """The program of the server; installs it if necessary."""
    program, ready = HOME / "bin" / "moto_server", HOME / "ready"
    HOME.parent.mkdir(exist_ok=True)
    with Path(f"{HOME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != repr(PACKAGES):
            try:
                subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
                pip = [str(HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries", "1", *PACKAGES]
                subprocess.run(pip, check=True, timeout=240)
            except (subprocess.SubprocessError, OSError) as error:
                raise Unavailable(f"moto cannot be installed: {error}") from None
            ready.write_text(repr(PACKAGES))
    return program


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve_moto() -> Iterator[str]:
    """Run a server for the duration of the block; gives its address."""
    port = free_port()
    command = [str(moto_server()), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Unavailable(f"the server ended with code {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise Unavailable("the server does not answer")


def make_bucket(endpoint: str, name: str) -> None:
    """Create a bucket. obstore has no call for it, so the request is signed here."""
    host = endpoint.removeprefix("http://")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    environment = {**KEYS, **os.environ}
    region, empty = environment["AWS_REGION"], hashlib.sha256(b"").hexdigest()
    signed = "host;x-amz-content-sha256;x-amz-date"
    headers = f"host:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{now}\n"
    asked = hashlib.sha256(f"PUT\n/{name}\n\n{headers}\n{signed}\n{empty}".encode()).hexdigest()
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    key = f"AWS4{environment['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{asked}".encode(), "sha256").hex()
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    request.add_header("x-amz-date", now)
    request.add_header("x-amz-content-sha256", empty)
    credential = f"{environment['AWS_ACCESS_KEY_ID']}/{scope}"
    request.add_header(
        "Authorization", f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={signed}, Signature={signature}"
    )
    urllib.request.urlopen(request, timeout=30).read()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of the server that `TOKENMILL_S3` names, or of moto."""
    if (given := os.environ.get("TOKENMILL_S3")) is not None:
        yield given
        return
    try:
        with serve_moto() as endpoint:
            yield endpoint
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of a new bucket; the environment has its server and its keys, and a new cache."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "TOKENMILL_CACHE"))]:
        if "TOKENMILL_S3" not in os.environ:
            monkeypatch.delenv(name)
    if "TOKENMILL_S3" not in os.environ:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    name = f"test-{os.urandom(6).hex()}"
    make_bucket(s3_server, name)
    return f"s3://{name}"


@pytest.fixture
def faulty(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server; it injects faults when a test asks for them."""
    with FaultyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def shorten_retries(monkeypatch: pytest.MonkeyPatch, seconds: float | None = None) -> None:
    """Have obstore retry once, so that our own retries handle outages of a second; they give up after `seconds`."""
    monkeypatch.setattr("tokenmill.remote.client.OBSTORE_RETRIES", 1)
    monkeypatch.setattr("tokenmill.remote.client.FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("tokenmill.remote.client.LONGEST_PAUSE_SECONDS", 0.3)
    if seconds is not None:
        monkeypatch.setattr("tokenmill.remote.client.RETRY_SECONDS", seconds)


FAULTS = ("500", "503", "reset", "truncate", "short", "lost")
"""Server errors; a connection that closes without an answer or in the middle of a body; a complete body that is shorter
than the range; and an answer that gets lost after the request was performed."""


class FaultyProxy:
    """Forwards requests, injects faults into some of the answers, and counts both.

    `faults` may also have `hang`: no answer until the client gives up. A request fails with the probability `rate`,
    and at most twice in a row, so that a retry succeeds; `fail_for` makes every request fail for a while.
    """

    def __init__(self, upstream: str, *, rate: float = 0.0, faults: tuple[str, ...] = FAULTS, seed: int = 0) -> None:
        host, port = upstream.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self.rate = rate
        self.faults = faults
        self.delay = 0.0
        """Seconds before every answer."""
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0
        self._outage = (0.0, "none")
        self._random = random.Random(seed)
        self._num_failed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_open = True
        self._listen(0)
        self._port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        self._is_open = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._is_open:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            reader = client.makefile("rb")
            while True:
                try:
                    request = _read_message(reader)
                    if request is None or not self._answer(client, *request):
                        return
                except OSError:
                    return

    def fail_for(self, seconds: float, fault: str) -> None:
        """Answer every request with this fault from now on, for so long."""
        self._outage = (time.monotonic() + seconds, fault)

    def replace_fault(self, fault: str) -> None:
        """Continue with another fault until the end of `fail_for`."""
        self._outage = (self._outage[0], fault)

    def refuse_for(self, seconds: float) -> None:
        """Refuse new connections from now on, for so long."""
        self.close()
        self._is_open = True
        threading.Timer(seconds, self._listen, (self._port,)).start()

    def _choose(self, line: str) -> str:
        with self._lock:
            self.counts[line.split(" ")[0]] += 1
            if time.monotonic() < self._outage[0]:
                self.counts[self._outage[1]] += 1
                return self._outage[1]
            if self._num_failed[line] >= 2 or self._random.random() >= self.rate:
                self._num_failed[line] = 0
                return "none"
            self._num_failed[line] += 1
            fault = self._random.choice(self.faults)
            self.counts[fault] += 1
            return fault

    def _answer(self, client: socket.socket, head: bytes, body: bytes) -> bool:
        """Whether the connection stays open."""
        if self.delay:
            time.sleep(self.delay)
        fault = self._choose(head.split(b"\r\n")[0].decode() + _range_of(head))
        if fault == "500" or fault == "503":
            code = "InternalError" if fault == "500" else "SlowDown"
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            client.sendall(b"HTTP/1.1 %s Sorry\r\nContent-Length: %d\r\n\r\n" % (fault.encode(), len(text)) + text)
            return True
        if fault == "reset":
            return False
        if fault == "hang":
            client.settimeout(60)
            while client.recv(1 << 16):
                pass
            return False
        head_back, body_back = self._forward(head, body)
        if fault == "lost":
            return False
        with self._lock:
            self.num_bytes += len(body_back)
        if fault == "truncate" and body_back:
            client.sendall(head_back + body_back[: len(body_back) // 2])
            return False
        if fault == "short" and len(body_back) > 1 and b" 206 " in head_back.split(b"\r\n")[0] + b" ":
            body_back = body_back[: len(body_back) // 2]
            head_back = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % len(body_back), head_back)
        client.sendall(head_back + body_back)
        return True

    def _forward(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with socket.create_connection(self._upstream, 60) as server:
            server.sendall(
                re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
                + body
            )
            reader = server.makefile("rb")
            answer = _read_message(reader, without_body=head.startswith(b"HEAD "))
        if answer is None:
            return b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", b""
        head_back = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", answer[0])
        return head_back, answer[1]


def _range_of(head: bytes) -> str:
    found = re.search(rb"(?i)\r\nrange: *([^\r]*)", head)
    return " " + found.group(1).decode() if found else ""


def _read_message(reader: object, *, without_body: bool = False) -> tuple[bytes, bytes] | None:
    """The head and the body of one request or answer; chunks of a body are joined under a length of their own."""
    lines = [reader.readline()]  # type: ignore[attr-defined]
    if not lines[0]:
        return None
    while lines[-1] not in (b"\r\n", b"\n", b""):
        lines.append(reader.readline())  # type: ignore[attr-defined]
    head = b"".join(lines)
    if without_body or b" 204 " in lines[0] or b" 304 " in lines[0] or b" 100 " in lines[0]:
        return head, b""
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if length is not None:
        return head, reader.read(int(length.group(1)))  # type: ignore[attr-defined]
    if not re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        return head, b""
    body = b""
    while size := int(reader.readline(), 16):  # type: ignore[attr-defined]
        body += reader.read(size)  # type: ignore[attr-defined]
        reader.readline()  # type: ignore[attr-defined]
    reader.readline()  # type: ignore[attr-defined]
    head = re.sub(rb"(?i)\r\ntransfer-encoding: *chunked", b"\r\nContent-Length: %d" % len(body), head)
    return head, body
