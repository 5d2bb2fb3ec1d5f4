"""Run the tests of the C code with AddressSanitizer and UndefinedBehaviorSanitizer compiled into it.

    python tests/faults/sanitizers.py

The package is built into build/sanitizers, so that the module of every other run stays as it is, and tests import it
from there. The library of the sanitizer is preloaded, because the interpreter itself was compiled without it. Leaks
are not looked for at exit, where the interpreter still holds much of its own; `test_failing_allocations.py` and
`tests/filling/test_kernels.py` look for them. The targets of the fuzzer for the C code get mutants of their inputs, and
`shim.c` of the fault tests is run as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults import _shim, fuzz_compiled
from tests.faults._tally import Tally

ROOT = _shim.ROOT
BUILD = ROOT / "build" / "sanitizers"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
TESTS = ("tests/filling", "tests/dataset", "tests/loaders/test_loader.py", "tests/store", "tests/readers")
TESTS += ("tests/engines/test_word_cache.py", "tests/faults/test_failing_allocations.py")
# These measure time and memory, which the sanitizers double. JAX aborts under a sanitizer.
LEFT_OUT = "tests/dataset/test_scale.py"
CHOSEN = "not jax and not sharding and not memory and not speed"
FINDING = re.compile(r"AddressSanitizer|runtime error:|UndefinedBehaviorSanitizer")
# A row of 64 tokens and the target of the last one need 65 tokens.
PLANTED = """
import sys
import numpy as np
from tokenmill.filling import compiled
print(compiled.__file__)
tokens = np.arange(int(sys.argv[1]), dtype=np.uint16)
inputs, targets = np.zeros((1, 64), np.int64), np.zeros((1, 64), np.int64)
compiled.copy_rows(np.array([tokens.ctypes.data // 2 - 1]), 2, None, inputs, targets)
"""

SECONDS = 30
"""How long each target of the fuzzer gets mutants."""
MUTANTS = """
import random
import sys
import time
from tests.faults import fuzz_targets
name, seconds = sys.argv[1], float(sys.argv[2])
generator, known = random.Random(name), [*fuzz_targets.seeds(name), *fuzz_targets.kept(name)]
began, count = time.monotonic(), 0
while count < len(known) or time.monotonic() < began + seconds:
    data = bytearray(known[count] if count < len(known) else generator.choice(known))
    for _ in range(generator.randint(1, 6) if count >= len(known) else 0):
        at, end = sorted(generator.choices(range(len(data) + 1), k=2))
        new = generator.choice((generator.choice(known)[:40], generator.randbytes(1), b'{"}[]:,\\\\u\\n\\xff'))
        data[at : generator.choice((at, at + 1, end))] = new
    fuzz_targets.TARGETS[name](bytes(data))
    count += 1
print(count)
"""


def build() -> None:
    """Build the package with the sanitizers in a directory of its own."""
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(BUILD), "--build-lib"]
    flags = {"CFLAGS": FLAGS, "LDFLAGS": FLAGS}
    subprocess.run([*command, str(BUILD / "lib"), "--force"], cwd=ROOT, env={**os.environ, **flags}, check=True)


def environment() -> dict[str, str]:
    """Return the variables of a process whose C code is checked; the sanitizer sees every allocation."""
    library = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        **os.environ,
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": f"{BUILD / 'lib'}{os.pathsep}{ROOT}",
    }


def check_that_errors_are_seen(tally: Tally) -> None:
    """Check that a read past the end of an array is reported, and that correct code gives no report."""
    for num_tokens in (65, 64):
        command = [sys.executable, "-c", PLANTED, str(num_tokens)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        is_right = ("heap-buffer-overflow" in done.stderr) == (num_tokens < 65) and str(BUILD) in done.stdout
        said = f"module {done.stdout.strip()}: {done.stderr[-2000:]}"
        tally.case(f"a row of 65 tokens out of {num_tokens}", "" if is_right else said)


def run_tests(tally: Tally) -> None:
    """Run the tests that call the C code; each test is a case."""
    flags = ["-n", "2", "-m", "not slow and not interop", "--timeout", "1200", "--ignore", LEFT_OUT, "-k", CHOSEN]
    command = [sys.executable, "-m", "pytest", *flags, *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    for _ in range(int(passed[1]) if passed else 0):
        tally.case("a test")
    if done.returncode or FINDING.search(done.stdout):
        print(done.stdout[-20_000:])
        tally.case(
            "the tests", f"exit code {done.returncode}, {len(FINDING.findall(done.stdout))} lines of a sanitizer"
        )


def run_mutants(tally: Tally) -> None:
    """Give the C code inputs of the fuzzer with random changes; each input is a case."""
    for name in ("jsonl", *fuzz_compiled.COMPILED):
        command = [sys.executable, "-c", MUTANTS, name, str(SECONDS)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, errors="replace")
        for _ in range(int(done.stdout or 0)):
            tally.case(f"a mutant of {name}")
        if done.returncode or FINDING.search(done.stderr):
            tally.case(f"mutants of {name}", f"exit code {done.returncode}: {done.stderr[-3000:]}")


def run_shim(tally: Tally) -> None:
    """Count and disturb the operations of a run with a shim that has the sanitizers, too."""
    library = BUILD / "shim.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", *FLAGS.split(), "-o", str(library), str(_shim.HERE / "shim.c"), "-ldl"],
        check=True,
    )
    checked = {key: environment()[key] for key in ("ASAN_OPTIONS", "UBSAN_OPTIONS")}
    preloaded = f"{environment()['LD_PRELOAD']} {library}"
    with tempfile.TemporaryDirectory(prefix="sanitizers") as folder:
        inputs = _shim.make_corpus(Path(folder, "corpus"))
        for action in ("none", "eio", "enospc", "eintr", "short", "kill-group", "kill-one"):
            box = Path(folder, action)
            box.mkdir()
            state = box.with_suffix(".state")
            state.write_bytes(bytes(64))
            faults = {
                "FAULT_ROOT": os.path.realpath(box),
                "FAULT_STATE": str(state),
                "FAULT_AT": "9",
                "FAULT_DO": action,
            }
            done = _shim.run(_shim.command(inputs, box / "out"), {**checked, **faults, "LD_PRELOAD": preloaded})
            counted = int.from_bytes(state.read_bytes()[:8], "little")
            finding = done.said[-3000:] if FINDING.search(done.said) else ""
            tally.case(f"shim.c, {action}", finding or ("" if counted else f"no operation was counted: {done.said}"))


def main() -> None:
    tally = Tally("sanitizers")
    build()
    check_that_errors_are_seen(tally)
    run_shim(tally)
    run_mutants(tally)
    run_tests(tally)
    tally.end()


if __name__ == "__main__":
    main()
