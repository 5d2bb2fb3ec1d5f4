"""Measure how fast one worker tokenizes supervised data, and what recording a chat template saves.

    python benchmarks/supervised.py --chat path/to/chat.jsonl.zst --tokenizer path/to/qwen3

The program repeats the records up to `--mb` megabytes, and subtracts start-up: the same command on a few records.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zstandard

from tokenmill.engines import load_tokenizer
from tokenmill.supervision.chat import ChatTemplate

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "data"
KEYS = ["--messages-key", "messages", "--prompt-key", "prompt", "--response-key", "response"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, default=SHARED / "chat.jsonl.zst")
    parser.add_argument(
        "--tokenizer", type=Path, nargs="+", default=[SHARED / "tokenizers" / n for n in ("qwen3", "llama3")]
    )
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/supervised.md")
    arguments = parser.parse_args()
    with arguments.chat.open("rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file).read()
    lines = [f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one worker", ""]
    lines += ["| tokenizer | MB/s of records | rendered anew, us | repeated, us | times |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        lines += [measure(arguments, tokenizer, data, Path(folder)) for tokenizer in arguments.tokenizer]
    lines += ["", f"`python benchmarks/supervised.py --mb {arguments.mb} --repeat {arguments.repeat}`", ""]
    report = "# Supervised data\n\n" + "\n".join(lines)
    print(report)
    if arguments.save:
        (HERE / "results" / "supervised.md").write_text(report)


def measure(arguments: argparse.Namespace, tokenizer: Path, data: bytes, folder: Path) -> str:
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    large.write_bytes(data * (arguments.mb * 10**6 // len(data) + 1))
    small.write_bytes(data[: data.index(b"\n", 1 << 17) + 1])
    speeds = []
    for _ in range(arguments.repeat):
        whole, startup = (tokenize(path, tokenizer, folder / "out") for path in (large, small))
        speeds.append((large.stat().st_size - small.stat().st_size) / (whole - startup) / 1e6)
    anew, repeated = render(tokenizer, data)
    speed = f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"
    return f"| {tokenizer.name} | {speed} | {anew:.0f} | {repeated:.1f} | {anew / repeated:.0f} |"


def tokenize(path: Path, tokenizer: Path, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    program = str(Path(sys.executable).parent / "tokenmill")
    command = [program, "tokenize", str(path), "-o", str(out), "--tokenizer", str(tokenizer), *KEYS]
    started = time.perf_counter()
    subprocess.run([*command, "--workers", "1", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def render(tokenizer: Path, data: bytes) -> tuple[float, float]:
    """Return the microseconds per conversation, rendered each time and replayed from recordings."""
    loaded = load_tokenizer(str(tokenizer))
    chat = ChatTemplate(loaded.chat_template or "", loaded.named_tokens, loaded.special_tokens)
    talks = [record["messages"] for record in map(json.loads, data.splitlines()) if "messages" in record][:2000]
    started = time.process_time()
    for talk in talks:
        chat._render_anew(talk, None)
    anew = time.process_time() - started
    for talk in talks:
        chat.apply(talk)
    started = time.process_time()
    for talk in talks:
        chat.apply(talk)
    repeated = time.process_time() - started
    return anew / len(talks) * 1e6, repeated / len(talks) * 1e6


if __name__ == "__main__":
    main()
