"""Measure what this machine tokenizes in an hour, and extrapolate to 15 trillion tokens.

    python benchmarks/projection.py --text path/to/corpus --tokenizer path/to/gpt2 --save

The program measures runs with all cores and one with a single worker, without start-up. The rest is arithmetic with the
prices and machines that the flags give and tokenmill's request sizes. The table marks what is assumed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.files import WHOLE_FINGERPRINT_BYTES
from tokenmill.machine import usable_cores
from tokenmill.pipeline.input_file import LARGEST_TASK
from tokenmill.remote.client import PART_BYTES
from tokenmill.remote.paths import BLOCK_BYTES

HERE = Path(__file__).resolve().parent
HOUR = 3600
FILES_PER_SHARD = 3
"""Tokens, index and table of documents; only the first is large."""
CREATE_AND_COMPLETE = 2
"""Requests of a multipart upload besides the parts."""
LOOKS_PER_TASK = 2
"""Reads of the plan, so that a run that lost its store to another publishes nothing."""
NAMES_PER_LIST = 1000
SAMPLED_BYTES = 66 << 16
"""The bytes that a fingerprint reads of a large file."""
GETS_PER_PREFIX, PUTS_PER_PREFIX = 5500, 3500
"""Requests a second for each prefix, as S3 documents them."""
SLOTS_BESIDE_WORKERS = 2


@dataclass(frozen=True)
class Measured:
    """The runs on this machine."""

    cores: int
    runs: list[float]
    """Seconds of each run with one worker per core."""
    alone: float | None
    """Seconds of the run with one worker."""
    text_bytes: int
    num_tokens: int
    store_bytes: int
    manifest_bytes_per_shard: float
    token_bytes: int = 2

    @property
    def seconds(self) -> float:
        """The median run."""
        return statistics.median(self.runs)

    @property
    def tokens_per_core_hour(self) -> float:
        """Tokens that one core encodes in an hour."""
        return self.num_tokens / self.seconds / self.cores * HOUR


@dataclass(frozen=True)
class Projected:
    """The same figures for many tokens."""

    measured: Measured
    num_tokens: float
    ranks: int
    files: int

    @property
    def scale(self) -> float:
        """Multiples of the measured corpus."""
        return self.num_tokens / self.measured.num_tokens

    @property
    def text_bytes(self) -> float:
        """Bytes of the inputs, uncompressed."""
        return self.measured.text_bytes * self.scale

    def store_bytes(self, token_bytes: int) -> float:
        """Bytes of the store, with ids of two or four bytes."""
        return self.measured.store_bytes * self.scale + (token_bytes - self.measured.token_bytes) * self.num_tokens

    @property
    def core_hours(self) -> float:
        """Hours on one core like those of this machine."""
        return self.num_tokens / self.measured.tokens_per_core_hour

    @property
    def tasks(self) -> float:
        """Number of tasks of the largest size; each makes a shard."""
        return self.text_bytes / LARGEST_TASK

    def text_per_second(self, cores: int) -> float:
        """Bytes a second that storage must deliver."""
        return self.text_bytes / (self.core_hours / cores * HOUR)

    @property
    def puts(self) -> float:
        """Write requests: for each task, its tokens in parts, its other files and its journal entry."""
        parts = math.ceil(self.num_tokens * self.measured.token_bytes / self.tasks / PART_BYTES)
        large = parts + CREATE_AND_COMPLETE if parts > 1 else 1
        return self.tasks * (large + FILES_PER_SHARD - 1 + 1)

    @property
    def gets(self) -> float:
        """Read requests: the text in blocks, the fingerprints by every rank, the journal entries by the last rank."""
        beginning = 2 * self.ranks * self.files
        return self.text_bytes / BLOCK_BYTES + beginning + self.tasks * (LOOKS_PER_TASK + 1)

    @property
    def lists(self) -> float:
        """List requests: the journal by every rank at its end, the store twice by the last rank."""
        names = self.ranks * self.tasks + 2 * (FILES_PER_SHARD + 1) * self.tasks
        return names / NAMES_PER_LIST

    def scratch_bytes(self, workers: int) -> float:
        """Scratch space of a machine for a store in a bucket: for each worker, a task's files and decompressed text."""
        stored = self.store_bytes(self.measured.token_bytes) / self.tasks
        return workers * stored + (workers + SLOTS_BESIDE_WORKERS) * LARGEST_TASK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a folder of JSON lines; 1 GB or more")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--runs", type=int, default=3, help="the rate is that of the median run")
    parser.add_argument("--tokens", type=float, default=15e12)
    parser.add_argument("--cores", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--ranks", type=int, default=64, help="assumed: processes that share the run")
    parser.add_argument("--files", type=int, default=60_000, help="assumed: inputs")
    parser.add_argument("--core-hour", type=float, default=0.045, help="dollars for a core, as large clouds charge")
    parser.add_argument("--gb-month", type=float, default=0.023, help="dollars for a GB in an object store")
    parser.add_argument("--million-puts", type=float, default=5.0, help="dollars for a million writes or lists")
    parser.add_argument("--million-gets", type=float, default=0.4, help="dollars for a million reads")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/projection.md")
    arguments = parser.parse_args()
    report = render(measure(arguments), arguments)
    print(report)
    if arguments.save:
        (HERE / "results" / "projection.md").write_text(report)


def measure(arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        one, out = Path(folder) / "one.jsonl", Path(folder) / "all"
        one.write_text(json.dumps({"text": "One document."}) + "\n")
        startup = run(one, arguments.tokenizer, Path(folder) / "one")
        alone = run(arguments.text, arguments.tokenizer, out, "--workers", "1") - startup
        runs = [run(arguments.text, arguments.tokenizer, out) - startup for _ in range(arguments.runs)]
        data = (out / "manifest.json").read_bytes()
        manifest = json.loads(data)
        splits = manifest["splits"].values()
        return Measured(
            cores=usable_cores(),
            runs=runs,
            alone=alone,
            text_bytes=sum(file["bytes"] for file in manifest["inputs"]),
            num_tokens=sum(split["num_tokens"] for split in splits),
            store_bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
            manifest_bytes_per_shard=len(data) / sum(len(split["shards"]) for split in splits),
            token_bytes={"uint16": 2, "uint32": 4}[manifest["dtype"]],
        )


def run(text: Path, tokenizer: str, out: Path, *flags: str) -> float:
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "tokenmill", "tokenize", str(text), "-o", str(out), "--tokenizer", tokenizer, "-q"]
    started = time.perf_counter()
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def render(measured: Measured, arguments: argparse.Namespace) -> str:
    projected = Projected(measured, arguments.tokens, arguments.ranks, arguments.files)
    runs = ", ".join(f"{seconds:.1f}" for seconds in sorted(measured.runs))
    lines = [
        f"# What one machine does, and what {arguments.tokens / 1e12:g} trillion tokens would take",
        "",
        f"{platform.machine()}, {measured.cores} cores, Python {platform.python_version()}; "
        f"{measured.text_bytes / 1e9:.1f} GB of JSON lines in {runs} s, start-up taken off.",
        "Command: `python benchmarks/projection.py --text CORPUS --tokenizer gpt2 --save`",
        "",
        *table("measured", describe_measured(measured)),
        *table(f"{arguments.tokens / 1e12:g} trillion tokens, by these figures", describe_work(projected, arguments)),
        *table("where it meets a limit", describe_limits(projected, arguments)),
        *table("assumed prices, in dollars", describe_costs(projected, arguments)),
    ]
    return "\n".join(lines)


def table(title: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    return [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def describe_measured(measured: Measured) -> Iterator[tuple[str, str]]:
    hour = HOUR / measured.seconds
    yield "text an hour, this machine", f"{measured.text_bytes * hour / 1e12:.2f} TB"
    yield "tokens an hour, this machine", f"{measured.num_tokens * hour / 1e9:.0f} billion"
    yield "tokens an hour, one core", f"{measured.tokens_per_core_hour / 1e9:.0f} billion"
    if measured.alone is not None:
        yield f"{measured.cores} workers to one", f"{measured.alone / measured.seconds:.2f}"
    yield "bytes of JSON per token", f"{measured.text_bytes / measured.num_tokens:.2f}"
    yield "bytes of store per token", f"{measured.store_bytes / measured.num_tokens:.2f}"


def describe_work(projected: Projected, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    own = projected.measured.token_bytes
    yield "text, uncompressed", f"{projected.text_bytes / 1e12:.0f} TB"
    yield f"store, {own} bytes a token", f"{projected.store_bytes(own) / 1e12:.0f} TB"
    yield f"store, {6 - own} bytes a token", f"{projected.store_bytes(6 - own) / 1e12:.0f} TB"
    yield "core hours, if all cores are as fast as these", f"{projected.core_hours:,.0f}"
    for cores in arguments.cores:
        speed = projected.text_per_second(cores) / 1e9
        yield f"on {cores:,} cores, if storage gives {speed:,.1f} GB/s", show_hours(projected.core_hours / cores)
    yield f"tasks of {LARGEST_TASK >> 20} MiB of text", f"{projected.tasks:,.0f}"
    yield "files in the store", f"{projected.tasks * FILES_PER_SHARD:,.0f}"
    yield "manifest", f"{projected.tasks * projected.measured.manifest_bytes_per_shard / 1e6:,.0f} MB"


def describe_limits(projected: Projected, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    cores = arguments.cores[0]
    reads = projected.text_per_second(cores) / BLOCK_BYTES
    yield f"reads of {BLOCK_BYTES >> 20} MiB a second, {cores} cores on a bucket", f"{reads:,.0f}"
    yield "prefixes they need, where one gives 5,500", f"{math.ceil(reads / GETS_PER_PREFIX)}"
    puts = projected.puts / (projected.core_hours / cores * HOUR)
    yield f"writes a second, where a prefix takes {PUTS_PER_PREFIX:,}", f"{puts:,.0f}"
    if projected.text_bytes / arguments.files > WHOLE_FINGERPRINT_BYTES:
        start = arguments.files * SAMPLED_BYTES
        yield f"read by each rank to begin, of {arguments.files:,} files on a disk", f"{start / 1e9:,.0f} GB"
    yield "scratch disk of 16 workers, for a store in a bucket", f"{projected.scratch_bytes(16) / 1e9:,.0f} GB"


def describe_costs(projected: Projected, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    puts, gets, lists = projected.puts, projected.gets, projected.lists
    requests = ((puts + lists) * arguments.million_puts + gets * arguments.million_gets) / 1e6
    own, month = projected.measured.token_bytes, arguments.gb_month
    yield f"a core at {arguments.core_hour} an hour", f"{projected.core_hours * arguments.core_hour:,.0f}"
    yield (
        f"{puts / 1e6:,.1f} million writes in parts of {PART_BYTES >> 20} MiB and {lists / 1e6:,.2f} million lists at "
        f"{arguments.million_puts} a million, {gets / 1e6:,.1f} million reads of {BLOCK_BYTES >> 20} MiB at "
        f"{arguments.million_gets}, {arguments.ranks} ranks",
        f"{requests:,.0f}",
    )
    yield f"the store at {month} a GB and month", f"{projected.store_bytes(own) / 1e9 * month:,.0f} a month"
    wide = projected.store_bytes(6 - own)
    yield f"the same with {6 - own} bytes a token", f"{wide / 1e9 * month:,.0f} a month"
    yield "the text, uncompressed", f"{projected.text_bytes / 1e9 * month:,.0f} a month"


def show_hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"


if __name__ == "__main__":
    main()
