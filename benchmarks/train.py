"""What tokenizing inside the training loop costs: the tiny model on the same text, four ways.

    python benchmarks/train.py --save

Each way trains the model of `examples/train_torch.py` in a process of its own, with batches of the same size: it
tokenizes one sample after the other inside the loop, a batch of samples inside the loop, with `tokenmill.stream`, or
reads a store. The text is `../shared/data` repeated, or what the demo finds on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "data"
# Not this folder: its tokenize.py would hide the standard library's from torch.
sys.path[0] = str(HERE.parent / "examples")

WAYS = {
    "one sample at a time, in the loop": "sample",
    "a batch of samples, in the loop": "batch",
    "`tokenmill.stream`": "stream",
    "from a store": "store",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="JSON lines with a field text")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train.md")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(train(arguments.way, arguments.text, arguments.tokenizer, arguments.work, arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = find_data(arguments, Path(folder))
        runs = [
            {way: run(way, text, tokenizer, arguments.steps, Path(folder) / f"{way}-{n}") for way in WAYS.values()}
            for n in range(arguments.repeat)
        ]
    report = render(runs, arguments)
    print(report)
    if arguments.save:
        (HERE / "results" / "train.md").write_text(report)


def find_data(arguments: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Find text and a tokenizer: those of the flags, the shared ones, or those of the demo."""
    if arguments.text and arguments.tokenizer:
        return arguments.text, arguments.tokenizer
    if SHARED.is_dir():
        import zstandard

        text = folder / "web.jsonl"
        with (SHARED / "web_en.jsonl.zst").open("rb") as file, text.open("wb") as out:
            zstandard.ZstdDecompressor().copy_stream(file, out)
        return text, SHARED / "tokenizers" / "bytebpe8k"
    subprocess.run([sys.executable, "-m", "tokenmill", "demo", str(folder / "demo")], check=True, capture_output=True)
    return next((folder / "demo").rglob("*.jsonl")), next((folder / "demo").rglob("tokenizer.json")).parent


def run(way: str, text: Path, tokenizer: Path, steps: int, work: Path) -> dict[str, Any]:
    """Run one way in a process of its own."""
    work.mkdir()
    flags = ["--way", way, "--text", text, "--tokenizer", tokenizer, "--steps", steps, "--work", work]
    command = [sys.executable, str(HERE / "train.py"), *map(str, flags)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def train(way: str, text: Path, tokenizer: Path, work: Path, steps: int) -> dict[str, Any]:
    """Train the tiny model for some steps; return the speed, the table and the share of each part."""
    import torch
    import train_torch
    from tokenizers import Tokenizer

    import tokenmill as tm

    # One thread: the other cores are for tokenizing, as on a machine whose device is elsewhere.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    flags = train_torch.parse_flags(["--data", str(text), "--config", "tiny", "--device", "cpu"])
    source = make_source(way, text, tokenizer, work, flags)
    vocab_size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    model = train_torch.GPT(flags.num_layers, flags.num_heads, flags.width, vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = tm.StepClock(every=steps, tokens_per_step=flags.batch_size * flags.seq_len)
    for batch in clock.data(source):
        train_torch.train_step(model, optimizer, [batch], clock)
        if clock.end_step():
            break
    return {"speed": clock.tokens_per_second(), "shares": clock.shares(), "table": clock.table()}


def make_source(way: str, text: Path, tokenizer: Path, work: Path, config: Any) -> Any:
    """Make the source of batches."""
    import tokenmill as tm

    settings = {"seq_len": config.seq_len, "batch_size": config.batch_size, "framework": "torch"}
    if way == "stream":
        return tm.stream(str(text), tokenizer=str(tokenizer), cache=work / "tok", **settings)
    if way == "store":
        tm.tokenize(str(text), work / "tok", tokenizer=str(tokenizer))
        return tm.load(work / "tok", **settings)
    return TokenizesInTheLoop(text, tokenizer, config, at_once=1 if way == "sample" else config.batch_size)


class TokenizesInTheLoop:
    """The usual first attempt: read each sample, tokenize it, cut it to the length of a row, and stack."""

    bottleneck = "tokenizing; run `tokenmill tokenize` first"

    def __init__(self, text: Path, tokenizer: Path, config: Any, at_once: int) -> None:
        from tokenizers import Tokenizer

        self._text = text
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._shape = (config.batch_size, config.seq_len)
        self._at_once = at_once

    def __iter__(self) -> Iterator[Any]:
        batch_size, seq_len = self._shape
        samples = self._samples()
        while True:
            rows: list[list[int]] = []
            while len(rows) < batch_size:
                texts = [next(samples) for _ in range(self._at_once)]
                if self._at_once == 1:
                    encoded = [self._tokenizer.encode(texts[0])]
                else:
                    encoded = self._tokenizer.encode_batch(texts)
                rows += [one.ids[: seq_len + 1] for one in encoded if len(one.ids) > seq_len]
            yield _Batch(rows[:batch_size])

    def _samples(self) -> Iterator[str]:
        while True:
            with self._text.open("rb") as file:
                for line in file:
                    yield json.loads(line)["text"]


class _Batch:
    is_masked = False

    def __init__(self, rows: list[list[int]]) -> None:
        import torch

        tokens = torch.tensor(rows)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].contiguous()


def render(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Render a table of the four ways, and the step table of the median run of each."""
    fastest = statistics.median(run["store"]["speed"] for run in runs)
    lines = ["| batches come from | tokens/s | of a store's | waits for data |", "|---|---|---|---|"]
    tables = []
    for name, way in WAYS.items():
        speeds = [run[way]["speed"] for run in runs]
        middle = sorted(runs, key=lambda run: run[way]["speed"])[len(runs) // 2][way]
        waits = statistics.median(run[way]["shares"]["data"] for run in runs)
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        speed = statistics.median(speeds)
        lines.append(f"| {name} | {speed:,.0f} ({spread}) | {speed / fastest:.2f} | {waits:.1%} |")
        tables += [f"## {name}", "", "```", middle["table"], "```", ""]
    version = f"Python {platform.python_version()}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {version}, no accelerator, one thread for the model"
    command = f"`python benchmarks/train.py --steps {arguments.steps} --repeat {arguments.repeat}`"
    head = ["# Training the tiny model, four ways", "", f"{machine}; {command}; median of {len(runs)} (range)", ""]
    return "\n".join([*head, *lines, "", *tables])


if __name__ == "__main__":
    main()
