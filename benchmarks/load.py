"""Compare how fast tokenmill and other loaders deliver batches to the main process.

    python benchmarks/load.py --peers path/to/venv/bin/python
    python benchmarks/load.py --cold --tokens 4G

The program makes a store, a flat file of the same tokens, and the peers' own formats. It checks the batches of each
contender in peers.py against the flat file. The contenders then take turns, `--repeat` times for each shape, each time
in a fresh process. The baseline is one gather per batch through torch's DataLoader, with the faster of two malloc
settings. `--peers` names an interpreter that has the peers, which are not installed with tokenmill; missing ones are
skipped.
"""

from __future__ import annotations

import sys

# This folder goes last, so that tokenize.py does not shadow the standard library's module of that name.
sys.path.append(sys.path.pop(0))

import argparse
import itertools
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
from peers import CONTENDERS, KEEP_MEMORY, SHUFFLE_ROWS, WORKERS

from tokenmill.store.manifest import MANIFEST, Manifest, ShardInfo, SplitInfo, encode_sealed, read_manifest
from tokenmill.store.shard import ShardWriter, publish_shard

HERE = Path(__file__).resolve().parent
NUM_SHARDS = 64
MEAN_DOCUMENT = 700
MIX = {"mix-a": 0.7, "mix-b": 0.2, "mix-c": 0.1}
"""Stores of the three-way mix, with their shares of the shards."""
BASELINES = ("gather", "gather, malloc keeps memory")
MEMMAP = "np.memmap, row by row"
"""The baseline for an empty page cache."""
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

Shape = tuple[int, int]
Results = dict[tuple[str, Shape], list[dict[str, Any]]]


def main() -> None:
    arguments = parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="tokenmill-bench-"))
    try:
        corpus = make_corpus(work, arguments.tokens)
        names, left_out = check(arguments, corpus)
        results = run_turns(arguments, corpus, names, left_out)
        report = render(arguments, corpus, results, left_out)
    finally:
        if not arguments.work:
            shutil.rmtree(work)
    print(report)
    if arguments.save:
        kind = "-cold" if arguments.cold else "-workers" if arguments.workers else ""
        target = HERE / "results" / f"{arguments.save}{kind}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(report)
    if any(name.startswith("tokenmill") for name in left_out):
        sys.exit("tokenmill itself failed at one of the shapes; see the end of the report")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_count, default="400M", help="size of the corpus")
    shapes = [(8, 2048), (8, 32768), (512, 1024)]
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=shapes, help="such as 8x2048 512x1024")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose name contains one of these")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum duration of a measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="measure with an empty page cache instead")
    parser.add_argument("--workers", action="store_true", help="compare loaders that have worker processes instead")
    parser.add_argument("--work", help="folder in which the corpus is kept")
    parser.add_argument("--save", nargs="?", const="load", metavar="NAME", help="write NAME.md in benchmarks/results")
    return parser.parse_args()


def parse_count(text: str) -> int:
    unit = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1], 1)
    return int(float(text.rstrip("kMG")) * unit)


def parse_shape(text: str) -> Shape:
    rows, length = text.split("x")
    return int(rows), int(length)


