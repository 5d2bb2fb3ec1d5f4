"""How fast batches reach the main process, tokenmill against what people use, in one run, as ratios.

    python benchmarks/load.py --peers path/to/venv/bin/python --cold

Makes a store, the same tokens as one flat file, and what the peers read. Each contender of peers.py then runs in
a fresh process, in turns, `--repeat` times for each shape; its batches are first compared with the flat file.
The baseline is one gather per batch through torch's DataLoader, in the better of two states of malloc.
Peers do not belong into tokenmill's environment: `--peers` names an interpreter that has them; those it
lacks are left out.
"""

from __future__ import annotations

import sys

# This folder goes last: tokenize.py must not stand in for the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from peers import CONTENDERS, KEEP_MEMORY, SHUFFLE_ROWS

from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, SplitInfo, encode_sealed, read_manifest
from tokenmill.store.shard import ShardWriter

HERE = Path(__file__).resolve().parent
NUM_SHARDS = 64
MEAN_DOCUMENT = 700
MIX = {"mix-a": 0.7, "mix-b": 0.2, "mix-c": 0.1}
"""Stores of the three-way mix, and their part of the shards."""
BASELINES = ("gather", "gather, malloc keeps memory")
COLD = ("np.memmap, row by row", "tokenmill")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

Shape = tuple[int, int]
Results = dict[tuple[str, Shape], list[dict[str, Any]]]


def main() -> None:
    arguments = parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="tokenmill-bench-"))
    try:
        corpus = make_corpus(work, arguments.tokens)
        names, left_out = choose(arguments, corpus)
        hot = run_turns(arguments, corpus, names, "measure")
        cold = run_turns(arguments, corpus, COLD, "cold") if arguments.cold else {}
        report = render(arguments, corpus, hot, cold, left_out)
    finally:
        if not arguments.work:
            shutil.rmtree(work)
    print(report)
    if arguments.save:
        target = HERE / "results" / "load.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default="400M", help="size of the corpus")
    shapes = ["8x2048", "8x32768", "512x1024"]
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=shapes, help="rows x tokens per row")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose name contains one of these")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each measurement takes at least")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="measure with an empty page cache, too")
    parser.add_argument("--work", help="folder for the corpus that is kept")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/load.md")
    arguments = parser.parse_args()
    arguments.shapes = [parse_shape(shape) if isinstance(shape, str) else shape for shape in arguments.shapes]
    return arguments


def parse_count(text: str) -> int:
    unit = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1], 1)
    return int(float(text.rstrip("kMG")) * unit)


def parse_shape(text: str) -> Shape:
    rows, length = text.split("x")
    return int(rows), int(length)


