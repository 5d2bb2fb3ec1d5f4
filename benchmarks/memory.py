"""Measure the peak memory of runs with `--memory 1GB`: it must not exceed the bound, nor grow with the input.

    python benchmarks/memory.py --sizes 0.3 3

Memory is the proportional set size of the whole process tree, sampled from outside every 50 ms.
High-entropy text is random words, on which the engine's cache grows fastest.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tokenmill.machine import tree_memory

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.3, 3.0], help="GB of text")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers" / "gpt2"))
    parser.add_argument("--grow", default=str(SHARED / "grow"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/memory.md")
    arguments = parser.parse_args()
    lines = [
        f"# Peak memory with `--memory {arguments.memory}`",
        "",
        f"Command: `python benchmarks/{' '.join(['memory.py', *sys.argv[1:]])}`.",
        "PSS of the process tree, 2 workers, GPT-2.",
        "",
        "| text | size, GB | peak, MB | seconds |",
        "|---|---|---|---|",
    ]
    for kind in ("English", "random words"):
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory() as folder:
                corpus = make_corpus(Path(folder), kind, size, arguments.grow)
                peak, seconds = measure(corpus, Path(folder) / "out", arguments)
            lines.append(f"| {kind} | {size:g} | {peak / 1e6:.0f} | {seconds:.0f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.save:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "memory.md").write_text(report)


def make_corpus(folder: Path, kind: str, size: float, grow: str) -> Path:
    corpus = folder / "corpus"
    if kind == "English":
        command = [sys.executable, grow, "--gb", str(size), "--out", str(corpus), "--files", "4"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return corpus
    corpus.mkdir()
    rng = random.Random(0)
    letters = bytes.maketrans(bytes(range(256)), (b"abcdefghijklmnopqrstuvwxyz  ABCDE" * 8)[:256])
    for number in range(4):
        with (corpus / f"{number}.jsonl").open("w") as out:
            written = 0
            while written < size * 1e9 / 4:
                text = rng.randbytes(4000).translate(letters).decode()
                written += out.write(json.dumps({"text": text}) + "\n")
    return corpus


def measure(corpus: Path, out: Path, arguments: argparse.Namespace) -> tuple[int, float]:
    program = [str(Path(sys.executable).parent / "tokenmill"), "tokenize", str(corpus), "-o", str(out), "--quiet"]
    started = time.monotonic()
    command = [*program, "--tokenizer", arguments.tokenizer, "--memory", arguments.memory, "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        peak = max(peak, tree_memory(tree))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"tokenmill exited with code {process.returncode}")
    shutil.rmtree(out)
    return peak, time.monotonic() - started


if __name__ == "__main__":
    main()
