"""Run with few descriptors, little address space, small files, hardly any shared memory, no locks, clocks that jump.

    python tests/faults/limits.py

A run finishes the store or ends with a sentence. Without the limit, the same command then gives the bytes of an
undisturbed run.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim
from tests.faults._tally import Tally

DESCRIPTORS = (12, 16, 20, 24, 28, 32, 48, 64, 128, 256)
ADDRESS_SPACE = (230, 240, 260, 300, 400, 600, 1000, 2000, 4000)
"""In megabytes. Below about 220, importing pyarrow or starting a thread fails, which still shows a traceback."""
FILE_SIZES = (100, 300, 1000, 2000, 2500, 3000, 10_000)
SHARED_MEMORY = ("size=4k", "size=64k", "size=1m", "ro")
CLOCKS = (3600, -3600, 86_400 * 365, -86_400 * 365)


class Limits:
    """Runs under one limit each, compared with one that has none."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self._tally = tally
        self._inputs = _shim.make_corpus(folder / "corpus")
        self._out = folder / "out"
        self._command = _shim.command(self._inputs, self._out, "--task-bytes", "2000")
        done = _shim.run(self._command)
        assert done.code == 0, done.said
        self._expected = _shim.snapshot(self._out)

    def case(self, what: str, run: Callable[[], _shim.Run], *, may_fail: bool = True) -> None:
        """One run with a limit and, if it failed, one without."""
        shutil.rmtree(self._out, ignore_errors=True)
        first = run()
        finding = first.complaint()
        if first.code and not finding:
            self._tally.note("runs that ended with a sentence")
            if not may_fail:
                finding = f"exit code {first.code}: {first.said[-500:]}"
            elif "error: " not in first.said:
                finding = f"exit code {first.code} without a sentence: {first.said[-500:]}"
        if first.code and not finding:
            again = _shim.run(self._command)
            finding = again.complaint() or (f"then {again.code}: {again.said[-500:]}" if again.code else "")
        self._tally.case(what, finding or _shim.difference(self._expected, self._out))

    def resources(self) -> None:
        """Descriptors, address space, sizes of files."""
        for kind, what, values, unit in (
            (resource.RLIMIT_NOFILE, "descriptors", DESCRIPTORS, 1),
            (resource.RLIMIT_AS, "MB of address space", ADDRESS_SPACE, 1_000_000),
            (resource.RLIMIT_FSIZE, "bytes a file", FILE_SIZES, 1),
        ):
            for value in values:
                # Set both limits, as an administrator does: a process may raise the soft limit alone.
                pair = (value * unit, value * unit)
                self.case(
                    f"{value} {what}",
                    lambda kind=kind, pair=pair: _shim.run(  # type: ignore[misc]
                        self._command, preexec_fn=lambda: resource.setrlimit(kind, pair)
                    ),
                )

    def shared_memory(self) -> None:
        """/dev/shm of a size, in a namespace of mounts of its own, if this machine allows that."""
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            self._tally.note("shared memory: no namespaces here")
            return
        for options in SHARED_MEMORY:
            mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
            command = ["unshare", "-rm", "sh", "-c", mount, "sh", *self._command]
            self.case(f"/dev/shm {options}", lambda command=command: _shim.run(command), may_fail=False)  # type: ignore[misc]

    def system(self) -> None:
        """No locks; clocks that jump between two readings."""
        root = self._out.parent
        self.case("no locks", lambda: _shim.run_disturbed(self._command, root, locks=1), may_fail=False)
        for seconds in CLOCKS:
            self.case(
                f"clock jumps by {seconds} s",
                lambda seconds=seconds: _shim.run_disturbed(self._command, root, clock=seconds),  # type: ignore[misc]
                may_fail=False,
            )


def main() -> None:
    tally = Tally("limits")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        limits = Limits(Path(folder), tally)
        limits.resources()
        limits.shared_memory()
        limits.system()
    tally.end()


if __name__ == "__main__":
    main()
