"""`bench loaders`: how fast batches come from tokenmill's loaders and from hand-written ones.

All contenders give (inputs, targets) of the same tokens in random order to the main process. Those without tokenmill
read one flat file, which is written for them; tokenmill reads the data as it is. The clock starts after importing a
framework, and memory is what a contender takes beyond that. Pages of mapped files belong to the kernel and do not
count.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tokenmill.arguments import is_remote
from tokenmill.dataset.pack import pack
from tokenmill.dataset.rows import Rows
from tokenmill.dataset.shuffle import shuffle
from tokenmill.dataset.slice import take
from tokenmill.errors import UsageError
from tokenmill.formats.open import open_tokens
from tokenmill.tools.bench.bench_report import BenchReport, BenchResult
from tokenmill.tools.bench.contenders import Answer, Contender, Effort, Finisher, stopwatch, sum_over_tree
from tokenmill.tools.bench.measurement import Measurement, measure

__all__ = ["FRAMEWORKS", "LoaderChoice", "bench_loaders"]

FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "grain": "grain", "tf": "tensorflow"}
"""Their names in `load`, and their packages."""
EXTRAS = {"grain": "jax"}
MAX_BYTES = 256_000_000
SECONDS = 0.5
WARM_UP_BATCHES, WARM_UP_SECONDS = 3, 0.1
PIECE_TOKENS = 1 << 22
WORKERS = 2
"""The number of processes of the DataLoader that has any."""
Pairs = Iterator[tuple[Any, Any]]


class MemmapRows:
    """Rows of a flat file as a typical torch Dataset gives them: one at a time, collated afterwards."""

    def __init__(self, path: str, dtype: str, seq_len: int) -> None:
        self._tokens = np.memmap(path, dtype, mode="r")
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        start = number * self._seq_len
        row = self._tokens[start : start + self._seq_len + 1].astype(np.int64)
        return row[:-1], row[1:]


def memmap_loop(flat: str, dtype: str, batch_size: int, seq_len: int) -> Pairs:
    """nanoGPT's get_batch in numpy: rows that start anywhere, one slice for each."""
    tokens = np.memmap(flat, dtype, mode="r")
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(tokens) - seq_len, batch_size).tolist()
        x = np.stack([tokens[start : start + seq_len].astype(np.int64) for start in starts])
        y = np.stack([tokens[start + 1 : start + 1 + seq_len].astype(np.int64) for start in starts])
        yield x, y


def data_loader(flat: str, dtype: str, batch_size: int, seq_len: int, workers: int = 0) -> Pairs:
    """torch's DataLoader over a flat file."""
    from torch.utils.data import DataLoader

    rows: Any = MemmapRows(flat, dtype, seq_len)
    batches = DataLoader(rows, batch_size=batch_size, shuffle=True, num_workers=workers)
    while True:
        yield from batches


