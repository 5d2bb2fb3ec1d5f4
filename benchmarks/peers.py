"""The contenders of load.py: each an endless stream of (inputs, targets), and one clock for all of them.

    python -I benchmarks/peers.py measure litdata CORPUS 8 2048 2.0

load.py starts this file in a fresh process for each measurement, with the interpreter of the contender: so tokenmill
and its peers are imported only where they run. `-I` keeps benchmarks/tokenize.py from hiding the
standard library's `tokenize`. The answer is the last line of stdout, as JSON.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pairs = Iterator[tuple[Any, Any]]
Tokens = npt.NDArray[np.uint16]

WARM_UP_SECONDS = 0.3
WARM_UP_BATCHES = 3
COLD_FRACTION = 1 / 8
"""A cold measurement ends when so much of the corpus was read: later rows would come out of memory."""
SEARCH_TOKENS = 1 << 26
IGNORED = -100
SHUFFLE_ROWS = 1000
"""The buffer that tf.data shuffles through."""


@dataclass(frozen=True)
class Contender:
    """How to read the corpus. `stream` gets the corpus, rows per batch and tokens per row."""

    stream: Callable[[Path, int, int], Pairs]
    package: str = "torch"
    """Its name in the report, with its version."""
    imports: tuple[str, ...] = ("torch",)
    """Imported before the clock starts."""
    is_peer: bool = False
    """Runs in the interpreter of `--peers`."""
    copies_slices: bool = True
    """A row is a slice of the flat file, so that its values can be checked."""
    is_masked: bool = False
    """Targets do not cross documents."""
    made: str = ""
    """The folder that `make` fills from the flat file, once."""
    make: Callable[[Path, Path, int], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)


def read_flat(corpus: Path) -> Tokens:
    """The corpus as one array. `asarray`, because indexing a `np.memmap` itself costs a few microseconds more."""
    return np.asarray(np.memmap(corpus / "flat.bin", np.uint16, mode="r"))


def forever(epoch: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(epoch))


def split_rows(tokens: Any) -> tuple[Any, Any]:
    """A block of L + 1 tokens of any type as inputs and targets that are int64 and contiguous."""
    return tokens[:, :-1].long(), tokens[:, 1:].long()


def gather(corpus: Path, rows: int, length: int) -> Pairs:
    """One fancy index per batch through DataLoader: the baseline."""
    import torch

    data, columns = read_flat(corpus), np.arange(length + 1)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return (len(data) - 1) // length

        def __getitem__(self, number: int) -> Any:
            return self.__getitems__([number])

        def __getitems__(self, numbers: list[int]) -> Any:
            starts = np.array(numbers) * length
            block = torch.from_numpy(data[starts[:, None] + columns].astype(np.int64))
            return block[:, :-1], block[:, 1:]

    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=rows, shuffle=True, drop_last=True, collate_fn=lambda batch: batch
    )
    return forever(loader)


def memmap_rows(corpus: Path, rows: int, length: int) -> Pairs:
    """A loop over rows in random order: what a cold page cache is compared with."""
    import torch

    data = read_flat(corpus)
    for numbers in forever(shuffled_batches((len(data) - 1) // length, rows)):
        block = np.empty((rows, length + 1), np.int64)
        for row, start in zip(block, (numbers * length).tolist(), strict=True):
            row[:] = data[start : start + length + 1]
        tokens = torch.from_numpy(block)
        yield tokens[:, :-1], tokens[:, 1:]


def shuffled_batches(num_rows: int, rows: int) -> npt.NDArray[np.int64]:
    order = np.random.default_rng(0).permutation(num_rows)
    return order[: num_rows // rows * rows].reshape(-1, rows)


def tokenmill_rows(corpus: Path, rows: int, length: int, *, framework: str) -> Pairs:
    """Exact global shuffle, inputs and targets contiguous."""
    import tokenmill as tm

    return iter(tm.load(corpus / "store", seq_len=length, batch_size=rows, framework=framework))


def tokenmill_jax(corpus: Path, rows: int, length: int) -> Pairs:
    import jax

    return map(jax.block_until_ready, tokenmill_rows(corpus, rows, length, framework="jax"))


def tokenmill_masked(corpus: Path, rows: int, length: int) -> Pairs:
    """Targets end at documents; everything an attention kernel needs is asked for."""
    import tokenmill as tm

    loader = tm.load(corpus / "store", seq_len=length, batch_size=rows, framework="torch", document_mask=True)
    for batch in loader:
        needed = (batch.positions, batch.segment_ids, batch.cu_seqlens, batch.max_seqlen)
        assert all(part is not None for part in needed)
        yield batch.inputs, batch.targets


def tokenmill_mixed(corpus: Path, rows: int, length: int) -> Pairs:
    """Best-fit rows of three stores, 7 : 2 : 1."""
    import tokenmill as tm
    from tokenmill.loaders import make_loader

    sources = []
    for name, weight in (("mix-a", 0.7), ("mix-b", 0.2), ("mix-c", 0.1)):
        packed = tm.pack(tm.open(corpus / name), seq_len=length, method="best-fit")
        sources.append((tm.shuffle(packed, seed=0), weight))
    return iter(make_loader(tm.mix(sources, seed=0), framework="torch", batch_size=rows))


def nanogpt(corpus: Path, rows: int, length: int) -> Pairs:
    """nanoGPT's get_batch: rows start anywhere, drawn with replacement."""
    import torch

    data = np.memmap(corpus / "flat.bin", np.uint16, mode="r")
    while True:
        starts = torch.randint(len(data) - length, (rows,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
        yield x, y


def litdata(corpus: Path, rows: int, length: int) -> Pairs:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        str(corpus / "litdata"), item_loader=TokensLoader(length + 1), shuffle=True, drop_last=True
    )
    return map(split_rows, forever(StreamingDataLoader(dataset, batch_size=rows, num_workers=0)))


def make_litdata(corpus: Path, target: Path, length: int) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.cache import Cache

    data = read_flat(corpus)
    cache = Cache(str(target), chunk_bytes="64MB", item_loader=TokensLoader(length + 1))
    for number, start in enumerate(range(0, len(data), 1 << 16)):
        cache[number] = torch.from_numpy(data[start : start + (1 << 16)].copy())
    cache.done()
    cache.merge()


def mosaicml(corpus: Path, rows: int, length: int) -> Pairs:
    """With a large `predownload`: its default of 8 batches was slower (82 against 228 Mtok/s at 8 x 32768)."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    folder = corpus / f"mds-{length}"
    dataset = StreamingDataset(local=str(folder), batch_size=rows, shuffle=True, predownload=100_000)
    return (split_rows(batch["tokens"]) for batch in forever(DataLoader(dataset, batch_size=rows, drop_last=True)))


def make_mosaicml(corpus: Path, target: Path, length: int) -> None:
    from streaming import MDSWriter

    data = read_flat(corpus)
    with MDSWriter(out=str(target), columns={"tokens": f"ndarray:uint16:{length + 1}"}) as writer:
        for start in range(0, len(data) - length, length):
            writer.write({"tokens": data[start : start + length + 1]})


def tf_data(corpus: Path, rows: int, length: int) -> Pairs:
    import tensorflow as tf

    def split(records: Any) -> tuple[Any, Any]:
        tokens = tf.cast(tf.io.decode_raw(records, tf.uint16), tf.int64)
        return tokens[:, :-1], tokens[:, 1:]

    path, size = corpus / "flat.bin", 2 * (length + 1)
    records = tf.data.FixedLengthRecordDataset(str(path), size, footer_bytes=path.stat().st_size % size)
    batches = records.repeat().shuffle(SHUFFLE_ROWS).batch(rows, drop_remainder=True)
    return iter(batches.map(split).prefetch(tf.data.AUTOTUNE))


def grain(corpus: Path, rows: int, length: int) -> Pairs:
    """Without threads: Grain's default of 16 was slower at all three shapes on two cores."""
    import grain

    data = read_flat(corpus)

    class Rows:
        def __len__(self) -> int:
            return (len(data) - 1) // length

        def __getitem__(self, number: int) -> Tokens:
            return data[number * length : (number + 1) * length + 1]

    def split(tokens: Tokens) -> tuple[Any, Any]:
        return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)

    batches = grain.MapDataset.source(Rows()).seed(0).shuffle().repeat().batch(rows).map(split)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def megatron(corpus: Path, rows: int, length: int) -> Pairs:
    """GPTDataset, whose indices are on disk from the check before: the start of a job that goes on."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import DataLoader

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 1 << 16, 256, 0, {"name": "none"}

    folder = corpus / "megatron"
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=length,
        blend=([str(folder / "flat")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
    )
    num_rows = (folder / "flat.bin").stat().st_size // 2 // length - 1
    dataset, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [num_rows, 0, 0], lambda: True, config).build()
    loader = DataLoader(dataset, batch_size=rows, drop_last=True)
    return ((batch["tokens"], batch["labels"]) for batch in forever(loader))


def make_megatron(corpus: Path, target: Path, length: int) -> None:
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    (target / "flat.bin").hardlink_to(corpus / "flat.bin")
    lengths = np.load(corpus / "lengths.npy").tolist()
    with _IndexWriter(str(target / "flat.idx"), np.uint16) as writer:
        writer.write(lengths, None, range(len(lengths) + 1))


def datasets(corpus: Path, rows: int, length: int) -> Pairs:
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    stored = load_from_disk(str(corpus / f"datasets-{length}")).with_format("torch")
    loader = DataLoader(stored, batch_size=rows, shuffle=True, drop_last=True)
    return (split_rows(batch["input_ids"]) for batch in forever(loader))


def make_datasets(corpus: Path, target: Path, length: int) -> None:
    import pyarrow as pa
    from datasets import Dataset

    data, pieces = read_flat(corpus), []
    for numbers in np.array_split(np.arange((len(data) - 1) // length), 64):
        block = data[numbers[:, None] * length + np.arange(length + 1)]
        ends = np.arange(len(block) + 1, dtype=np.int32) * (length + 1)
        pieces.append(pa.ListArray.from_arrays(ends, block.reshape(-1)))
    Dataset(pa.table({"input_ids": pa.chunked_array(pieces)})).save_to_disk(str(target))


def ours(stream: Callable[[Path, int, int], Pairs], framework: str = "torch", **settings: Any) -> Contender:
    imports = {"torch": ("torch",), "jax": ("jax",), "tf": ("tensorflow",), "numpy": ()}[framework]
    return Contender(stream, "tokenmill", (*imports, "tokenmill.loaders", "tokenmill.dataset"), **settings)


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Lets glibc keep large temporaries instead of giving them back to the kernel and faulting them in again."""

