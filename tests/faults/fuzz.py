"""Fuzz the readers of files and the C code with atheris (libFuzzer), guided by the coverage of our Python.

    python tests/faults/fuzz.py [--minutes 10] [--keep] [TARGET ...]

Targets and what they are compared with are in `fuzz_targets.py`, those of the C code in `fuzz_compiled.py`. Each runs in a process of its own, two at a time, with
atheris from `.interop/atheris`. An input with a finding is written to build/fuzz/TARGET. With `--keep`, the shortest
inputs that reached something new are written to the corpus beside this file, which `make test` runs too.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
CORPUS = HERE / "corpus"
BUILD = ROOT / "build" / "fuzz"
ATHERIS = ROOT / ".interop" / "atheris"
NAMES = ("jsonl", "streams", "index", "manifest", "state", "lines", "words", "unigram")
KEPT_BYTES = 24_000
"""The size of each corpus in the repository; longer inputs are left out first."""
LIMITS = ["-max_len=6000", "-timeout=30", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=1"]


def fuzz(name: str) -> None:
    """Run libFuzzer in this process; its own arguments follow the name of the target."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["tokenmill", "json"]):
        from tests.faults import fuzz_targets
    for number, data in enumerate([*fuzz_targets.seeds(name), *fuzz_targets.kept(name)]):
        (BUILD / name / "work" / f"seed-{number:03d}").write_bytes(data)
    atheris.Setup([sys.argv[0], *sys.argv[3:]], fuzz_targets.TARGETS[name])
    atheris.Fuzz()


def start(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run one fuzzing process to its end."""
    paths = os.pathsep.join(map(str, (ATHERIS, ROOT / "src", ROOT)))
    command = [sys.executable, __file__, "--one", name, *flags, f"-artifact_prefix={BUILD / name}/", *LIMITS]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=BUILD / name, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(name: str, minutes: float, keep: bool) -> tuple[int, int, str]:
    """Fuzz one target; return how many inputs were tried, how many findings there were, and a line about it."""
    work = BUILD / name / "work"
    work.mkdir(parents=True, exist_ok=True)
    done = start(name, f"-max_total_time={int(60 * minutes)}", str(work))
    (BUILD / name / "log.txt").write_text(done.stdout)
    tried = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stdout)
    reached = re.findall(r"cov: (\d+)", done.stdout)
    num_findings = int(done.returncode != 0)
    if num_findings:
        print(f"FINDING {name}:\n{done.stdout[-4000:]}", flush=True)
    elif keep:
        keep_corpus(name)
    count = int(tried[1]) if tried else 0
    return count, num_findings, f"{name:<10} {count:>11,} inputs  {reached[-1] if reached else 0:>6} edges"


def keep_corpus(name: str) -> None:
    """Keep the shortest inputs that reached new code; the fuzzer saved no others."""
    found = [path.read_bytes() for path in (BUILD / name / "work").iterdir() if not path.name.startswith("seed-")]
    kept = []
    for data in sorted(set(found), key=lambda data: (len(data), data)):
        if sum(map(len, kept)) + len(data) <= KEPT_BYTES:
            kept.append(data)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(base64.b64encode(data).decode() + "\n" for data in kept))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=10, help="for each target")
    parser.add_argument("--keep", action="store_true", help="replace the corpus by the one that was found")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(NAMES):
        parser.error(f"there is no target {min(unknown)}; there are {', '.join(NAMES)}")
    if not (ATHERIS / "atheris").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(ATHERIS)]
        subprocess.run([*command, "atheris>=3"], check=True)

    from tests.faults._tally import Tally

    tally = Tally("fuzz")
    lines = []
    with ThreadPoolExecutor(2) as pool:
        for count, findings, line in pool.map(
            lambda name: run(name, arguments.minutes, arguments.keep), arguments.targets or NAMES
        ):
            tally.num_cases += count
            tally.num_findings += findings
            lines.append(line)
            print(line, flush=True)
    if not tally.num_findings:
        keep_lines([f"{line}  {arguments.minutes:g} minutes" for line in lines])
    tally.end()


def keep_lines(lines: list[str]) -> None:
    """Write the figures of targets without a finding; those of targets that were not run this time stay."""
    path = HERE / "results" / "fuzz.txt"
    path.parent.mkdir(exist_ok=True)
    known = path.read_text().splitlines() if path.exists() else []
    kept = {line.split()[0]: line for line in [*known, *lines]}
    path.write_text("".join(f"{kept[name]}\n" for name in NAMES if name in kept))


if __name__ == "__main__":
    main()
