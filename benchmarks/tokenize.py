"""Compare how fast tokenmill and other tools tokenize a corpus.

    python benchmarks/tokenize.py --gb 3 --tokenizer path/to/gpt2 --grow path/to/grow

The contenders take turns on the same documents, `--repeat` times, each time in a fresh process. The table has medians
and the spread. "start-up" is the same command on a single document: imports, loading the tokenizer and, for tokenmill,
the parity gate. The program skips peers that are not installed.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

GIGATOKEN = """
import sys
from gigatoken import JsonlFileSource, Tokenizer
tokenizer = Tokenizer(sys.argv[1])
result = tokenizer.encode_files(JsonlFileSource(sys.argv[2:]))
print(len(result))
"""

HUGGINGFACE = """
import json, sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
limit = int(sys.argv[2]) * 10**6
batch, size, total = [], 0, 0
for path in sys.argv[3:]:
    for line in open(path, "rb"):
        batch.append(json.loads(line)["text"])
        total += len(line)
        if len(batch) == 1000 or total >= limit:
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                size += len(encoding.ids)
            batch = []
        if total >= limit:
            break
    if total >= limit:
        break
print(total)
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
LocalPipelineExecutor(
    [JsonlReader(sys.argv[3], glob_pattern="*.jsonl"), DocumentTokenizer(sys.argv[2],
     tokenizer_name_or_path=sys.argv[1], eos_token="<|endoftext|>", shuffle_documents=False)],
    tasks=2, workers=2, logging_dir=sys.argv[2] + "/logs").run()