def make_corpus(work: Path, num_tokens: int) -> Path:
    """A store of random tokens, the same tokens in `flat.bin`, and stores for the mix that share its files."""
    corpus = work / f"corpus-{num_tokens}"
    if corpus.exists():
        return corpus
    started = time.perf_counter()
    draft = work / f"{corpus.name}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "store").mkdir(parents=True)
    template = make_template(draft)
    rng = np.random.default_rng(0)
    parts = rng.uniform(1, 14, NUM_SHARDS)
    ends = np.rint(np.cumsum(parts) / parts.sum() * num_tokens).astype(np.int64)
    shards, all_lengths = [], []
    with (draft / "flat.bin").open("wb") as flat:
        for number, size in enumerate(np.diff(ends, prepend=0).tolist()):
            lengths = draw_lengths(rng, size)
            tokens = rng.integers(0, 1 << 16, size, np.uint16)
            tokens[np.cumsum(lengths) - 1] = template.special_tokens.eos_id
            flat.write(tokens.data)
            shards.append(write_shard(draft / "store", number, tokens, lengths))
            all_lengths.append(lengths)
    np.save(draft / "lengths.npy", np.concatenate(all_lengths))
    seal(draft, "store", template, shards)
    bounds = np.searchsorted(ends, np.cumsum(list(MIX.values()))[:-1] * num_tokens)
    for name, first, last in zip(MIX, (0, *bounds), (*bounds, NUM_SHARDS), strict=True):
        seal(draft, name, template, shards[first:last])
    draft.rename(corpus)
    print(f"corpus of {num_tokens:,} tokens: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return corpus


def make_template(folder: Path) -> Manifest:
    """The manifest of a real run, and its tokenizer; shards are put in by `seal`."""
    source = folder / "one.jsonl"
    source.write_text('{"text": "One document."}\n')
    program = [str(Path(sys.executable).parent / "tokenmill"), "tokenize", str(source), "-o", str(folder / "template")]
    subprocess.run([*program, "--tokenizer", "bytes", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return read_manifest(folder / "template")


def draw_lengths(rng: np.random.Generator, size: int) -> npt.NDArray[np.int32]:
    """Log-normal document lengths that add up to `size`."""
    drawn = rng.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, 100 + 2 * size // MEAN_DOCUMENT)
    ends = np.cumsum(np.maximum(drawn, 1).astype(np.int64))
    return np.diff(np.append(ends[ends < size], size), prepend=0).astype(np.int32)


def write_shard(store: Path, number: int, tokens: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int32]) -> ShardInfo:
    name = f"train/shard-00000-{number:04d}"
    writer = ShardWriter(store, name, dtype="uint16", keep_keys=(), run="bench")
    inputs, positions = np.zeros(len(lengths), np.int32), np.arange(len(lengths), dtype=np.int64)
    writer.append(tokens, lengths, inputs=inputs, positions=positions, kept=None)
    info = writer.finish()
    writer.publish()
    return info


def seal(folder: Path, name: str, template: Manifest, shards: list[ShardInfo]) -> None:
    """Make a store of some shards of `store`, without copying them."""
    target = folder / name
    (target / "train").mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder / "template" / "tokenizer", target / "tokenizer")
    for path in (f"{shard.name}{suffix}" for shard in shards for suffix in shard.files):
        if not (target / path).exists():
            (target / path).hardlink_to(folder / "store" / path)
    num_documents = sum(shard.num_documents for shard in shards)
    manifest = msgspec.structs.replace(
        template,
        dtype="uint16",
        tokenizer=msgspec.structs.replace(template.tokenizer, vocab_size=1 << 16),
        splits={"train": SplitInfo(num_documents, sum(shard.num_tokens for shard in shards), shards)},
        num_documents_in=num_documents,
    )
    (target / MANIFEST).write_bytes(encode_sealed(manifest))


def choose(arguments: argparse.Namespace, corpus: Path) -> tuple[list[str], dict[str, str]]:
    """The contenders that can run and give the right tokens, and why the others are left out."""
    names, left_out = [], {}
    for name in CONTENDERS:
        wanted = arguments.only is None or any(part.lower() in name.lower() for part in arguments.only)
        if name == COLD[0] or not (wanted or name in BASELINES):
            continue
        for action, (rows, length) in ((a, s) for s in arguments.shapes for a in ("prepare", "check")):
            try:
                answer = ask(arguments, action, name, corpus, rows, length)
            except subprocess.CalledProcessError as error:
                answer = {"failed": (error.stderr.strip().splitlines() or ["no message"])[-1]}
            except subprocess.TimeoutExpired:
                answer = {"failed": "no answer"}
            if answer:
                ((kind, value),) = answer.items()
                left_out[name] = f"{value} is not installed" if kind == "missing" else f"failed: {value}"
                print(f"{name} is left out: {left_out[name]}", file=sys.stderr, flush=True)
                break
        else:
            names.append(name)
    return names, left_out


def ask(arguments: argparse.Namespace, action: str, name: str, corpus: Path, rows: int, length: int) -> Any:
    """What peers.py answers in a process of its own."""
    contender = CONTENDERS[name]
    python = arguments.peers if contender.is_peer else sys.executable
    # -I: `python benchmarks/peers.py` would find tokenize.py beside it where the standard library's is meant.
    command = [python, "-I", str(HERE / "peers.py"), action, name, str(corpus), str(rows), str(length)]
    answer = subprocess.run(
        [*command, str(arguments.seconds)],
        env=os.environ | QUIET | contender.environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def run_turns(arguments: argparse.Namespace, corpus: Path, names: Any, action: str) -> Results:
    results: Results = defaultdict(list)
    for turn in range(arguments.repeat):
        if action == "measure":
            fill_page_cache(corpus)
        for rows, length in arguments.shapes:
            for name in names:
                if action == "cold":
                    drop_page_cache(corpus)
                answer = ask(arguments, action, name, corpus, rows, length)
                results[name, (rows, length)].append(answer)
                label = f"turn {turn + 1}  {action}  ({rows}, {length})"
                print(f"{label:<32} {name:<32} {answer['speed'] / 1e6:8.1f} Mtok/s", file=sys.stderr, flush=True)
    return results


def fill_page_cache(corpus: Path) -> None:
    for path in filter(Path.is_file, corpus.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def drop_page_cache(corpus: Path) -> None:
    for path in (corpus / "flat.bin", *filter(Path.is_file, (corpus / "store").rglob("*"))):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def render(arguments: argparse.Namespace, corpus: Path, hot: Results, cold: Results, left_out: dict[str, str]) -> str:
    versions = sorted({answer["version"] for answers in hot.values() for answer in answers})
    num_documents = len(np.load(corpus / "lengths.npy", mmap_mode="r"))
    keep = ", ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items())
    lines = [
        "# Loading: measured",
        "",
        f"{arguments.tokens / 1e6:g}M uint16 tokens in {num_documents:,} documents and {NUM_SHARDS} shards.",
        f"{machine()}.",
        f"{', '.join(versions)}.",
        f"Command: `{command(arguments)}`.",
        "",
        "Million tokens per second of (inputs, targets) that reach the main process, page cache hot; median and spread",
        f"of {arguments.repeat} turns, each in a fresh process. `ratio` is to the better `gather`: one fancy index per",
        f"batch through DataLoader with `__getitems__`; its second row has {keep}.",
        "torch has one thread everywhere; threads of other libraries are as they come, and no contender has worker",
        "processes. `first`: from opening to the first batch, imports excluded. `memory`: growth of RssAnon.",
        "Batches are int64 unless said. nanoGPT draws rows with replacement and tf.data shuffles through a buffer of",
        f"{SHUFFLE_ROWS} rows. Megatron's indices were built before.",
    ]
    for shape in arguments.shapes:
        lines += ["", f"## {shape}", "", *make_table(hot, shape, BASELINES)]
    if cold:
        lines += ["", "## Page cache empty", "", "The files are dropped from the page cache before each measurement;"]
        lines += ["the clock runs from the opening on, until an eighth of the corpus was read at most."]
        for shape in arguments.shapes:
            lines += ["", f"### {shape}", "", *make_table(cold, shape, COLD[:1])]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {name}: {reason}" for name, reason in left_out.items())]
    return "\n".join(lines) + "\n"


def make_table(results: Results, shape: Shape, baselines: tuple[str, ...]) -> list[str]:
    """Markdown that also lines up as plain text."""
    found = {name: answers for (name, other), answers in results.items() if other == shape}
    median = {name: statistics.median(a["speed"] for a in answers) for name, answers in found.items()}
    base = max(median[name] for name in baselines)
    cells = [("", "Mtok/s", "spread", "ratio", "first, ms", "memory, MB")]
    for name, answers in found.items():
        speeds = [answer["speed"] / 1e6 for answer in answers]
        first = statistics.median(answer["first"] for answer in answers) * 1e3
        memory = statistics.median(answer["memory"] for answer in answers) / 1e6
        dtype = answers[0]["dtype"]
        title = name if dtype == "int64" else f"{name} ({dtype})"
        spread = f"{min(speeds):.1f}-{max(speeds):.1f}"
        ratio = f"{median[name] / base:.2f}"
        cells.append((title, f"{median[name] / 1e6:.1f}", spread, ratio, f"{first:.0f}", f"{memory:.0f}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {row[0]:<{widths[0]}} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |" for row in cells]
    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|"
    return [lines[0], rule, *lines[1:]]


def command(arguments: argparse.Namespace) -> str:
    """What to type to measure it again; where things lie does not matter."""
    text = f"python benchmarks/load.py --tokens {arguments.tokens / 1e6:g}M --seconds {arguments.seconds:g}"
    text += f" --repeat {arguments.repeat}"
    if arguments.peers != sys.executable:
        text += " --peers PYTHON"
    if arguments.only:
        text += f" --only {' '.join(arguments.only)}"
    return text + " --cold" * arguments.cold


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{model}, {os.cpu_count()} cores, {versions}"


if __name__ == "__main__":
    main()
