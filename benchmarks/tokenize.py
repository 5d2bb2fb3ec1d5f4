"""Compare how fast tokenmill and other tools tokenize real text: whole commands, in turns, in one run.

    python benchmarks/tokenize.py --corpus linux=FOLDER --corpus pages=FOLDER --tokenizer gpt2=FOLDER [--save NAME]
    python benchmarks/tokenize.py --corpus linux=FOLDER --mb 14 --tokenizer gpt2=FOLDER

A corpus is a folder of JSON lines, or several; `shared/data/natural` and `grow` make some. Each contender reads the
same documents in a fresh process, `--repeat` times, in an order that is shuffled for each turn. Slow contenders read
`--part-mb` of them. "start-up" is the same command on a single document. Memory is that of all processes together, in
a turn of its own. `--peers` installs each peer in an environment of its own, as `make test-interop` does.
"""

from __future__ import annotations

import sys

# This folder goes last, so that this file does not shadow the standard library's module of its name.
sys.path.append(sys.path.pop(0))

import argparse
import compileall
import importlib.metadata
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = HERE / "tokenize_peers.py"
PART = "part"


@dataclass(frozen=True)
class Peer:
    """Another tool: the environment that has it, and the packages whose versions the report names."""

    name: str
    environment: str = ""
    packages: tuple[str, ...] = ()
    is_slow: bool = True


FAST = (
    Peer("encode_files", packages=("gigatoken",), is_slow=False),
    Peer("encode_files+tofile", packages=("gigatoken",), is_slow=False),
)
SLOW = (
    Peer("tokenizers", packages=("tokenizers",)),
    Peer("tokenizers", "tokenizers1", ("tokenizers",), is_slow=False),
    Peer("tiktoken", packages=("tiktoken",)),
    Peer("datatrove", "datatrove", ("datatrove",)),
    Peer("litdata", "litdata", ("litdata", "tokenizers")),
    Peer("dolma", "dolma", ("dolma",)),
    Peer("datasets.map", "trl", ("datasets",)),
    Peer("megatron", "megatron", ("megatron-core",)),
    Peer("megatron-fast", "megatron", ("gigatoken",)),
)


@dataclass
class Contender:
    """A command on a corpus, and the seconds that it took in each turn."""

    name: str
    command: list[str]
    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """When the first shard was there; only of tokenmill on a corpus."""
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    arguments = parse()
    # pip compiles the packages that it installs, but an editable install may have no bytecode.
    compileall.compile_dir(ROOT / "src", quiet=1)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-", dir=arguments.work) as work:
        report = "\n".join(part for pair in pairs(arguments, Path(work)) for part in [*measure(arguments, *pair), ""])
    text = "\n".join([*head(arguments), "", report])
    print(text)
    if arguments.save:
        target = HERE / "results" / f"{arguments.save}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--mb", type=int, help="only the first N MB of each corpus")
    parser.add_argument("--part-mb", type=int, default=20, help="how much slow contenders read")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also those that need environments of their own")
    parser.add_argument("--only", help="names of contenders, with commas")
    parser.add_argument("--one-worker", action="store_true", help="also tokenmill with one worker")
    parser.add_argument("--memory", action="store_true", help="also measure memory")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two commands, for other programs")
    parser.add_argument("--work", help="folder for what is written")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.md")
    return parser.parse_args()


def pairs(arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, Path, str, Path, Path]]:
    for corpus in arguments.corpus:
        name, _, folder = corpus.partition("=")
        documents = cut(Path(folder), name, work / name, arguments.mb)
        cut(documents, name, work / name / PART, arguments.part_mb, num_files=1)
        for tokenizer in arguments.tokenizer:
            label, _, place = tokenizer.partition("=")
            yield name, documents, label, Path(place).resolve(), work


def cut(folder: Path, name: str, target: Path, megabytes: int | None, num_files: int = 4) -> Path:
    """Write the first megabytes of a corpus, taken evenly from its files; the corpus itself if it is whole."""
    files = sorted(folder.glob(f"{name}*.jsonl")) or sorted(folder.glob("*.jsonl"))
    target.mkdir(parents=True)
    if megabytes is None:
        for path in files:
            (target / path.name).symlink_to(path.resolve())
        return target
    outs = [(target / f"{name}-{number}.jsonl").open("wb") for number in range(num_files)]
    for number, path in enumerate(files):
        left = megabytes * 10**6 // len(files)
        with path.open("rb") as lines:
            for line in lines:
                outs[number % num_files].write(line)
                left -= len(line)
                if left <= 0:
                    break
    for out in outs:
        out.close()
    return target


def measure(
    arguments: argparse.Namespace, corpus: str, documents: Path, label: str, tokenizer: Path, work: Path
) -> list[str]:
    """Let all contenders take turns on a corpus with a tokenizer; return the tables."""
    contenders = make_contenders(arguments, documents, tokenizer, work)
    for turn in range(arguments.repeat):
        for one in random.sample(contenders, len(contenders)):
            time.sleep(arguments.pause)
            seconds, first = run(one.command, work / "out")
            one.seconds.append(seconds)
            one.first += [first] if first is not None and one.num_bytes else []
            print(f"{corpus} {label} turn {turn + 1}  {one.name:<34} {one.seconds[-1]:8.2f} s", file=sys.stderr)
    if arguments.memory:
        for one in contenders:
            one.peak_bytes = watch(one.command, work / "out")
    return render(corpus, label, contenders)