"""


def main() -> None:
    arguments = parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="tokenmill-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    corpora = {kind: make_corpus(arguments, work, kind) for kind in ("jsonl", "jsonl.zst", "jsonl.gz")}
    small = work / "small"
    small.mkdir(exist_ok=True)
    (small / "one.jsonl").write_text(json.dumps({"text": "One document."}) + "\n")
    # pip compiles the packages that it installs, but an editable install may have no bytecode.
    compileall.compile_dir(HERE.parent / "src", quiet=1)
    contenders = make_contenders(arguments, work, corpora, small)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(arguments.repeat):
        for name, command in contenders.items():
            taken = measure(command, work / "out")
            seconds[name].append(taken)
            print(f"turn {turn + 1}  {name:<34} {taken:8.2f} s", file=sys.stderr, flush=True)
    report = render(arguments, corpora, seconds)
    print(report)
    if arguments.save:
        target = HERE / "results" / "tokenize.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(report)
    if not arguments.work:
        shutil.rmtree(work)


def parse() -> argparse.Namespace:
    shared = HERE.parent.parent / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--grow", default=str(shared / "grow"), help="program that generates a corpus")
    parser.add_argument("--mix", default="en")
    parser.add_argument("--tokenizer", default=str(shared / "tokenizers" / "gpt2"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hf-mb", type=int, default=100, help="size of the corpus for slow peers")
    parser.add_argument("--work", help="folder in which corpora are kept")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tokenize.md")
    return parser.parse_args()


def make_corpus(arguments: argparse.Namespace, work: Path, kind: str) -> Path:
    folder = work / f"{arguments.mix}-{arguments.gb}-{kind}"
    if not folder.exists():
        command = [sys.executable, arguments.grow, "--gb", str(arguments.gb), "--out", str(folder), "--files", "8"]
        subprocess.run([*command, "--format", kind, "--mix", arguments.mix], check=True)
    return folder


def make_contenders(
    arguments: argparse.Namespace, work: Path, corpora: dict[str, Path], small: Path
) -> dict[str, list[str]]:
    plain = sorted(str(p) for p in corpora["jsonl"].glob("*.jsonl"))
    tokenizer_file = str(Path(arguments.tokenizer) / "tokenizer.json")

    def ours(folder: Path, workers: int) -> list[str]:
        command = [str(Path(sys.executable).parent / "tokenmill"), "tokenize", str(folder), "-o", str(work / "out")]
        return [*command, "--tokenizer", arguments.tokenizer, "--workers", str(workers), "--quiet"]

    contenders = {
        "tokenmill, 2 workers": ours(corpora["jsonl"], 2),
        "tokenmill, 1 worker": ours(corpora["jsonl"], 1),
        "tokenmill, 2 workers, .zst": ours(corpora["jsonl.zst"], 2),
        "tokenmill, 2 workers, .gz": ours(corpora["jsonl.gz"], 2),
        "tokenmill start-up": ours(small, 2),
        "gigatoken encode_files": [sys.executable, "-c", GIGATOKEN, tokenizer_file, *plain],
        "gigatoken start-up": [sys.executable, "-c", GIGATOKEN, tokenizer_file, str(small / "one.jsonl")],
        "HF encode_batch_fast": [sys.executable, "-c", HUGGINGFACE, tokenizer_file, str(arguments.hf_mb), *plain],
    }
    if installed("datatrove"):
        part = work / "datatrove-input"
        if not part.exists():
            part.mkdir()
            for number in range(2):
                with open(plain[number], "rb") as source, open(part / f"{number}.jsonl", "wb") as target:
                    target.writelines(source.readlines(arguments.hf_mb * 10**6 // 2))
        command = [sys.executable, "-c", DATATROVE, tokenizer_file, str(work / "out"), str(part)]
        contenders["datatrove, 2 workers"] = command
    return contenders


def measure(command: list[str], out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - started


def render(arguments: argparse.Namespace, corpora: dict[str, Path], seconds: dict[str, list[float]]) -> str:
    size = sum(p.stat().st_size for p in corpora["jsonl"].glob("*.jsonl")) / 1e6
    amount = dict.fromkeys(seconds, size)
    amount |= {name: float(arguments.hf_mb) for name in seconds if name.startswith(("HF", "datatrove"))}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    speed = {name: amount[name] / median[name] for name in seconds}
    lines = [
        "# Tokenizing: measured",
        "",
        f"{size / 1000:.1f} GB of JSON lines in 8 files (`grow --mix {arguments.mix}`), GPT-2, {machine()}.",
        f"Command: `{command(arguments)}`. Median of {arguments.repeat} turns.",
        "Start-up, parity gate, checksums and fsync are included.",
        "",
        "| what | seconds | spread | MB/s of text |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        rate = "" if "start-up" in name else f"{speed[name]:.1f}"
        lines.append(f"| {name} | {median[name]:.2f} | {min(values):.2f}-{max(values):.2f} | {rate} |")
    lines += ["", "| ratio | value |", "|---|---|"]
    for name, value in ratios(median, speed, amount).items():
        lines.append(f"| {name} | {value:.2f} |")
    return "\n".join(lines) + "\n"


def command(arguments: argparse.Namespace) -> str:
    """Return the command that repeats the measurement, without paths."""
    return f"python benchmarks/tokenize.py --gb {arguments.gb:g} --repeat {arguments.repeat} --hf-mb {arguments.hf_mb}"


def ratios(median: dict[str, float], speed: dict[str, float], amount: dict[str, float]) -> dict[str, float]:
    two, one = "tokenmill, 2 workers", "tokenmill, 1 worker"
    giga = "gigatoken encode_files"
    ours_apart = median[two] - median["tokenmill start-up"]
    found = {
        "to gigatoken encode_files (in memory, writes nothing), start-up included": median[giga] / median[two],
        "to gigatoken encode_files, start-up apart": (median[giga] - median["gigatoken start-up"]) / ours_apart,
        "to HF encode_batch_fast, all threads": speed[two] / speed["HF encode_batch_fast"],
        "2 workers to 1, start-up apart": (median[one] - median["tokenmill start-up"]) / ours_apart,
        ".zst to plain": median[two] / median["tokenmill, 2 workers, .zst"],
        ".gz to plain": median[two] / median["tokenmill, 2 workers, .gz"],
    }
    if "datatrove, 2 workers" in speed:
        found["to datatrove, 2 workers"] = speed[two] / speed["datatrove, 2 workers"]
    return found


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("gigatoken", "tokenizers") if installed(name)
    )
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