def tokenmill_loader(data: str, framework: str, num_rows: int, batch_size: int, seq_len: int) -> Pairs:
    """tokenmill's loader for a framework. JAX returns before an array is ready, so this waits for it."""
    from tokenmill.loaders import make_loader

    rows: Rows = pack(open_tokens(data).split(), seq_len=seq_len)
    rows = shuffle(take(rows, num_rows) if num_rows < len(rows) else rows, seed=0)
    for batch in make_loader(rows, framework=framework, batch_size=batch_size):
        x, y = (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
        if framework == "jax":
            x.block_until_ready(), y.block_until_ready()
        yield x, y


STREAMS: dict[str, Callable[..., Pairs]] = {
    "memmap": memmap_loop,
    "data_loader": data_loader,
    "tokenmill": tokenmill_loader,
}


@dataclass(frozen=True)
class LoaderChoice:
    """Which loaders are measured, with which batches."""

    batch_sizes: Sequence[int] = (8, 64)
    seq_len: int = 1024
    num_batches: int | None = None
    """If None, as many as come in half a second."""
    skip: Sequence[str] = ()
    """Frameworks to leave out."""

    @property
    def frameworks(self) -> list[str]:
        """The frameworks that are installed and not left out."""
        return [name for name, package in FRAMEWORKS.items() if name not in self.skip and find_spec(package)]


def bench_loaders(path: str, choice: LoaderChoice, effort: Effort) -> BenchReport:
    """Measure every loader at every batch size, on all tokens of a store or the first part of them."""
    documents = open_tokens(path).split()
    item_bytes = documents.dtype.itemsize
    num_tokens = min(documents.num_tokens, (effort.max_bytes or MAX_BYTES) // item_bytes)
    # The last token of a row needs a target, too.
    num_rows, largest = max(0, (num_tokens - 1) // choice.seq_len), max(choice.batch_sizes)
    if num_rows < largest:
        raise UsageError(
            f"{path}: {num_tokens:,} tokens are {num_rows:,} rows of {choice.seq_len}, fewer than a "
            f"batch of {largest}; use a smaller --seq-len or --batch-size, or more data"
        )
    sizes = {"num_tokens": num_tokens, "num_bytes": num_tokens * item_bytes}
    report = BenchReport("loaders", {"path": path, **sizes, "seq_len": choice.seq_len})
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        effort.on_stage("writing the tokens to one flat file")
        flat = Path(folder) / "flat.bin"
        with flat.open("wb") as file:
            for start in range(0, num_tokens, PIECE_TOKENS):
                piece = documents.read(start, min(start + PIECE_TOKENS, num_tokens))
                file.write(np.ascontiguousarray(piece, documents.dtype).data)
        plain = {"flat": str(flat), "dtype": documents.dtype.str}
        stored = {"data": path if is_remote(path) else str(Path(path).absolute()), "num_rows": num_rows}
        report.race(list(_contenders(plain, stored, choice)), effort, _make_result, "tokens_per_second")
    report.left_out |= _missing(choice)
    narrow = sorted({row.name for row in report.rows if row.facts["dtype"] == "int32"})
    if narrow:
        report.notes.append(f"int32 as their frameworks want it, half the bytes of int64: {', '.join(narrow)}")
    report.notes.append("memory: taken beyond importing the framework; pages of mapped files do not count")
    return report


def run_loader(
    stream: str, settings: dict[str, Any], batch_size: int, seq_len: int, imports: list[str], num_batches: int | None
) -> Answer:
    """Open a stream of batches, take the first, warm up, and count."""
    for module in imports:
        import_module(module)
    if "torch" in sys.modules:
        # With several threads, a copy takes milliseconds whenever another process occupies one of their cores.
        sys.modules["torch"].set_num_threads(1)
    memory = _anonymous_bytes()
    opened = time.perf_counter()
    pairs = STREAMS[stream](**settings, batch_size=batch_size, seq_len=seq_len)
    x, y = next(pairs)
    first = time.perf_counter() - opened
    if tuple(x.shape) != (batch_size, seq_len) or tuple(y.shape) != (batch_size, seq_len):
        raise RuntimeError(f"a batch of {batch_size} rows of {seq_len} tokens has the shape {tuple(x.shape)}")
    _count(pairs, WARM_UP_SECONDS, WARM_UP_BATCHES)
    with stopwatch() as taken:
        count = _count(pairs, 0.0, num_batches) if num_batches else _count(pairs, SECONDS, 1)
    return {
        **taken,
        "num_batches": count,
        "first_seconds": first,
        "memory_bytes": max(0, _anonymous_bytes() - memory),
        "dtype": str(x.dtype).rpartition(".")[2].strip("<>' "),
    }


def _count(pairs: Pairs, seconds: float, least: int) -> int:
    started = time.perf_counter()
    for count, _ in enumerate(pairs, 1):
        if count >= least and time.perf_counter() - started >= seconds:
            return count
    raise RuntimeError("the batches came to an end")


def _anonymous_bytes() -> int:
    """Memory of this process and its descendants that is not mapped from a file."""

    def read(process: psutil.Process) -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    return int(sum_over_tree(read))


def _contenders(plain: dict[str, Any], stored: dict[str, Any], choice: LoaderChoice) -> Iterator[Contender]:
    """All loaders at every batch size: each has a stream, modules to import before it, and settings.

    `plain` are the settings of those that read the flat file, `stored` of those that read the data as it is.
    """
    loaders: list[tuple[str, str, list[str], dict[str, Any]]] = [("np.memmap loop", "memmap", [], plain)]
    if "torch" in choice.frameworks:
        imports, several = ["torch.utils.data"], {**plain, "workers": WORKERS}
        loaders.append(("torch DataLoader", "data_loader", imports, plain))
        loaders.append((f"DataLoader, {WORKERS} workers", "data_loader", imports, several))
    for name in choice.frameworks:
        imports = [FRAMEWORKS[name], "tokenmill.loaders", "tokenmill.dataset.pack"]
        loaders.append((f"tokenmill {name}", "tokenmill", imports, {**stored, "framework": name}))
    shape = {"seq_len": choice.seq_len, "num_batches": choice.num_batches}
    for size, (name, stream, imports, own) in itertools.product(choice.batch_sizes, loaders):
        settings = {"stream": stream, "imports": imports, "settings": own, **shape, "batch_size": size}
        yield Contender(f"{name}, {size}", f"{__name__}:run_loader", settings)


def _missing(choice: LoaderChoice) -> dict[str, str]:
    reasons = {}
    for name in FRAMEWORKS:
        if name in choice.skip:
            reasons[f"tokenmill {name}"] = f"--skip-{name}"
        elif name not in choice.frameworks:
            reasons[f"tokenmill {name}"] = f"not installed: pip install 'tokenmill[{EXTRAS.get(name, name)}]'"
    return reasons


def _make_result(finisher: Finisher) -> BenchResult:
    contender, answers = finisher.contender, finisher.answers
    batch_size, seq_len = contender.settings["batch_size"], contender.settings["seq_len"]
    speeds = [answer["num_batches"] / answer["seconds"] for answer in answers]
    figures = {
        "batches_per_second": Measurement.of(speeds),
        "tokens_per_second": Measurement.of([batch_size * seq_len * speed for speed in speeds]),
        **measure(answers, "first_seconds", "memory_bytes", "cpu_seconds"),
    }
    facts = {"num_batches": [answer["num_batches"] for answer in answers], "dtype": answers[0]["dtype"]}
    name = contender.name.rpartition(", ")[0]
    return BenchResult(name, figures, facts, f"{batch_size} rows of {seq_len:,} tokens")
