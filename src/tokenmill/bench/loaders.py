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
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tokenmill.bench.figures import Figure, judge
from tokenmill.bench.measuring import Answer, Contender, Effort, stopwatch, take_turns
from tokenmill.bench.reporting import Report, Row
from tokenmill.dataset.base import Rows
from tokenmill.dataset.packing import pack
from tokenmill.dataset.shuffling import shuffle
from tokenmill.dataset.slicing import take
from tokenmill.errors import UsageError
from tokenmill.remote.bucket import is_remote
from tokenmill.store.opening import open_tokens

__all__ = ["FRAMEWORKS", "Wanted", "bench_loaders"]

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


@dataclass(frozen=True)
class Wanted:
    """Which batches are measured."""

    batch_sizes: Sequence[int] = (8, 64)
    seq_len: int = 1024
    num_batches: int | None = None
    """As many as come in half a second, if None."""
    skip: Sequence[str] = ()
    """Frameworks to leave out."""

    @property
    def frameworks(self) -> list[str]:
        """Those that are installed and not left out."""
        return [name for name, package in FRAMEWORKS.items() if name not in self.skip and find_spec(package)]


class _Data:
    """The tokens that everybody reads: those of a store, or the first part of them."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self._documents = open_tokens(path).split()
        self.dtype = self._documents.dtype
        self.num_tokens = min(self._documents.num_tokens, max_bytes // self.dtype.itemsize)

    @property
    def place(self) -> str:
        """Where other processes find them."""
        return self.path if is_remote(self.path) else str(Path(self.path).absolute())

    def num_rows(self, seq_len: int) -> int:
        """Rows that have a target for their last token."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def check(self, wanted: Wanted) -> None:
        """Refuse batches of more rows than there are."""
        num_rows, largest = self.num_rows(wanted.seq_len), max(wanted.batch_sizes)
        if num_rows < largest:
            raise UsageError(
                f"{self.path}: {self.num_tokens:,} tokens are {num_rows:,} rows of {wanted.seq_len}, fewer than a "
                f"batch of {largest}; use a smaller --seq-len or --batch-size, or more data"
            )

    def write_flat(self, path: Path) -> None:
        """Write the tokens as scripts without tokenmill read them."""
        with path.open("wb") as file:
            for start in range(0, self.num_tokens, PIECE_TOKENS):
                piece = self._documents.read(start, min(start + PIECE_TOKENS, self.num_tokens))
                file.write(np.ascontiguousarray(piece, self.dtype).data)


STREAMS: dict[str, Callable[..., Pairs]] = {
    "memmap": memmap_loop,
    "data_loader": data_loader,
    "tokenmill": tokenmill_loader,
}


def bench_loaders(path: str, wanted: Wanted, effort: Effort) -> Report:
    """Measure every loader at every batch size."""
    data = _Data(path, effort.max_bytes or MAX_BYTES)
    data.check(wanted)
    sizes = {"num_tokens": data.num_tokens, "num_bytes": data.num_tokens * data.dtype.itemsize}
    report = Report("loaders", {"path": path, **sizes, "seq_len": wanted.seq_len})
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        effort.tell("writing the tokens to one flat file")
        data.write_flat(Path(folder) / "flat.bin")
        contenders = list(_contenders(data, Path(folder) / "flat.bin", wanted))
        turns = take_turns(contenders, effort)
    report.leave_out(turns.failures)
    report.leave_out(_missing(wanted))
    for contender in contenders:
        if contender.name in turns.answers:
            report.rows.append(_make_row(contender, turns.answers[contender.name]))
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


def _contenders(data: _Data, flat: Path, wanted: Wanted) -> Iterator[Contender]:
    """Everybody at every batch size."""
    shape = {"seq_len": wanted.seq_len, "num_batches": wanted.num_batches}
    for size, (name, job) in itertools.product(wanted.batch_sizes, _jobs(data, flat, wanted)):
        settings = {**job, **shape, "batch_size": size}
        yield Contender(f"{name}, {size}", "tokenmill.bench.loaders:run_loader", settings)


def _jobs(data: _Data, flat: Path, wanted: Wanted) -> list[tuple[str, dict[str, Any]]]:
    """Everybody whose framework is installed and wanted: which stream, and what has to be imported for it."""
    plain = {"flat": str(flat), "dtype": data.dtype.str}
    found = [("np.memmap loop", _job("memmap", [], plain))]
    if "torch" in wanted.frameworks:
        imports = ["torch.utils.data"]
        found.append(("torch DataLoader", _job("data_loader", imports, plain)))
        found.append((f"DataLoader, {WORKERS} workers", _job("data_loader", imports, {**plain, "workers": WORKERS})))
    for name in wanted.frameworks:
        imports = [FRAMEWORKS[name], "tokenmill.loaders", "tokenmill.dataset.packing"]
        ours = {"data": data.place, "framework": name, "num_rows": data.num_rows(wanted.seq_len)}
        found.append((f"tokenmill {name}", _job("tokenmill", imports, ours)))
    return found


def _job(stream: str, imports: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {"stream": stream, "imports": imports, "settings": settings}


def _missing(wanted: Wanted) -> dict[str, str]:
    extras = {"grain": "jax"}
    absent = [name for name in FRAMEWORKS if name not in (*wanted.skip, *wanted.frameworks)]
    reasons = {
        f"tokenmill {name}": f"not installed: pip install 'tokenmill[{extras.get(name, name)}]'" for name in absent
    }
    return reasons | {f"tokenmill {name}": f"--skip-{name}" for name in wanted.skip}


def _make_row(contender: Contender, answers: list[Answer]) -> Row:
    batch_size, seq_len = contender.settings["batch_size"], contender.settings["seq_len"]
    speeds = [answer["num_batches"] / answer["seconds"] for answer in answers]
    figures = {
        "batches_per_second": Figure.of(speeds),
        "tokens_per_second": Figure.of([batch_size * seq_len * speed for speed in speeds]),
        "first_seconds": Figure.of([answer["first_seconds"] for answer in answers]),
        "memory_bytes": Figure.of([answer["memory_bytes"] for answer in answers]),
        "cpu_seconds": Figure.of([answer["cpu_seconds"] for answer in answers]),
    }
    facts = {"num_batches": [answer["num_batches"] for answer in answers], "dtype": answers[0]["dtype"]}
    name = contender.name.rpartition(", ")[0]
    return Row(name, figures, facts, f"{batch_size} rows of {seq_len:,} tokens")


def _judge(report: Report) -> None:
    for group in report.groups:
        figures = {row.name: row.figures["tokens_per_second"] for row in report.rows if row.group == group}
        start = f"{group}: " if len(report.groups) > 1 else ""
        report.verdicts += [start + verdict for verdict in judge(figures)]
    narrow = sorted({row.name for row in report.rows if row.facts["dtype"] == "int32"})
    if narrow:
        report.notes.append(f"int32 instead of int64, half the bytes, as their frameworks want it: {', '.join(narrow)}")
    report.notes.append("memory: what was taken beyond importing the framework; pages of mapped files are not counted")
