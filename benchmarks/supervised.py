"""Measure how fast one worker tokenizes supervised data, and what recording a chat template saves.

    python benchmarks/supervised.py --chat path/to/chat.jsonl.zst --tokenizer path/to/qwen3 --template path/to/x.jinja

The program repeats the records up to `--mb` megabytes, and subtracts start-up: the same command on a few records. For
conversations with tools it makes up calls and results out of the contents of the real ones, 1 to 40 turns long, with
messages of 50, 190 and 500 characters. It tokenizes those of 10 turns, and renders all of them with the tokenizer's own
template and with those of `--template`. Times are CPU seconds, of all processes together.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import itertools
import json
import platform
import resource
import shutil
import statistics
import subprocess
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
LENGTHS, TURNS = (50, 190, 500), (1, 10, 40)
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
    lines += ["| tokenizer | MB of records per CPU second | rendered anew, us | repeated, us | times |"]
    lines += ["|---|---|---|---|---|"]
    templates = [(tokenizer, tokenizer.name, None) for tokenizer in arguments.tokenizer]
    templates += [(arguments.tokenizer[-1], path.stem, path) for path in arguments.template]
    with tempfile.TemporaryDirectory() as folder:
        lines += [measure(arguments, tokenizer, data, Path(folder)) for tokenizer in arguments.tokenizer]
        heads = [f"{turns} x {length}" for length in LENGTHS for turns in TURNS]
        lines += ["", "Conversations with tools, turns x characters of a message: MB rendered per CPU second", ""]
        lines += [f"| template | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        lines += [measure_tools(tokenizer, name, path, data) for tokenizer, name, path in templates]
        heads = [f"10 x {length}" for length in LENGTHS]
        lines += ["", "The same, tokenized: MB of records per CPU second", ""]
        lines += [f"| template | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for tokenizer, name, path in templates:
            if not refuses_tools(tokenizer, path, data):
                lines.append(measure_tokenizing(arguments, (tokenizer, name, path), data, Path(folder)))
    lines += ["", f"`python benchmarks/supervised.py --mb {arguments.mb} --repeat {arguments.repeat}`", ""]
    report = "# Supervised data\n\n" + "\n".join(lines)
    print(report)
    if arguments.save:
        (HERE / "results" / "supervised.md").write_text(report)


def measure(arguments: argparse.Namespace, tokenizer: Path, data: bytes, folder: Path) -> str:
    speed = speed_of(arguments, tokenizer, data, folder)
    anew, repeated = render(tokenizer, data)
    return f"| {tokenizer.name} | {speed} | {anew:.0f} | {repeated:.1f} | {anew / repeated:.0f} |"


def speed_of(arguments: argparse.Namespace, tokenizer: Path, data: bytes, folder: Path, *flags: str) -> str:
    """Tokenize records again and again, up to the size that was asked for."""
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    large.write_bytes(data * (arguments.mb * 10**6 // len(data) + 1))
    small.write_bytes(data[: data.index(b"\n", 1 << 17) + 1])
    speeds = []
    for _ in range(arguments.repeat):
        whole, startup = (tokenize(path, tokenizer, folder / "out", *flags) for path in (large, small))
        speeds.append((large.stat().st_size - small.stat().st_size) / (whole - startup) / 1e6)
    return f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"


def tokenize(path: Path, tokenizer: Path, out: Path, *flags: str) -> float:
    shutil.rmtree(out, ignore_errors=True)
    program = str(Path(sys.executable).parent / "tokenmill")
    command = [program, "tokenize", str(path), "-o", str(out), "--tokenizer", str(tokenizer), *KEYS, *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--workers", "1", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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


def chat_of(tokenizer: Path, template: Path | None) -> ChatTemplate:
    loaded = load_tokenizer(str(tokenizer))
    source = template.read_text() if template is not None else loaded.chat_template or ""
    return ChatTemplate(source, loaded.named_tokens, loaded.added_tokens, Supervision(template_date="2026-01-31"))


def refuses_tools(tokenizer: Path, template: Path | None, data: bytes) -> bool:
    return isinstance(chat_of(tokenizer, template).apply(next(make_tool_talks(data, 2, 50)), TOOLS), Refusal)


def measure_tools(tokenizer: Path, name: str, template: Path | None, data: bytes) -> str:
    """Measure how fast conversations with tools are rendered, for short and long ones."""
    if refuses_tools(tokenizer, template, data):
        return f"| {name} | refuses calls of tools{' |' * len(LENGTHS) * len(TURNS)}"
    speeds = []
    for length in LENGTHS:
        for num_turns in TURNS:
            talks = list(itertools.islice(make_tool_talks(data, num_turns, length), 20_000 // num_turns))
            chat = chat_of(tokenizer, template)
            started = time.process_time()
            size = sum(len(rendered[0]) for rendered in (chat.apply(talk, TOOLS) for talk in talks))
            speeds.append(size / (time.process_time() - started) / 1e6)
    return f"| {name} | {' | '.join(f'{speed:.0f}' for speed in speeds)} |"


def measure_tokenizing(
    arguments: argparse.Namespace, template: tuple[Path, str, Path | None], data: bytes, folder: Path
) -> str:
    """Measure how fast conversations with tools are tokenized."""
    tokenizer, name, path = template
    flags = [] if path is None else ["--chat-template", str(path), "--template-date", "2026-01-31"]
    speeds = []
    for length in LENGTHS:
        talks = itertools.islice(make_tool_talks(data, 10, length), 1000)
        lines = [json.dumps({"messages": talk, "tools": TOOLS}, ensure_ascii=False) + "\n" for talk in talks]
        speeds.append(speed_of(arguments, tokenizer, "".join(lines).encode(), folder, *flags))
    return f"| {name} | {' | '.join(speeds)} |"


def make_tool_talks(data: bytes, num_turns: int, length: int) -> Iterator[list[dict[str, Any]]]:
    """Make conversations in which the assistant calls a tool in every second turn."""
    records = map(json.loads, data.splitlines())
    text = " ".join(message["content"] for record in records for message in record.get("messages", ()))
    contents = itertools.cycle(text[at : at + length] for at in range(0, len(text) - length, length))
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
