"""Kill runs at random instants, run the same command again, and compare the result byte by byte.

    python tests/faults/kills.py --runs 200

A kill is SIGKILL to the whole group, to the parent alone, or to one process below it. A killed run is continued, and
may be killed again, until it finishes; then every file must equal that of an undisturbed run, and nothing else may be
left. Processes that survive must not print a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

KINDS = ("group", "parent", "one")


def make_corpus(folder: Path, seed: int = 0) -> list[str]:
    """Plain and compressed JSON lines with bad lines among them, cut into about 40 tasks."""
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    words = ["token", "mill", "grün", "日本", "flour", "stone", "river", "wheel", "\U0003298a", "café", "a", "the"]
    for number in range(3):
        lines = []
        for index in range(500):
            text = " ".join(rng.choices(words, k=rng.randint(5, 200)))
            line = json.dumps({"text": text, "id": index}, ensure_ascii=index % 2 == 0)
            lines.append(line if rng.random() > 0.01 else line[:-5])
        data = ("\n".join(lines) + "\n").encode()
        if number == 1:
            (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data * 2))
        else:
            (folder / f"{'abc'[number]}.jsonl").write_bytes(data)
    return [str(folder)]


def command(inputs: list[str], out: Path, tokenizer: str, *extra: str) -> list[str]:
    program = [sys.executable, "-m", "tokenmill", "tokenize", *inputs, "-o", str(out), "--tokenizer", tokenizer]
    return [*program, "--task-bytes", "35kB", "--workers", "2", "--on-error", "skip", "--val-fraction", "0.1", *extra]


def run_to_end(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def snapshot(store: Path) -> dict[str, bytes]:
    """Every file of a store except run.json."""
    files = (path for path in sorted(store.rglob("*")) if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def kill_after(arguments: list[str], delay: float, kind: str, rng: random.Random) -> bool:
    """Start a run and kill it; False when it had ended before."""
    with tempfile.TemporaryFile() as errors:
        killed = _kill_after(arguments, delay, kind, rng, errors)
        errors.seek(0)
        said = errors.read().decode()
        assert "Traceback" not in said, f"after a kill of {kind}: {said[-3000:]}"
    return killed


def _kill_after(arguments: list[str], delay: float, kind: str, rng: random.Random, errors: BinaryIO) -> bool:
    process = subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        process.wait(delay)
        return False
    except subprocess.TimeoutExpired:
        pass
    if kind == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif kind == "parent":
        process.kill()
    else:
        children = psutil.Process(process.pid).children(recursive=True)
        # The chosen process may have ended by itself in the meantime.
        with suppress(psutil.NoSuchProcess):
            if children:
                rng.choice(children).kill()
        process.wait(60)
        return True
    process.wait()
    return True


def torment(folder: Path, num_kills: int, *, tokenizer: str, seed: int = 0) -> Counter[str]:
    """Kill until `num_kills` are done; returns a tally of kills and of stores compared."""
    rng = random.Random(seed)
    inputs = make_corpus(folder / "corpus")
    started = time.monotonic()
    run_to_end(command(inputs, folder / "undisturbed", tokenizer))
    longest = min(2.0, time.monotonic() - started)
    expected = snapshot(folder / "undisturbed")
    tally: Counter[str] = Counter()
    killed = folder / "killed"
    while sum(tally[kind] for kind in KINDS) < num_kills:
        arguments = command(inputs, killed, tokenizer)
        kind = rng.choice(KINDS)
        if kill_after(arguments, rng.uniform(0.05, longest), kind, rng):
            tally[kind] += 1
        if (killed / "manifest.json").exists() or rng.random() < 0.1:
            run_to_end(arguments)
            compare(expected, snapshot(killed))
            tally["stores compared"] += 1
            shutil.rmtree(killed)
    if killed.exists():
        run_to_end(command(inputs, killed, tokenizer))
        compare(expected, snapshot(killed))
        tally["stores compared"] += 1
    return tally


def compare(expected: dict[str, bytes], found: dict[str, bytes]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    assert not missing and not extra, f"missing {missing}, left over {extra}"
    different = [name for name in expected if expected[name] != found[name]]
    assert not different, f"different bytes in {different}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", default="bytes")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        halves = [(Path(folder, str(half)), (arguments.runs + half) // 2, arguments.seed + half) for half in (0, 1)]
        tallies = pool.map(lambda half: torment(half[0], half[1], tokenizer=arguments.tokenizer, seed=half[2]), halves)
        tally = sum(tallies, Counter[str]())
    for name, count in sorted(tally.items()):
        print(f"{name:<16} {count:5d}")
    print(f"kills: {sum(tally[kind] for kind in KINDS)} cases, 0 findings, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