NOT_COMPILED = {"TOKENMILL_COMPILED": "0"}
"""The loader as it is where there was no compiler."""

CONTENDERS: dict[str, Contender] = {
    "gather": Contender(gather),
    "gather, malloc keeps memory": Contender(gather, environment=KEEP_MEMORY),
    "tokenmill": ours(partial(tokenmill_rows, framework="torch")),
    "tokenmill, document mask": ours(tokenmill_masked, is_masked=True),
    "tokenmill, best-fit, 3-way mix": ours(tokenmill_mixed, is_masked=True, copies_slices=False),
    "tokenmill, no C": ours(partial(tokenmill_rows, framework="torch"), environment=NOT_COMPILED),
    "tokenmill, no C, document mask": ours(tokenmill_masked, is_masked=True, environment=NOT_COMPILED),
    "tokenmill, no C, best-fit mix": ours(
        tokenmill_mixed, is_masked=True, copies_slices=False, environment=NOT_COMPILED
    ),
    "tokenmill, numpy": ours(partial(tokenmill_rows, framework="numpy"), "numpy"),
    "tokenmill, jax": ours(tokenmill_jax, "jax"),
    "tokenmill, tf": ours(partial(tokenmill_rows, framework="tf"), "tf"),
    "nanoGPT": Contender(nanogpt),
    "litdata": Contender(litdata, "litdata", ("litdata",), is_peer=True, made="litdata", make=make_litdata),
    "MosaicML streaming": Contender(
        mosaicml, "mosaicml-streaming", ("streaming",), is_peer=True, made="mds-{length}", make=make_mosaicml
    ),
    "tf.data": Contender(tf_data, "tensorflow", ("tensorflow",), is_peer=True),
    "Grain": Contender(grain, "grain", ("grain",), is_peer=True),
    "Megatron GPTDataset": Contender(
        megatron,
        "megatron-core",
        ("megatron.core.datasets.gpt_dataset",),
        is_peer=True,
        copies_slices=False,
        made="megatron",
        make=make_megatron,
    ),
    "HF datasets": Contender(
        datasets, "datasets", ("torch", "datasets"), is_peer=True, made="datasets-{length}", make=make_datasets
    ),
    "np.memmap, row by row": Contender(memmap_rows),
}


