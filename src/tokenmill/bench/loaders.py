"""`bench loaders`: how fast batches come, from tokenmill's loaders and from what people write themselves.

Everybody gives (inputs, targets) of the same tokens in random order to the main process. The ways without tokenmill
read one flat file, which is made for them; tokenmill reads the data as it is. Importing a
framework comes before the clock starts, and memory is what is taken beyond that: pages of mapped files are
the kernel's and not counted.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tokenmill.bench.figures import Figure, judge
from tokenmill.bench.measuring import Answer, Contender, Tell, stopwatch, take_turns
from tokenmill.bench.reporting import Report, Row
from tokenmill.dataset.base import Rows
from tokenmill.dataset.packing import pack
from tokenmill.dataset.shuffling import shuffle
from tokenmill.dataset.slicing import take
from tokenmill.errors import UsageError
from tokenmill.store.opening import open_tokens

__all__ = ["FRAMEWORKS", "bench_loaders"]

FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "grain": "grain", "tf": "tensorflow"}
"""What `load` calls them, and the packages they are."""
MAX_BYTES = 256_000_000
SECONDS = 0.5
WARM_UP_BATCHES, WARM_UP_SECONDS = 3, 0.1
PIECE_TOKENS = 1 << 22
WORKERS = 2
"""Of the DataLoader that has some."""

Pairs = Iterator[tuple[Any, Any]]


class MemmapRows:
    """Rows of a flat file as everybody's own torch Dataset gives them: one at a time, collated afterwards."""

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
    """tokenmill's loader for a framework; JAX answers before it is done, so it is waited for."""
    from tokenmill.loaders import make_loader

    rows = _open_rows(data, seq_len, num_rows)
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


def bench_loaders(
    data: str,
    *,
    batch_sizes: Sequence[int],
    seq_len: int,
    num_batches: int | None,
    skip: Sequence[str],
    max_bytes: int | None,
    repeat: int,
    tell: Tell,
) -> Report:
    """Measure every loader at every batch size."""
    source = open_tokens(data)
    documents = source.split()
    limit = (max_bytes or MAX_BYTES) // documents.dtype.itemsize
    num_tokens = min(documents.num_tokens, limit)
    num_rows = (num_tokens - 1) // seq_len
    if num_rows < max(batch_sizes):
        raise UsageError(
            f"{data}: {num_tokens:,} tokens are {max(0, num_rows):,} rows of {seq_len}, fewer than a batch of "
            f"{max(batch_sizes)}; use a smaller --seq-len or --batch-size, or more data"
        )
    num_bytes = num_tokens * documents.dtype.itemsize
    report = Report("loaders", {"path": data, "num_tokens": num_tokens, "num_bytes": num_bytes, "seq_len": seq_len})
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        tell("writing the tokens to one flat file")
        flat = Path(folder) / "flat.bin"
        _write_flat(documents, num_tokens, flat)
        shared = {"seq_len": seq_len, "num_batches": num_batches}
        contenders = []
        for batch_size, make in itertools.product(batch_sizes, _contenders(data, flat, documents, num_rows, skip)):
            named = Contender(f"{make.name}, {batch_size}", make.target, make.settings)
            contenders.append(named.with_settings(batch_size=batch_size, **shared))
        turns = take_turns(contenders, repeat, tell)
    report.leave_out(turns.failures)
    report.leave_out(_missing(skip))
    for contender in contenders:
        if contender.name in turns.answers:
            name, _, size = contender.name.rpartition(", ")
            group = f"{size} rows of {seq_len:,} tokens"
            report.rows.append(_make_row(name, group, turns.answers[contender.name], int(size) * seq_len))
    _judge(report)
    return report


def run_loader(
    stream: str, settings: dict[str, Any], batch_size: int, seq_len: int, imports: list[str], num_batches: int | None
) -> Answer:
    """Open a stream of batches, take the first, warm up, and count."""
    for module in imports:
        import_module(module)
    if "torch" in sys.modules:
        # With several, a copy takes milliseconds whenever another process is on a core that it counts on.
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
    grown = _anonymous_bytes() - memory
    return {
        "seconds": taken.seconds,
        "cpu_seconds": taken.cpu_seconds,
        "num_batches": count,
        "first_seconds": first,
        "memory_bytes": max(0, grown),
        "dtype": str(x.dtype).rpartition(".")[2].strip("<>' "),
    }


