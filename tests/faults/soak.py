"""Load for hours: text through `tokenize` with random kills, rows through loaders with resumes.

    python tests/faults/soak.py --text-gb 50 --rows 1e9 [--minutes 360] [--corpus FOLDER] [--tokenizer NAME]

Stores stay equal, rows stay in order, memory stays flat, and nothing is left: processes, temporary files, descriptors.
Progress is kept in `--folder`, so that the same command resumes a soak that was stopped. `--only text` and `--only
rows` do one half. Figures go to tests/faults/results/soak.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from tests.faults import _soak_rows, _soak_text
from tests.faults._tally import Tally

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_GROWTH = 1.1
"""Limit for memory late in a round or late in the life of a stepping process, relative to memory before."""


class Kept:
    """Figures in a file, which outlive this process."""

    def __init__(self, path: Path, start: dict[str, Any]) -> None:
        self._path = path
        self.figures = {**start, **(json.loads(path.read_text()) if path.exists() else {})}

    def write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1))
        new.replace(self._path)


def soak_text(arguments: argparse.Namespace, tally: Tally, deadline: float) -> list[str]:
    """Rounds of the same text until enough was tokenized; returns lines for the results."""
    folder: Path = arguments.folder / "text"
    folder.mkdir(parents=True, exist_ok=True)
    start = {"bytes": 0, "rounds": 0, "seconds": 0.0, "kills": {}, "peaks": [], "growth": [], "findings": 0}
    kept = Kept(folder / "tally.json", {**start, "expected": None, "round_seconds": 0.0, "round_bytes": 0})
    figures = kept.figures
    if not figures["round_bytes"]:
        shutil.rmtree(folder / "inputs", ignore_errors=True)
        corpus = (
            sorted(arguments.corpus.glob("*.jsonl")) if arguments.corpus else _soak_text.make_text(folder / "plain")
        )
        figures["round_bytes"] = _soak_text.make_inputs(folder / "inputs", corpus, int(arguments.round_gb * 1e9))
        kept.write()
    soak = _soak_text.TextSoak(folder, folder / "inputs", arguments.tokenizer, seed=arguments.seed + figures["rounds"])
    while figures["bytes"] < arguments.text_gb * 1e9 and time.monotonic() < deadline:
        done, hashes = soak.round(figures["expected"], figures["round_seconds"])
        growth = done.growth()
        if growth > MOST_GROWTH and not sum(done.kills.values()):
            done.findings.append(f"memory grew by {growth:.2f} within a run")
        if figures["expected"] is None:
            figures["expected"], figures["round_seconds"] = hashes, done.seconds
        for finding in done.findings or [""]:
            tally.case(f"round {figures['rounds']}", finding)
        figures["bytes"] += figures["round_bytes"]
        figures["rounds"] += 1
        figures["seconds"] += done.seconds
        figures["findings"] += len(done.findings)
        figures["kills"] = {kind: figures["kills"].get(kind, 0) + count for kind, count in done.kills.items()}
        figures["peaks"].append(max(done.memory, default=0))
        figures["growth"].append(round(growth, 3))
        kept.write()
        print(
            f"{figures['bytes'] / 1e9:.1f} GB, kills {figures['kills']}, peak {figures['peaks'][-1] >> 20} MiB",
            flush=True,
        )
    peaks = figures["peaks"]
    return [
        f"text       {figures['bytes'] / 1e9:.1f} GB in {figures['rounds']} rounds of {figures['round_bytes'] / 1e9:.1f} GB, "
        f"{figures['seconds'] / 60:.0f} minutes ({figures['bytes'] / 1e6 / max(1, figures['seconds']):.0f} MB/s)",
        f"kills      {sum(figures['kills'].values())}: {', '.join(f'{n} {kind}' for kind, n in figures['kills'].items())}; "
        f"{figures['rounds'] - 1} stores equal byte by byte",
        f"memory     peak of all processes {min(peaks) >> 20} to {max(peaks) >> 20} MiB over the rounds; "
        f"undisturbed, last third by middle third of the run: {figures['growth'][0]:.3f}",
        f"findings   {figures['findings']}",
    ]  # fmt: skip


def soak_rows(arguments: argparse.Namespace, tally: Tally, deadline: float) -> list[str]:
    """Stepping processes, killed after a random time, until enough rows were stepped; returns lines for the results."""
    folder: Path = arguments.folder / "rows"
    if not (folder / "store" / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _soak_rows.make_rows_store(folder / "store")
    path, rng = folder / "rows.json", random.Random(arguments.seed)
    kept = {"rows": 0, "kills": 0, **(json.loads(path.read_text()) if path.exists() else {})}
    path.write_text(json.dumps({**kept, "wanted": int(arguments.rows)}))
    kills_path = folder / "kills"
    kills = int(kills_path.read_text()) if kills_path.exists() else 0
    while kept["rows"] < arguments.rows and time.monotonic() < deadline and not kept.get("findings"):
        command = [sys.executable, str(HERE / "_soak_rows.py"), str(folder), str(rng.randrange(1 << 30))]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=min(rng.uniform(20, 120), max(1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            kills_path.write_text(str(kills))
        else:
            tally.case("a stepping process", said[-2000:] if process.returncode else "")
            if process.returncode:
                break
        kept = json.loads(path.read_text())
        print(f"{kept['rows'] / 1e6:.0f} million rows, {kills} kills", flush=True)
    for finding in kept.get("findings") or [""]:
        tally.case("rows", finding)
    memory, descriptors, seconds = read_log(path.with_suffix(".log"))
    for name, growth in (("memory", memory), ("descriptors", descriptors)):
        tally.case(name, f"grew by {growth:.2f} in a stepping process" if growth > MOST_GROWTH else "")
    return [
        f"rows       {kept['rows']:,} in {seconds / 60:.0f} minutes ({kept['rows'] / max(1, seconds) / 1e6:.1f} million/s)",
        f"resumes    {kept.get('resumes', 0):,} with other batch and world sizes, {kills} of them after SIGKILL",
        f"exact      {kept.get('epochs', 0):,} whole epochs with every row once; {kept.get('sampled', 0):,} rows equal to "
        "those of an undisturbed loader after a resume",
        f"memory     last third by middle third of the life of a process, at most {memory:.3f}; descriptors {descriptors:.3f}",
        f"findings   {len(kept.get('findings') or [])}",
    ]  # fmt: skip


def read_log(path: Path) -> tuple[float, float, float]:
    """Return the most that memory and descriptors grew in the life of a process, and how long all of them lived."""
    lives: dict[int, list[list[Any]]] = {}
    for line in path.read_text().splitlines():
        event, pid, *values = json.loads(line)
        lives.setdefault(pid, []).extend([values] if event == "stretch" else [])
    memory = descriptors = 1.0
    seconds = 0.0
    for life in lives.values():
        if len(life) < 2:
            continue
        seconds += life[-1][0] - life[0][0]
        third = len(life) // 3
        if third >= 4:
            late, middle = (np.median(some, axis=0) for some in (life[2 * third :], life[third : 2 * third]))
            memory, descriptors = max(memory, late[2] / middle[2]), max(descriptors, late[3] / middle[3])
    return memory, descriptors, seconds


def keep(lines: list[str], half: str) -> None:
    """Replace the lines of one half in the results."""
    path = HERE / "results" / "soak.txt"
    path.parent.mkdir(exist_ok=True)
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    parts = dict(part.split("\n", 1) for part in path.read_text().split("\n\n")[1:]) if path.exists() else {}
    parts[half] = "\n".join(lines)
    path.write_text("\n\n".join([machine, *(f"{name}\n{parts[name].strip()}" for name in sorted(parts))]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-gb", type=float, default=50)
    parser.add_argument("--round-gb", type=float, default=4, help="text of one run; its store needs about as much disk")
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--minutes", type=float, default=360, help="stop then, and go on another time")
    parser.add_argument("--corpus", type=Path, help="a folder of .jsonl files to use as text")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("--only", choices=["text", "rows"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    deadline = time.monotonic() + 60 * arguments.minutes
    tally = Tally("soak")
    halves = {"text": soak_text, "rows": soak_rows}
    for half in [arguments.only] if arguments.only else halves:
        lines = halves[half](arguments, tally, deadline)
        keep(lines, half)
        print("\n".join(lines))
    tally.end()


if __name__ == "__main__":
    main()