def prepare(contender: Contender, corpus: Path, length: int) -> None:
    """Let a peer write the corpus in its own format."""
    target = corpus / contender.made.format(length=length)
    if contender.make is not None and not target.exists():
        draft = target.with_name(target.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        contender.make(corpus, draft, length)
        draft.rename(target)


def check(contender: Contender, corpus: Path, rows: int, length: int) -> None:
    """Compare a few batches with the flat file. Its temporaries would change what malloc does: never time here."""
    flat = read_flat(corpus)
    for batch in itertools.islice(contender.stream(corpus, rows, length), 3):
        x, y = (np.asarray(part) for part in batch)
        if not x.shape == y.shape == (rows, length):
            raise ValueError(f"a batch of {rows} rows of {length} tokens has the shapes {x.shape} and {y.shape}")
        is_good = y[:, :-1] == x[:, 1:]
        if contender.is_masked:
            is_good |= y[:, :-1] == IGNORED
        if not is_good.all():
            raise ValueError(f"{np.count_nonzero(~is_good)} targets are not the next input")
        for number in (0, rows // 2, rows - 1) if contender.copies_slices else ():
            row = x[number] if contender.is_masked else np.append(x[number], y[number, -1:])
            if not is_slice(row, flat):
                raise ValueError(f"row {number} of a batch is nowhere in the corpus")


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
    """Tokens per second, once warm; with `cold`, from the opening on and without reading anything twice."""
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
    """As the module says: TensorFlow is installed under several names."""
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
    """Memory of this process that is not a file; pages of a mapped corpus would hide it."""
    return read_counter("status", "RssAnon") << 10


def disk_bytes() -> int:
    """What this process has caused to be read from the disk."""
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
