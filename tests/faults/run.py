"""Run the fault tests one after the other, print a table, and keep it.

    python tests/faults/run.py [--all] [--list] [--patience N] [NAME ...]

Each test is a program whose last line is its tally: `NAME: N cases, F findings, T s`. Results are written to
tests/faults/results: `table.txt`, `faults.json`, and what a test with findings printed as `NAME.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
TALLY = re.compile(r"^\S+: ([\d,]+) cases, (\d+) findings, \d+ s$")
PYTEST = re.compile(r"^=* ?(?:(\d+) failed, )?(\d+) passed.* in [\d.]+s")
STORES = re.compile(r"^all (\d+) stores equal .*, \d+ s$")


@dataclass(frozen=True)
class FaultTest:
    """One program, what it proves, and how long it may take."""

    name: str
    command: str
    proves: str
    minutes: int = 6
    only_with_all: bool = False


TESTS = (
    FaultTest("kills", "kills.py --runs 200", "kills at random instants", 10),
    FaultTest("kill_every", "operations.py kill-group kill-one", "a kill before each file operation", 10),
    FaultTest("fail_every", "operations.py eio enospc", "each file operation fails once", 10),
    FaultTest("short_every", "operations.py eintr short", "interrupted calls, short writes", 10),
    FaultTest("power_cuts", "power_cuts.py", "torn, lost and reordered writes", 10),
    FaultTest("missing_files", "missing_files.py", "files cut short or deleted"),
    FaultTest("two_writers", "two_writers.py", "several runs on one store"),
    FaultTest("stopped", "stopped.py", "processes stopped and continued"),
    FaultTest("limits", "limits.py", "few descriptors, little memory, no locks"),
    FaultTest("loader_kills", "loader_kills.py", "ranks killed, world sizes changed"),
    FaultTest("bit_flips", "bit_flips.py", "flipped bits are found", 6),
    FaultTest("hostile_stores", "hostile_stores.py", "hostile stores are refused"),
    FaultTest("hostile_tokenizers", "hostile_tokenizers.py", "hostile tokenizers are refused"),
    FaultTest("bombs", "bombs.py", "inputs that explode are refused"),
    FaultTest("replaced_stores", "replaced_stores.py", "stores replaced while they are open"),
    FaultTest("object_store", "-m pytest tests/remote -v --tb=short", "broken answers, retries"),
    FaultTest("sanitizers", "sanitizers.py", "the C code under ASan and UBSan", 8, only_with_all=True),
    FaultTest("slurm", "../cluster/slurm.py", "jobs killed and requeued", 30, only_with_all=True),
    FaultTest("ray", "-m tests.cluster.ray_faults --rounds 3", "workers, nodes killed", 30, only_with_all=True),
)


@dataclass
class Result:
    """How one test went; no cases if it gave no tally."""

    name: str
    cases: int
    findings: int
    seconds: float
    verdict: str


def run_test(test: FaultTest, patience: float) -> Result:
    """Run one test with a time limit of `patience` times its usual time; its processes end with it."""
    first, *rest = test.command.split()
    if first != "-m":
        if not (HERE / first).exists():
            return Result(test.name, 0, 0, 0.0, "not here")
        first = str(HERE / first)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, first, *rest], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=60 * test.minutes * patience)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output += f"\nstopped after {test.minutes * patience:g} minutes\n"
    seconds = time.monotonic() - started
    cases, findings = read_tally(output)
    sound = process.returncode == 0 and cases > 0 and findings == 0
    log = RESULTS / f"{test.name}.log"
    log.unlink(missing_ok=True)
    if not sound:
        log.write_text(output[-20_000:])
    return Result(test.name, cases, findings, round(seconds, 1), "sound" if sound else "FAILED")


def read_tally(output: str) -> tuple[int, int]:
    """Cases and findings of the last line; no cases if it is not a tally."""
    last = output.strip().rpartition("\n")[2]
    if found := TALLY.match(last):
        return int(found[1].replace(",", "")), int(found[2])
    if found := PYTEST.match(last):
        return int(found[1] or 0) + int(found[2]), int(found[1] or 0)
    if found := STORES.match(last):
        return int(found[1]), 0
    return 0, 0


def line(name: object, cases: object, findings: object, seconds: object, verdict: object, proves: object) -> str:
    """A line of the table, 80 columns at most."""
    return f"{name:<18} {cases:>6} {findings:>8} {seconds:>5}  {verdict:<8} {proves}"[:80].rstrip()


HEAD = line("test", "cases", "findings", "s", "verdict", "proves")


def describe(result: Result, test: FaultTest) -> str:
    return line(result.name, result.cases, result.findings, round(result.seconds), result.verdict, test.proves)


def keep(results: list[Result]) -> None:
    """Write results; those of tests that were not run this time stay as they are."""
    path = RESULTS / "faults.json"
    known = {one["name"]: one for one in json.loads(path.read_text())["tests"]} if path.exists() else {}
    known |= {result.name: asdict(result) for result in results}
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    tests = [known[test.name] for test in TESTS if test.name in known]
    path.write_text(json.dumps({"machine": machine, "tests": tests}, indent=1) + "\n")
    described = {test.name: test for test in TESTS}
    table = [describe(Result(**one), described[one["name"]]) for one in tests]
    (RESULTS / "table.txt").write_text("\n".join([machine, "", HEAD, *table, total(tests)]) + "\n")


def total(tests: list[dict[str, Any]]) -> str:
    cases, findings = sum(one["cases"] for one in tests), sum(one["findings"] for one in tests)
    return f"{cases:,} cases, {findings} findings, {sum(one['seconds'] for one in tests) / 60:.0f} minutes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these tests")
    parser.add_argument("--all", action="store_true", help="also what needs Slurm and Ray")
    parser.add_argument("--patience", type=float, default=1, help="how many times the usual time a test may take")
    parser.add_argument("--list", action="store_true", help="list the tests and run none")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {test.name for test in TESTS}
    if unknown:
        parser.error(f"there is no test {min(unknown)}; see --list")
    chosen = [test for test in TESTS if test.name in arguments.names] if arguments.names else [
        test for test in TESTS if arguments.all or not test.only_with_all
    ]  # fmt: skip
    if arguments.list:
        print("\n".join(f"{test.name:<18} {test.proves}" for test in TESTS))
        return
    RESULTS.mkdir(exist_ok=True)
    print(HEAD, flush=True)
    results = []
    for test in chosen:
        results.append(run_test(test, arguments.patience))
        print(describe(results[-1], test), flush=True)
        keep(results)
    print(total([asdict(one) for one in results]))
    failed = [one.name for one in results if one.verdict == "FAILED"]
    if failed:
        sys.exit(f"{', '.join(failed)} failed; see tests/faults/results")


if __name__ == "__main__":
    main()
