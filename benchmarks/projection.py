"""What this machine tokenizes in an hour, and what 15 trillion tokens would take at that rate.

    python benchmarks/projection.py --text path/to/corpus --tokenizer path/to/gpt2 --save

Measured: one run with every core, start-up taken off. The rest is arithmetic, with the prices and the machines that
the flags name; everything that is assumed and not measured is marked so in the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tokenmill.machine import usable_cores

HERE = Path(__file__).resolve().parent
HOUR = 3600
TASK_BYTES = 256 << 20
PART_BYTES = 64 << 20
"""Objects above this are uploaded in parts of about this size, a request each."""
FILES_PER_SHARD = 3


@dataclass(frozen=True)
class Measured:
    """One run on this machine."""

    cores: int
    seconds: float
    text_bytes: int
    num_tokens: int
    store_bytes: int

    @property
    def tokens_per_core_hour(self) -> float:
        """What one core does in an hour."""
        return self.num_tokens / self.seconds / self.cores * HOUR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a folder of JSON lines; 1 GB or more")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tokens", type=float, default=15e12)
    parser.add_argument("--cores", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--core-hour", type=float, default=0.045, help="dollars, as large clouds ask for a core")
    parser.add_argument("--gb-month", type=float, default=0.023, help="dollars for a GB in an object store")
    parser.add_argument("--million-puts", type=float, default=5.0, help="dollars for a million writes")
    parser.add_argument("--million-gets", type=float, default=0.4, help="dollars for a million reads")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/projection.md")
    arguments = parser.parse_args()
    measured = measure(arguments)
    report = render(measured, arguments)
    print(report)
    if arguments.save:
        (HERE / "results" / "projection.md").write_text(report)


def measure(arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one.jsonl"
        one.write_text(json.dumps({"text": "One document."}) + "\n")
        startup = run(one, arguments.tokenizer, Path(folder) / "one")
        seconds = run(arguments.text, arguments.tokenizer, Path(folder) / "all") - startup
        manifest = json.loads((Path(folder) / "all" / "manifest.json").read_bytes())
        stored = sum(path.stat().st_size for path in (Path(folder) / "all").rglob("*") if path.is_file())
        text_bytes = sum(file["bytes"] for file in manifest["inputs"])
        num_tokens = sum(split["num_tokens"] for split in manifest["splits"].values())
        return Measured(usable_cores(), seconds, text_bytes, num_tokens, stored)


def run(text: Path, tokenizer: str, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "tokenmill", "tokenize", str(text), "-o", str(out), "--tokenizer", tokenizer, "-q"]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def render(measured: Measured, arguments: argparse.Namespace) -> str:
    scale = arguments.tokens / measured.num_tokens
    text_bytes, stored = measured.text_bytes * scale, measured.store_bytes * scale
    hour = HOUR / measured.seconds
    core_hours = arguments.tokens / measured.tokens_per_core_hour
    shards = text_bytes / TASK_BYTES
    puts = shards * (FILES_PER_SHARD + 1) + stored / PART_BYTES
    gets = text_bytes / PART_BYTES
    lines = [
        "# What one machine does, and what 15 trillion tokens would take",
        "",
        f"{platform.machine()}, {measured.cores} cores, Python {platform.python_version()}; "
        f"{measured.text_bytes / 1e9:.1f} GB of JSON lines in {measured.seconds:.1f} s, start-up taken off.",
        "Command: `python benchmarks/projection.py --text CORPUS --tokenizer gpt2 --save`",
        "",
        "| measured | |",
        "|---|---|",
        f"| text an hour, this machine | {measured.text_bytes * hour / 1e12:.2f} TB |",
        f"| tokens an hour, this machine | {measured.num_tokens * hour / 1e9:.0f} billion |",
        f"| tokens an hour, one core | {measured.tokens_per_core_hour / 1e9:.0f} billion |",
        f"| bytes of JSON per token | {measured.text_bytes / measured.num_tokens:.2f} |",
        f"| bytes of store per token | {measured.store_bytes / measured.num_tokens:.2f} |",
        "",
        f"| {arguments.tokens / 1e12:g} trillion tokens, by these figures | |",
        "|---|---|",
        f"| text, uncompressed | {text_bytes / 1e12:.0f} TB |",
        f"| store | {stored / 1e12:.0f} TB |",
        f"| core hours | {core_hours:,.0f} |",
    ]
    for cores in arguments.cores:
        speed = text_bytes / (core_hours / cores * HOUR)
        lines.append(
            f"| hours on {cores:,} cores, if storage gives {speed / 1e9:,.1f} GB/s | {core_hours / cores:,.1f} |"
        )
    lines += [
        f"| shards of 256 MiB of text, and their writes in parts of 64 MiB | {shards:,.0f}, {puts:,.0f} |",
        f"| reads of 64 MiB | {gets:,.0f} |",
        f"| assumed: a core at {arguments.core_hour} dollars an hour | "
        f"{core_hours * arguments.core_hour:,.0f} dollars |",
        f"| assumed: requests at {arguments.million_puts} and {arguments.million_gets} dollars a million | "
        f"{(puts * arguments.million_puts + gets * arguments.million_gets) / 1e6:,.0f} dollars |",
        f"| assumed: the store at {arguments.gb_month} dollars a GB and month | "
        f"{stored / 1e9 * arguments.gb_month:,.0f} dollars a month |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
