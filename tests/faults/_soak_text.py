"""The text half of the soak: the same corpus is tokenized again and again, each time killed at random instants.

The corpus is repeated through links up to the size of one round, so that a run is long enough for memory to grow. The
first round is not disturbed; all later ones must end with its bytes, no process, and no temporary file.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
import zstandard

SAMPLE_SECONDS = 0.25
ORPHAN_SECONDS = 20
"""How long a process may outlive its killed parent."""
KINDS = ("group", "parent", "one")
MARK = "TOKENMILL_SOAK"


def make_text(folder: Path, num_bytes: int = 1 << 28) -> list[Path]:
    """Four files of JSON lines of random words, equal for equal sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxzäöü日本"))
    words = ["".join(rng.choice(letters, size)).encode() for size in rng.integers(1, 12, 40_000)]
    paths = [folder / f"{number}.jsonl" for number in range(4)]
    for path in paths:
        with path.open("wb") as file:
            while file.tell() < num_bytes // 4:
                chosen = np.minimum(rng.zipf(1.3, 100_000), len(words)) - 1
                text = [words[at] for at in chosen.tolist()]
                ends = np.cumsum(rng.integers(1, 800, 250)).clip(max=len(text)).tolist()
                for start, end in zip([0, *ends], ends, strict=False):
                    file.write(b'{"text": "' + b" ".join(text[start:end]) + b'"}\n')
    return paths


def make_inputs(folder: Path, corpus: list[Path], round_bytes: int) -> int:
    """Make the inputs of a round: plain, zstd and gzip files under many names; return the bytes of their text."""
    folder.mkdir(parents=True)
    files, total = [], 0
    for number, path in enumerate(corpus):
        if number % 4 == 1:
            made = folder.parent / f"{path.stem}.jsonl.zst"
            with path.open("rb") as plain, made.open("wb") as packed:
                zstandard.ZstdCompressor(write_checksum=True).copy_stream(plain, packed)
        elif number % 4 == 2:
            made = folder.parent / f"{path.stem}.jsonl.gz"
            with path.open("rb") as plain, gzip.open(made, "wb", 1) as packed:
                shutil.copyfileobj(plain, packed)
        else:
            made = path.resolve()
        files.append((made, path.stat().st_size))
    turn = 0
    while total < round_bytes:
        for made, size in files:
            (folder / f"{turn:04d}-{made.name}").symlink_to(made)
            total += size
        turn += 1
    return total


@dataclass
class Round:
    """The work and the cost of one round."""

    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    memory: list[int] = field(default_factory=list)
    """Private bytes of all processes at each sample."""
    findings: list[str] = field(default_factory=list)

    def growth(self) -> float:
        """Memory in the last third of the round, divided by that in the middle third; the first third is warm-up."""
        third = len(self.memory) // 3
        if third < 4:
            return 1.0
        return float(np.median(self.memory[2 * third :]) / np.median(self.memory[third : 2 * third]))


class TextSoak:
    """Rounds over one corpus in one folder."""

    def __init__(self, folder: Path, inputs: Path, tokenizer: str, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._mark = uuid.uuid4().hex
        self._scratch = folder / "tmp"
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._out = folder / "out"
        program = [sys.executable, "-m", "tokenmill", "tokenize", str(inputs), "-o", str(self._out)]
        flags = ["--tokenizer", tokenizer, "--workers", "2", "--on-error", "skip", "--val-fraction", "0.01"]
        self._command = [*program, *flags, "--memory", "3GB", "--task-bytes", "64MB"]

    def round(self, expected: dict[str, str] | None, seconds: float) -> tuple[Round, dict[str, str]]:
        """Make the store, killed a few times if it takes about `seconds` undisturbed; return the hashes of its files."""
        done = Round()
        shutil.rmtree(self._out, ignore_errors=True)
        started = time.monotonic()
        for _ in range(self._rng.randint(1, 4) if expected else 0):
            kind = self._rng.choice(KINDS)
            if self._run(done, kind, self._rng.uniform(0.5, 0.6 * seconds)):
                done.kills[kind] += 1
        self._run(done)
        done.seconds = time.monotonic() - started
        hashes = hash_files(self._out)
        if expected is not None and hashes != expected:
            names = sorted(name for name in hashes.keys() | expected.keys() if hashes.get(name) != expected.get(name))
            done.findings.append(f"different, missing or left over: {names[:5]}")
        left = [path.name for path in self._scratch.iterdir()]
        if left:
            done.findings.append(f"temporary files are left: {left[:5]}")
            shutil.rmtree(self._scratch)
            self._scratch.mkdir()
        shutil.rmtree(self._out, ignore_errors=True)
        return done, hashes

    def _run(self, done: Round, kind: str | None = None, delay: float = 0.0) -> bool:
        """Run to the end or until a kill; True if there was one."""
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(self._scratch)}
        errors_path = self._folder / "errors.txt"
        with errors_path.open("wb") as errors:
            process = subprocess.Popen(
                self._command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=errors
            )
        started, is_killed = time.monotonic(), False
        while process.poll() is None:
            time.sleep(SAMPLE_SECONDS)
            done.memory.append(private_bytes(process.pid))
            if kind and not is_killed and time.monotonic() - started > delay:
                is_killed = self._kill(process, kind)
        said = errors_path.read_text(errors="replace")
        if "Traceback" in said or (process.returncode and not is_killed):
            done.findings.append(f"exit code {process.returncode}, killed: {kind}: {said[-600:]}")
        if left := self._wait_for_orphans():
            done.findings.append(f"processes outlive a kill of {kind}: {left}")
        return is_killed

    def _kill(self, process: subprocess.Popen[bytes], kind: str) -> bool:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if kind == "group":
                os.killpg(process.pid, signal.SIGKILL)
            elif kind == "parent":
                process.kill()
            else:
                children = psutil.Process(process.pid).children(recursive=True)
                if not children:
                    return False
                self._rng.choice(children).kill()
            return True
        return False

    def _wait_for_orphans(self) -> list[int]:
        """Return the processes of a run that are alive long after its first one has ended."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := processes_with(self._mark):
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return left
            time.sleep(0.1)
        return []


def processes_with(mark: str) -> list[int]:
    """Processes in whose environment the mark is."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def private_bytes(pid: int) -> int:
    """Private bytes of a process and its descendants, which they share neither with files nor with each other."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                memory: Any = process.memory_info()
                total += memory.rss - memory.shared
    return total


def hash_files(store: Path) -> dict[str, str]:
    """Hash every file of a store except run.json."""
    hashes = {}
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.name != "run.json":
            hasher = xxhash.xxh3_128()
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    hasher.update(block)
            hashes[str(path.relative_to(store))] = hasher.hexdigest()
    return hashes
