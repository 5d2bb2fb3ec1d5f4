"""Measure one contender of load.py in a process of its own.

    python -I benchmarks/measure_loader.py measure litdata CORPUS 8 2048 2.0

load.py starts this file in a fresh process for each measurement, with the contender's interpreter, so that a process
imports only what it measures. `-I` keeps benchmarks/tokenize.py from shadowing the standard library's `tokenize`. The
last line of stdout is the answer, as JSON.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parent))  # after the standard library
from peers import CONTENDERS, IGNORED, Contender, Pairs, Tokens, read_flat

WARM_UP_SECONDS = 0.3
WARM_UP_BATCHES = 3
COLD_FRACTION = 1 / 8
"""A cold measurement stops after this share of the corpus: later rows would come from the page cache."""
SEARCH_TOKENS = 1 << 26


def prepare(contender: Contender, corpus: Path, length: int) -> None:
    """Write the corpus in a peer's own format."""
    target = corpus / contender.made.format(length=length)
    if contender.make is not None and not target.exists():
        draft = target.with_name(target.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        contender.make(corpus, draft, length)
        draft.rename(target)


def check(contender: Contender, corpus: Path, rows: int, length: int) -> None:
    """Compare a few batches with the flat file. Its temporaries change malloc's state: never time in this process."""
    flat = read_flat(corpus)
    for batch in itertools.islice(contender.stream(corpus, rows, length), 3):
        x, y = (np.asarray(part) for part in batch)
        if not x.shape == y.shape == (rows, length):
            raise ValueError(f"a batch of {rows} rows of {length} tokens has the shapes {x.shape} and {y.shape}")
        is_good = y[:, :-1] == x[:, 1:]
        if contender.is_masked:
            is_good |= y[:, :-1] == IGNORED
        if contender.is_cut:
            # Without the targets at the ends of pieces, and the padding.
            is_good |= ~is_good & (np.count_nonzero(~is_good) < is_good.size // 20)
        if not is_good.all():
            raise ValueError(f"{np.count_nonzero(~is_good)} targets are not the next input")
        for number in (0, rows // 2, rows - 1) if contender.copies_slices else ():
            row = x[number] if contender.is_masked else np.append(x[number], y[number, -1:])
            if not is_slice(row, flat):
                raise ValueError(f"row {number} of a batch is not in the corpus")


def is_slice(row: npt.NDArray[Any], flat: Tokens) -> bool:
    for first in range(0, len(flat) - len(row) + 1, SEARCH_TOKENS):
        piece = flat[first : first + SEARCH_TOKENS + len(row) - 1]
        starts = np.flatnonzero(piece[: len(piece) - len(row) + 1] == row[0])
        for place in range(1, 8):
            starts = starts[piece[starts + place] == row[place]]
        if any(np.array_equal(piece[start : start + len(row)], row) for start in starts):
            return True
    return False


def measure(contender: Contender, corpus: Path, rows: int, length: int, seconds: float, *, cold: bool) -> Any:
    """Measure tokens per second after a warm-up; with `cold`, from opening the data on, and read nothing twice."""
    memory, disk = anonymous_bytes(), disk_bytes()
    opened = time.perf_counter()
    stream = contender.stream(corpus, rows, length)
    inputs, _ = next(stream)
    first = time.perf_counter() - opened
    if cold:
        most = int((corpus / "flat.bin").stat().st_size / 2 * COLD_FRACTION) // (rows * length)
        count, elapsed = count_batches(stream, seconds, most=most)
        count, elapsed = count + 1, elapsed + first
    else:
        count_batches(stream, WARM_UP_SECONDS, least=WARM_UP_BATCHES)
        count, elapsed = count_batches(stream, seconds)
    tokens = count * rows * length
    return {
        "speed": tokens / elapsed,
        "first": first,
        "memory": anonymous_bytes() - memory,
        "read": (disk_bytes() - disk) / (2 * tokens),
        "dtype": np.asarray(inputs).dtype.name,
        "version": f"{contender.package} {find_version(contender)}",
    }


def find_version(contender: Contender) -> str:
    """Ask the module for its version: TensorFlow is installed under several package names."""
    module = sys.modules[contender.imports[-1].split(".")[0]]
    return str(getattr(module, "__version__", "")) or importlib.metadata.version(contender.package)


def count_batches(stream: Pairs, seconds: float, *, least: int = 1, most: float = float("inf")) -> tuple[int, float]:
    started = time.perf_counter()
    for count, _ in enumerate(stream, 1):
        elapsed = time.perf_counter() - started
        if (count >= least and elapsed >= seconds) or count >= most:
            return count, elapsed
    raise ValueError("the stream of batches ended")


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process; pages of a mapped corpus would hide it."""
    return read_counter("status", "RssAnon") << 10


def disk_bytes() -> int:
    """Return the bytes that this process has read from disk."""
    return read_counter("io", "read_bytes")


def read_counter(file: str, key: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    action, name, folder, *numbers = sys.argv[1:]
    contender, corpus, rows, length = CONTENDERS[name], Path(folder), int(numbers[0]), int(numbers[1])
    answer: Any = {}
    try:
        for module in contender.imports:
            import_module(module)
    except ModuleNotFoundError as error:
        answer = {"failed": f"{error.name} is not installed"}
    else:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if action == "prepare":
            prepare(contender, corpus, length)
        elif action == "check":
            check(contender, corpus, rows, length)
        else:
            answer = measure(contender, corpus, rows, length, float(numbers[2]), cold=action == "cold")
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