def _count(pairs: Pairs, seconds: float, least: int) -> int:
    started = time.perf_counter()
    for count, _ in enumerate(pairs, 1):
        if count >= least and time.perf_counter() - started >= seconds:
            return count
    raise RuntimeError("the batches came to an end")


def _anonymous_bytes() -> int:
    """Memory of this process and its children that is no file's."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        with suppress(OSError, psutil.Error, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return total


def _open_rows(data: str, seq_len: int, num_rows: int) -> Rows:
    rows: Rows = pack(open_tokens(data).split(), seq_len=seq_len)
    return shuffle(take(rows, num_rows) if num_rows < len(rows) else rows, seed=0)


def _write_flat(documents: Any, num_tokens: int, path: Path) -> None:
    with path.open("wb") as file:
        for start in range(0, num_tokens, PIECE_TOKENS):
            piece = documents.read(start, min(start + PIECE_TOKENS, num_tokens))
            file.write(np.ascontiguousarray(piece, documents.dtype).data)


def _contenders(data: str, flat: Path, documents: Any, num_rows: int, skip: Sequence[str]) -> list[Contender]:
    """Everybody whose framework is installed and wanted."""

    def make(name: str, stream: str, imports: list[str], **settings: Any) -> Contender:
        job = {"stream": stream, "imports": imports, "settings": settings}
        return Contender(name, "tokenmill.bench.loaders:run_loader", job)

    plain = {"flat": str(flat), "dtype": documents.dtype.str}
    found = [make("np.memmap loop", "memmap", [], **plain)]
    usable = [name for name, package in FRAMEWORKS.items() if name not in skip and find_spec(package)]
    if "torch" in usable:
        imports = ["torch.utils.data"]
        found.append(make("torch DataLoader", "data_loader", imports, **plain))
        found.append(make(f"DataLoader, {WORKERS} workers", "data_loader", imports, **plain, workers=WORKERS))
    for name in usable:
        imports = [FRAMEWORKS[name], "tokenmill.loaders", "tokenmill.dataset.packing"]
        ours = {"data": str(Path(data).absolute()), "framework": name, "num_rows": num_rows}
        found.append(make(f"tokenmill {name}", "tokenmill", imports, **ours))
    return found


def _missing(skip: Sequence[str]) -> dict[str, str]:
    extras = {"grain": "jax"}
    missing = [name for name, package in FRAMEWORKS.items() if name not in skip and not find_spec(package)]
    reasons = {
        f"tokenmill {name}": f"not installed: pip install 'tokenmill[{extras.get(name, name)}]'" for name in missing
    }
    return reasons | {f"tokenmill {name}": f"--skip-{name}" for name in skip}


def _make_row(name: str, group: str, answers: list[Answer], batch_tokens: int) -> Row:
    figures = {
        "batches_per_second": Figure.of([answer["num_batches"] / answer["seconds"] for answer in answers]),
        "tokens_per_second": Figure.of(
            [batch_tokens * answer["num_batches"] / answer["seconds"] for answer in answers]
        ),
        "first_seconds": Figure.of([answer["first_seconds"] for answer in answers]),
        "memory_bytes": Figure.of([answer["memory_bytes"] for answer in answers]),
        "cpu_seconds": Figure.of([answer["cpu_seconds"] for answer in answers]),
    }
    facts = {"num_batches": [answer["num_batches"] for answer in answers], "dtype": answers[0]["dtype"]}
    return Row(name, figures, facts, group)


def _judge(report: Report) -> None:
    for group in report.groups:
        figures = {row.name: row.figures["tokens_per_second"] for row in report.rows if row.group == group}
        start = f"{group}: " if len(report.groups) > 1 else ""
        report.verdicts += [start + verdict for verdict in judge(figures)]
    narrow = sorted({row.name for row in report.rows if row.facts["dtype"] == "int32"})
    if narrow:
        report.notes.append(f"int32 instead of int64, half the bytes, as their frameworks want it: {', '.join(narrow)}")
    report.notes.append("memory: what was taken beyond importing the framework; pages of mapped files are not counted")