def make_corpus(work: Path, num_tokens: int) -> Path:
    """Make a store of random tokens, `flat.bin` with the same tokens, and stores for the mix that share its files."""
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
    """Make the manifest of a real run, and its tokenizer; `seal` adds the shards."""
    source = folder / "one.jsonl"
    source.write_text('{"text": "One document."}\n')
    program = [str(Path(sys.executable).parent / "tokenmill"), "tokenize", str(source), "-o", str(folder / "template")]
    subprocess.run([*program, "--tokenizer", "bytes", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return read_manifest(folder / "template")


def draw_lengths(rng: np.random.Generator, size: int) -> npt.NDArray[np.int32]:
    """Draw log-normal document lengths that add up to `size`."""
    drawn = rng.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, 100 + 2 * size // MEAN_DOCUMENT)
    ends = np.cumsum(np.maximum(drawn, 1).astype(np.int64))
    return np.diff(np.append(ends[ends < size], size), prepend=0).astype(np.int32)


def write_shard(store: Path, number: int, tokens: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int32]) -> ShardInfo:
    name = f"train/shard-00000-{number:04d}"
    writer = ShardWriter(store, name, dtype="uint16", keep_keys=(), run="bench")
    inputs, positions = np.zeros(len(lengths), np.int32), np.arange(len(lengths), dtype=np.int64)
    writer.append(tokens, lengths, inputs=inputs, positions=positions, kept=None)
    info = writer.finish()
    publish_shard(store, info, "bench")
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


def choose(arguments: argparse.Namespace) -> list[str]:
    if arguments.cold:
        return [MEMMAP, "tokenmill"]
    wanted = [part.lower() for part in arguments.only or [""]]
    known = [name for name in CONTENDERS if name.endswith(WORKERS) == arguments.workers]
    known = ["tokenmill", *known] if arguments.workers else known
    names = (name for name in known if any(part in name.lower() for part in wanted))
    return [*BASELINES, *(name for name in names if name not in (*BASELINES, MEMMAP))]


def check(arguments: argparse.Namespace, corpus: Path) -> tuple[list[str], dict[str, str]]:
    """Return the contenders that deliver the right tokens, and the reasons why others are skipped."""
    names, left_out = [], {}
    for name in choose(arguments):
        actions = ("prepare", "check") if CONTENDERS[name].make else ("check",)
        for shape, action in itertools.product(arguments.shapes, actions):
            reason = ask(arguments, action, name, corpus, shape).get("failed")
            if reason:
                left_out[name] = reason
                break
        else:
            names.append(name)
    if missing := {*baselines(arguments)} & {*left_out}:
        sys.exit(f"there is no baseline: {', '.join(missing)} failed")
    return names, left_out


def baselines(arguments: argparse.Namespace) -> tuple[str, ...]:
    return (MEMMAP,) if arguments.cold else BASELINES


def ask(arguments: argparse.Namespace, action: str, name: str, corpus: Path, shape: Shape) -> dict[str, Any]:
    """Run measure_loader.py in a new process and return its answer."""
    contender = CONTENDERS[name]
    python = arguments.peers if contender.is_peer else sys.executable
    # Without -I, tokenize.py in the same folder would shadow the standard library's module.
    command = [python, "-I", HERE / "measure_loader.py", action, name, corpus, *shape, arguments.seconds]
    environment = os.environ | QUIET | contender.environment
    answer: dict[str, Any]
    try:
        done = subprocess.run(
            list(map(str, command)), env=environment, check=True, capture_output=True, text=True, timeout=600
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        answer = {"failed": (error.stderr.strip().splitlines() or ["no message"])[-1]}
    except subprocess.TimeoutExpired as error:
        answer = {"failed": f"no answer in {error.timeout:.0f} s"}
    if "failed" in answer:
        print(f"{name} is skipped: {answer['failed']}", file=sys.stderr, flush=True)
    return answer


def run_turns(arguments: argparse.Namespace, corpus: Path, names: list[str], left_out: dict[str, str]) -> Results:
    """Measure every contender once per turn; skip a contender after its first failure."""
    results: Results = defaultdict(list)
    for turn in range(arguments.repeat):
        if not arguments.cold:
            fill_page_cache(corpus)
        for shape, name in itertools.product(arguments.shapes, names):
            if name in left_out:
                continue
            if arguments.cold:
                drop_page_cache(corpus)
            answer = ask(arguments, "cold" if arguments.cold else "measure", name, corpus, shape)
            if "failed" in answer:
                left_out[name] = f"{answer['failed']} (turn {turn + 1}, {shape})"
                continue
            results[name, shape].append(answer)
            speed = f"{answer['speed'] / 1e6:8.1f} Mtok/s"
            print(f"turn {turn + 1}  {shape!s:<12}  {name:<32}{speed}", file=sys.stderr, flush=True)
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


def render(arguments: argparse.Namespace, corpus: Path, results: Results, left_out: dict[str, str]) -> str:
    versions = sorted({answer["version"] for answers in results.values() for answer in answers})
    num_documents = len(np.load(corpus / "lengths.npy", mmap_mode="r"))
    lines = [
        f"# Loading{' with an empty page cache' if arguments.cold else ''}: measured",
        "",
        f"{arguments.tokens / 1e6:g}M uint16 tokens in {num_documents:,} documents and {NUM_SHARDS} shards.",
        f"{machine()}, {', '.join(versions)}.",
        f"Command: `{command(arguments)}`.",
        "",
        "Million tokens per second of (inputs, targets) that reach the main process, in random order:",
        f"median and spread of {arguments.repeat} turns, each in a fresh process, with one torch thread.",
        "`first`: from opening to the first batch, imports excluded. `memory`: growth of RssAnon.",
        *(explain_cold(corpus) if arguments.cold else explain_hot(has_workers=arguments.workers)),
    ]
    for shape in arguments.shapes:
        lines += ["", f"## {shape}", "", *make_table(arguments, results, shape)]
    if left_out:
        lines += ["", "## Skipped", "", *(f"- {name}: {reason}" for name, reason in left_out.items())]
    return "\n".join(lines) + "\n"


def explain_hot(*, has_workers: bool) -> list[str]:
    return [
        "",
        "`ratio` is to the better `gather`: one fancy index per batch of one mapped file, through",
        "DataLoader with `__getitems__`; its second row has",
        f"`{' '.join(f'{name}={value}' for name, value in KEEP_MEMORY.items())}`.",
        f"{'The first rows have no' if has_workers else 'There are no'} worker processes; other libraries use their "
        "default threads. Batches are int64 unless",
        f"noted. nanoGPT samples rows with replacement, tf.data shuffles through a buffer of {SHUFFLE_ROWS} rows,",
        "and Megatron's indices were built before. `no C`: tokenmill as installed without a compiler.",
    ]


def explain_cold(corpus: Path) -> list[str]:
    device = corpus.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    read_ahead = f"{setting.read_text().strip()} KB" if setting.exists() else "an unknown amount"
    return [
        "`read`: bytes from the disk for each byte of the tokens delivered.",
        "",
        "All files are dropped from the page cache before each measurement. The clock starts when the data is",
        f"opened and stops after an eighth of the corpus at most. The kernel reads up to {read_ahead} around a page",
        "fault, so it soon caches all of a small corpus; the result is then the speed of the disk.",
    ]


def make_table(arguments: argparse.Namespace, results: Results, shape: Shape) -> list[str]:
    """Format a Markdown table with aligned columns."""
    found = {name: answers for (name, other), answers in results.items() if other == shape}
    median = {
        name: {
            key: statistics.median(answer[key] for answer in answers) for key in ("speed", "first", "memory", "read")
        }
        for name, answers in found.items()
    }
    base = max(median[name]["speed"] for name in baselines(arguments) if name in median)
    cells = [("", "Mtok/s", "spread", "ratio", "first, ms", "memory, MB", *["read"] * arguments.cold)]
    for name, middle in median.items():
        speeds = [answer["speed"] / 1e6 for answer in found[name]]
        dtype = found[name][0]["dtype"]
        row = (
            name if dtype == "int64" else f"{name} ({dtype})",
            f"{middle['speed'] / 1e6:.1f}",
            f"{min(speeds):.1f}-{max(speeds):.1f}",
            f"{middle['speed'] / base:.2f}",
            f"{middle['first'] * 1e3:.0f}",
            f"{middle['memory'] / 1e6:.0f}",
        )
        cells.append((*row, *[f"{middle['read']:.1f}"] * arguments.cold))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {row[0]:<{widths[0]}} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |" for row in cells]
    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|"
    return [lines[0], rule, *lines[1:]]


def command(arguments: argparse.Namespace) -> str:
    """Return the command that repeats the measurement, without paths."""
    text = f"python benchmarks/load.py --tokens {arguments.tokens / 1e6:g}M --seconds {arguments.seconds:g}"
    text += f" --repeat {arguments.repeat} --shapes {' '.join(f'{rows}x{length}' for rows, length in arguments.shapes)}"
    if arguments.peers != sys.executable:
        text += " --peers PYTHON"
    if arguments.only:
        text += f" --only {' '.join(arguments.only)}"
    if arguments.cold:
        text += " --cold"
    if arguments.workers:
        text += " --workers"
    return text


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{model}, {os.cpu_count()} cores, {versions}"


if __name__ == "__main__":
    main()