def make_contenders(arguments: argparse.Namespace, documents: Path, tokenizer: Path, work: Path) -> list[Contender]:
    small = documents / "small"
    small.mkdir(exist_ok=True)
    (small / "one.jsonl").write_text(json.dumps({"text": "One document."}) + "\n")
    files, part = sorted(map(str, documents.glob("*.jsonl"))), sorted(map(str, (documents / PART).glob("*.jsonl")))
    size, part_size = (sum(Path(file).stat().st_size for file in some) for some in (files, part))
    program = [str(Path(sys.executable).parent / "tokenmill"), "tokenize"]

    def ours(inputs: list[str], workers: int) -> list[str]:
        flags = ["-o", str(work / "out"), "--tokenizer", str(tokenizer), "--workers", str(workers), "--quiet"]
        return [*program, *inputs, *flags]

    def theirs(python: Path | str, name: str, inputs: list[str]) -> list[str]:
        return [str(python), str(PEERS), name, str(tokenizer), str(work / "out"), *inputs]

    one = [str(small / "one.jsonl")]
    cores = os.cpu_count() or 1
    found = [
        Contender("tokenmill", ours(files, cores), size),
        Contender("tokenmill start-up", ours(one, cores), 0),
    ]
    if arguments.one_worker:
        found.append(Contender("tokenmill, 1 worker", ours(files, 1), size))
    for peer in FAST:
        found.append(Contender(peer.name, theirs(sys.executable, peer.name, files), size))
    found.append(Contender("encode_files start-up", theirs(sys.executable, "encode_files", one), 0))
    for peer in SLOW if arguments.peers else ():
        python = environment(peer.environment) if peer.environment else sys.executable
        label = f"{peer.name} ({', '.join(f'{name} {version_of(python, name)}' for name in peer.packages)})"
        inputs, amount = (part, part_size) if peer.is_slow else (files, size)
        found.append(Contender(label, theirs(python, peer.name, inputs), amount))
    wanted = arguments.only.split(",") if arguments.only else None
    return [one for one in found if wanted is None or one.name.partition(" (")[0] in wanted]


def environment(name: str) -> Path:
    sys.path.insert(0, str(ROOT))
    from tests.interop.environments import environment as build

    return build(name)


def version_of(python: Path | str, package: str) -> str:
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def run(command: list[str], out: Path) -> tuple[float, float | None]:
    """Run a command; return its seconds, and when it published its first shard, if it publishes shards.

    What it wrote before is removed and synced first.
    """
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    first: float | None = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            if first is None and any((out / "train").glob("shard-*.bin")):
                first = time.perf_counter() - started
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command[:6])} ... failed:\n{errors.read()[-2000:]}")
    return seconds, first


def watch(command: list[str], out: Path) -> int:
    """Run a command and return the peak memory of its processes together; shared pages count once."""
    shutil.rmtree(out, ignore_errors=True)
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        for each in [process, *process.children(recursive=True)]:
            try:
                total += each.memory_full_info().pss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.03)
    return peak


def render(corpus: str, label: str, contenders: list[Contender]) -> list[str]:
    ours = {one.name: one for one in contenders}
    size = ours["tokenmill"].num_bytes
    first = ours["tokenmill"].median
    lines = [f"## {corpus}, {size / 1e6:,.0f} MB, {label}", ""]
    lines += ["| what | seconds | spread | MB/s | tokenmill is | memory |", "|---|---|---|---|---|---|"]
    for one in contenders:
        rate = f"{one.num_bytes / 1e6 / one.median:.1f}" if one.num_bytes else ""
        factor = f"{one.median / one.num_bytes * size / first:.2f} x" if one.num_bytes else ""
        memory = f"{one.peak_bytes / 1e6:,.0f} MB" if one.peak_bytes else ""
        spread = f"{min(one.seconds):.2f}-{max(one.seconds):.2f}"
        lines.append(f"| {one.name} | {one.median:.2f} | {spread} | {rate} | {factor} | {memory} |")
    if ours["tokenmill"].first:
        lines += ["", f"Its first shard is published after {statistics.median(ours['tokenmill'].first):.2f} s."]
    starts = {"tokenmill": "tokenmill start-up", "encode_files": "encode_files start-up"}
    if all(name in ours for pair in starts.items() for name in pair):
        apart = {name: ours[name].median - ours[start].median for name, start in starts.items()}
        lines += ["", f"Start-up apart, tokenmill is {apart['encode_files'] / apart['tokenmill']:.2f} x encode_files."]
        if "tokenmill, 1 worker" in ours:
            alone = ours["tokenmill, 1 worker"].median - ours["tokenmill start-up"].median
            lines[-1] += f" All workers are {alone / apart['tokenmill']:.2f} x one."
    return lines


def head(arguments: argparse.Namespace) -> list[str]:
    processor = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in processor if line.startswith("model name")), "unknown CPU")
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("tokenmill", "gigatoken", "tokenizers")
    )
    flags = [f"--mb {arguments.mb}"] if arguments.mb else []
    flags += [f"--repeat {arguments.repeat}", *([f"--peers --part-mb {arguments.part_mb}"] if arguments.peers else [])]
    flags += [flag for flag, given in (("--one-worker", arguments.one_worker), ("--memory", arguments.memory)) if given]
    names = " ".join(f"--corpus {one.partition('=')[0]}=..." for one in arguments.corpus)
    tokenizers = " ".join(f"--tokenizer {one.partition('=')[0]}=..." for one in arguments.tokenizer)
    return [
        "# Tokenizing: measured",
        "",
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}.",
        "",
        f"    python benchmarks/tokenize.py {names} {tokenizers} {' '.join(flags)}",
        "",
        "Whole commands, medians in one run, each in turn. Everything is included: start-up, the parity",
        "gate, checksums and fsync. `encode_files` and `tokenizers` write nothing. Slow contenders read a part.",
    ]


if __name__ == "__main__":
    main()
