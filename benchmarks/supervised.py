"""Measure how fast one worker tokenizes supervised data, and what recording a chat template saves.

    python benchmarks/supervised.py --chat path/to/chat.jsonl.zst --tokenizer path/to/qwen3 --template path/to/x.jinja

The program repeats the records up to `--mb` megabytes, and subtracts start-up: the same command on a few records. For
conversations with tools it makes up calls and results out of the contents of the real ones, 1 to 40 turns long, and
renders them with the tokenizer's own template and with those of `--template`, in CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from tokenmill.engines import load_tokenizer
from tokenmill.supervision.chat import ChatTemplate
from tokenmill.supervision.options import Supervision
from tokenmill.text_batch import Refusal

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} the library, and return what is there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "description": "How many results to return at most."},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "browse", "summarize")
]
HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "data"
KEYS = ["--messages-key", "messages", "--prompt-key", "prompt", "--response-key", "response"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, default=SHARED / "chat.jsonl.zst")
    parser.add_argument(
        "--tokenizer", type=Path, nargs="+", default=[SHARED / "tokenizers" / n for n in ("qwen3", "llama3")]
    )
    parser.add_argument("--template", type=Path, nargs="*", default=[], help="more templates for talks with tools")
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
    lines += ["", "| conversations with tools | turns | MB/s rendered | us |", "|---|---|---|---|"]
    for tokenizer in arguments.tokenizer:
        lines += measure_tools(tokenizer, tokenizer.name, None, data)
    for template in arguments.template:
        lines += measure_tools(arguments.tokenizer[0], template.stem, template.read_text(), data)
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
    chat = ChatTemplate(loaded.chat_template or "", loaded.named_tokens, loaded.added_tokens)
    talks = [record["messages"] for record in map(json.loads, data.splitlines()) if "messages" in record][:2000]
    started = time.process_time()
    for talk in talks:
        chat.render(talk)
    anew = time.process_time() - started
    for talk in talks:
        chat.apply(talk)
    started = time.process_time()
    for talk in talks:
        chat.apply(talk)
    repeated = time.process_time() - started
    return anew / len(talks) * 1e6, repeated / len(talks) * 1e6


def measure_tools(tokenizer: Path, name: str, source: str | None, data: bytes) -> list[str]:
    """Measure how fast conversations with tools are rendered, for short and long ones."""
    loaded = load_tokenizer(str(tokenizer))
    options = Supervision(template_date="2026-01-31")
    lines = []
    for num_turns in (1, 10, 40):
        talks = list(itertools.islice(make_tool_talks(data, num_turns), 2000 // num_turns))
        chat = ChatTemplate(source or loaded.chat_template or "", loaded.named_tokens, loaded.added_tokens, options)
        if any(isinstance(chat.apply(talk, TOOLS), Refusal) for talk in talks[:3]):
            return [f"| {name} | refuses calls of tools | | |"]
        started = time.process_time()
        size = sum(len(rendered[0]) for rendered in (chat.apply(talk, TOOLS) for talk in talks))
        took = time.process_time() - started
        lines.append(f"| {name} | {num_turns} | {size / took / 1e6:.1f} | {took / len(talks) * 1e6:.0f} |")
    return lines


def make_tool_talks(data: bytes, num_turns: int) -> Iterator[list[dict[str, Any]]]:
    """Make conversations in which the assistant calls a tool in every second turn."""
    contents = itertools.cycle(
        message["content"] for record in map(json.loads, data.splitlines()) for message in record.get("messages", ())
    )
    while True:
        talk: list[dict[str, Any]] = [{"role": "system", "content": next(contents)}]
        for turn in range(num_turns):
            talk.append({"role": "user", "content": next(contents)})
            if turn % 2 == 0:
                arguments = {"query": next(contents), "limit": turn}
                calls = [{"type": "function", "function": {"name": "search", "arguments": arguments}}]
                talk.append({"role": "assistant", "content": "", "tool_calls": calls})
                talk.append({"role": "tool", "name": "search", "content": next(contents)})
            talk.append({"role": "assistant", "content": next(contents)})
        yield talk


if __name__ == "__main__":
    main()
