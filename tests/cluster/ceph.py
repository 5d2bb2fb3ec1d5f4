"""A small Ceph on loopback, and the tests of object stores against its S3 gateway; prints a tally.

    python tests/cluster/ceph.py [pytest arguments]

One monitor, one OSD that keeps everything in memory, and one gateway, from Debian's packages (ceph-mon ceph-osd radosgw
ceph-common), in a temporary folder that is removed with them. They listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"ceph-mon": "ceph-mon", "ceph-osd": "ceph-osd", "radosgw": "radosgw", "ceph": "ceph-common"}
SUITE = [
    "remote/test_requests.py",
    "store/test_remote_store.py",
    "inputs/test_object_inputs.py",
    "pipeline/test_object_outputs.py",
]
START_SECONDS = 120
KEYS = {"access": "tokenmill", "secret": "tokenmill-secret"}
# Without authentication the monitor's clients must be told that a connection may be plain.
SETTINGS = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind port min = {osd_port}
ms bind port max = {last_port}
ms mon client mode = crc secure
ms mon service mode = crc secure
ms mon cluster mode = crc secure
auth cluster required = none
auth service required = none
auth client required = none
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
osd crush update on start = true
mon allow pool size one = true
mon osd full ratio = 0.99
mon data avail crit = 1
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
log to stderr = false
mon cluster log file = {folder}/cluster.log
rgw frontends = beast endpoint=127.0.0.1:{gateway_port}
rgw thread pool size = 64
rgw enable ops log = false
"""


def free_ports(count: int) -> int:
    """The first of several consecutive ports that are free."""
    for first in range(21_000 + os.getpid() % 5_000, 60_000, count):
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    probe = sockets.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise SystemExit("no free ports")


class Ceph:
    """Start its processes, and end them with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        first = free_ports(24)
        self.endpoint = f"http://127.0.0.1:{first + 1}"
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        self._fsid = str(uuid.uuid4())
        self._conf = folder / "ceph.conf"
        self._mon_port = first
        self._conf.write_text(
            SETTINGS.format(
                fsid=self._fsid,
                folder=folder,
                mon_port=first,
                gateway_port=first + 1,
                osd_port=first + 2,
                last_port=first + 23,
            )
        )

    def start(self) -> None:
        """The monitor, then the OSD, then the gateway and a user of it."""
        monmap = self._folder / "monmap"
        where = f"[v2:127.0.0.1:{self._mon_port}/0]"
        self._call("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", where, str(monmap))
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
        self._launch("ceph-mon", "-f", "-i", "a")
        self._wait_for(lambda: self._ceph("quorum_status"), "the monitor")
        identity = str(uuid.uuid4())
        self._ceph("osd", "new", identity)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
        self._launch("ceph-osd", "-f", "-i", "0")
        self._wait_for(lambda: json.loads(self._ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1, "the OSD")
        self._launch("radosgw", "-f", "-n", "client.gateway")
        port = int(self.endpoint.rpartition(":")[2])
        self._wait_for(lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True, "the gateway")
        keys = ("--access-key", KEYS["access"], "--secret-key", KEYS["secret"])
        self._call("radosgw-admin", "user", "create", "--uid", "tester", "--display-name", "tester", *keys)

    def close(self) -> None:
        """End the processes, the last one first."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ceph(self, *arguments: str) -> str:
        return self._call("ceph", "--connect-timeout", "5", *arguments)

    def _call(self, program: str, *arguments: str) -> str:
        command = [program, "--conf", str(self._conf), *arguments]
        if program == "monmaptool":
            command = [program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
        return done.stdout

    def _launch(self, program: str, *arguments: str) -> None:
        command = [program, "--conf", str(self._conf), *arguments]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def _wait_for(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        problem: object = "it does not answer"
        while time.monotonic() < deadline:
            if self._processes[-1].poll() is not None:
                problem = f"it ended with code {self._processes[-1].returncode}"
                break
            try:
                if condition():  # type: ignore[operator]
                    return
            except (OSError, subprocess.SubprocessError) as error:
                problem = error
            time.sleep(0.3)
        logs = "\n".join(path.read_text()[-1500:] for path in self._folder.glob("*.log"))
        raise SystemExit(f"{what} did not start: {problem}\n{logs}")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a new gateway."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise SystemExit(
            f"Ceph is not installed: apt-get install --no-install-recommends {' '.join(PROGRAMS.values())}"
        )
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-ceph-"))
    ceph = Ceph(folder)
    try:
        ceph.start()
        yield ceph.endpoint
    finally:
        ceph.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    started = time.monotonic()
    with serving() as endpoint:
        print(f"Ceph answers at {endpoint} after {time.monotonic() - started:.0f} s", flush=True)
        environment = {
            **os.environ,
            "TOKENMILL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": KEYS["access"],
            "AWS_SECRET_ACCESS_KEY": KEYS["secret"],
            "AWS_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        tests = sys.argv[1:] or [str(ROOT / "tests" / name) for name in SUITE]
        command = [sys.executable, "-m", "pytest", "-n", "0", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, end="")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    print(f"Ceph RGW: {counts.get('passed', 0)} passed, {failed} failed, {counts.get('skipped', 0)} skipped")
    sys.exit(1 if done.returncode or not counts.get("passed") else 0)


if __name__ == "__main__":
    main()
