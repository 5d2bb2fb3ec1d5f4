"""Run tokenmill with `shim.c` preloaded, which counts its file operations and disturbs one of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zstandard

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
"""Runs use this tree, even if another one is installed."""
SECONDS = 60
"""A small run that takes longer than this hangs."""


def build() -> Path:
    """Compile the library, unless that was done since its source changed."""
    source, library = HERE / "shim.c", ROOT / "build" / "shim.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as new:
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", new.name, str(source), "-ldl"], check=True)
        Path(new.name).replace(library)
    return library


def make_corpus(folder: Path) -> list[str]:
    """One task of plain JSON lines and one of a compressed file, with a bad line in each."""
    rng = random.Random(1)
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": "".join(rng.choices("abcde é", k=rng.randint(1, 60)))}) for _ in range(40)]
    data = "\n".join([*lines[:20], '{"text": 1', *lines[20:]]).encode() + b"\n"
    (folder / "a.jsonl").write_bytes(data)
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    return [str(folder)]


def command(inputs: list[str], out: Path, *extra: str) -> list[str]:
    """`tokenize` of the small corpus, in two tasks, by one worker at a time."""
    flags = ["--tokenizer", "bytes", "--task-bytes", "100kB", "--workers", "1", "--memory", "1GB", "--on-error", "skip"]
    return [
        sys.executable,
        "-m",
        "tokenmill",
        "tokenize",
        *inputs,
        "-o",
        str(out),
        *flags,
        "--val-fraction",
        "0.2",
        *extra,
    ]


@dataclass
class Run:
    """How a run ended: its exit code (None: it had to be stopped), its output, and its number of operations."""

    code: int | None
    said: str
    num_operations: int = 0

    def complaint(self) -> str:
        """Describe a defect that no run may have: a hang or a traceback."""
        if self.code is None:
            return f"no end after {SECONDS} s: {self.said[-500:]}"
        return f"a traceback: {self.said[-2500:]}" if "Traceback" in self.said else ""


def run(arguments: list[str], environment: dict[str, str] | None = None, **options: object) -> Run:
    """Run to the end; the processes of a run that was killed or hangs are killed as a group."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            arguments, env={**os.environ, **OURS, **(environment or {})}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, **options,  # type: ignore[call-overload]
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return Run(code, said.read().decode(errors="replace"))


def run_disturbed(arguments: list[str], root: Path, **faults: object) -> Run:
    """Run with the library preloaded; `faults` are its variables without FAULT_, such as `at=3, do="eio"`."""
    with tempfile.NamedTemporaryFile() as state:
        state.write(bytes(64))
        state.flush()
        settings = {f"FAULT_{name.upper()}": str(value) for name, value in faults.items()}
        shim = {"LD_PRELOAD": str(build()), "FAULT_ROOT": os.path.realpath(root), "FAULT_STATE": state.name}
        done = run(arguments, {**shim, **settings})
        state.seek(0)
        done.num_operations = struct.unpack("<Q", state.read(8))[0]
        return done


def snapshot(store: Path) -> dict[str, bytes]:
    """Every file of a store except run.json."""
    files = (path for path in sorted(store.rglob("*")) if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def difference(expected: dict[str, bytes], store: Path) -> str:
    """Name the files in which a store differs; empty if there is none."""
    found = snapshot(store)
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"different, missing or left over: {', '.join(names)}" if names else ""
