"""The contenders of load.py: loaders of tokenmill and of others, each an endless stream of (inputs, targets)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pairs = Iterator[tuple[Any, Any]]
Tokens = npt.NDArray[np.uint16]

IGNORED = -100
SHUFFLE_ROWS = 1000
"""The size of the shuffle buffer of tf.data."""


@dataclass(frozen=True)
class Contender:
    """How to read the corpus. `stream` gets the corpus, rows per batch and tokens per row."""

    stream: Callable[[Path, int, int], Pairs]
    package: str = "torch"
    """The package that the report names with its version."""
    imports: tuple[str, ...] = ("torch",)
    """Imported before the clock starts."""
    is_peer: bool = False
    """Whether it runs in the interpreter of `--peers`."""
    copies_slices: bool = True
    """Whether a row is a slice of the flat file, so that its values can be checked."""
    is_masked: bool = False
    """Whether targets do not cross documents."""
    is_cut: bool = False
    """Whether a row is pieces of a longer one, so that a target need not be the next input."""
    made: str = ""
    """The folder that `make` fills from the flat file, once."""
    make: Callable[[Path, Path, int], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)


def read_flat(corpus: Path) -> Tokens:
    """Map the corpus as one array. `asarray`: indexing a `np.memmap` itself costs a few microseconds more."""
    return np.asarray(np.memmap(corpus / "flat.bin", np.uint16, mode="r"))


def forever(epoch: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(epoch))


def split_rows(tokens: Any) -> tuple[Any, Any]:
    """Turn a block of L + 1 tokens of any type into contiguous int64 inputs and targets."""
    return tokens[:, :-1].long(), tokens[:, 1:].long()


def gather(corpus: Path, rows: int, length: int) -> Pairs:
    """The baseline: one fancy index per batch, through DataLoader."""
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
    """The baseline for a cold page cache: a loop over rows in random order."""
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


def tokenmill_rows(corpus: Path, rows: int, length: int, *, framework: str, **settings: Any) -> Pairs:
    """Exact global shuffle, inputs and targets contiguous."""
    import tokenmill as tm

    return iter(tm.load(corpus / "store", seq_len=length, batch_size=rows, framework=framework, **settings))


def tokenmill_jax(corpus: Path, rows: int, length: int) -> Pairs:
    import jax

    return map(jax.block_until_ready, tokenmill_rows(corpus, rows, length, framework="jax"))


def tokenmill_masked(corpus: Path, rows: int, length: int, **settings: Any) -> Pairs:
    """Targets do not cross documents; batches have all that an attention kernel needs."""
    import tokenmill as tm

    shared: Any = {"framework": "torch", "document_mask": True, **settings}
    for batch in tm.load(corpus / "store", seq_len=length, batch_size=rows, **shared):
        needed = (batch.positions, batch.segment_ids, batch.cu_seqlens, batch.max_seqlen)
        assert all(part is not None for part in needed)
        yield batch.inputs, batch.targets


def tokenmill_fixed(corpus: Path, rows: int, length: int, *, packing: str) -> Pairs:
    """Fixed shapes: a bound on documents that a few rows reach."""
    return tokenmill_masked(corpus, rows, length, packing=packing, max_documents=max(16, length // 128))


def tokenmill_cut(corpus: Path, rows: int, length: int) -> Pairs:
    """One of two context-parallel ranks, which gets half of rows of twice the length."""
    import tokenmill as tm

    shared: Any = {"framework": "torch", "cp_rank": 1, "cp_size": 2}
    return iter(tm.load(corpus / "store", seq_len=2 * length, batch_size=rows, **shared))


def tokenmill_cut_documents(corpus: Path, rows: int, length: int) -> Pairs:
    """The same with every document padded and cut, and all that an attention kernel needs."""
    settings: Any = {"packing": "best-fit", "align": 4, "cp_by": "document", "cp_rank": 1, "cp_size": 2}
    return tokenmill_masked(corpus, rows, 2 * length, **settings)


def tokenmill_budget(corpus: Path, rows: int, length: int) -> Pairs:
    """As many documents as fit the tokens of a batch, flattened; shown as rows, so that they can be checked."""
    import tokenmill as tm

    shared: Any = {"framework": "torch", "packing": "best-fit", "document_mask": True, "layout": "flat"}
    for batch in tm.load(corpus / "store", seq_len=length, tokens_per_batch=rows * length, **shared):
        yield batch["inputs"].view(rows, length), batch["targets"].view(rows, length)


def tokenmill_mixed(corpus: Path, rows: int, length: int) -> Pairs:
    """Best-fit rows of three stores, 7 : 2 : 1."""
    import tokenmill as tm
    from tokenmill.loaders import make_loader

    sources = []
    for name, weight in (("mix-a", 0.7), ("mix-b", 0.2), ("mix-c", 0.1)):
        packed = tm.pack(tm.open(corpus / name), seq_len=length, method="best-fit")
        sources.append((tm.shuffle(packed, seed=0), weight))
    return iter(make_loader(tm.mix(sources, seed=0), framework="torch", batch_size=rows))


def tokenmill_sources(corpus: Path, rows: int, length: int, *, per_token: bool) -> Pairs:
    """The source of each row or token of a mixture of three stores, as for a loss per domain."""
    import tokenmill as tm

    sources = [
        (tm.shuffle(tm.pack(tm.open(corpus / name), seq_len=length)), weight)
        for name, weight in (("mix-a", 0.7), ("mix-b", 0.2), ("mix-c", 0.1))
    ]
    for batch in tm.load(tm.mix(sources), batch_size=rows, framework="torch"):
        assert (batch.token_sources if per_token else batch.sources) is not None
        yield batch.inputs, batch.targets


def tokenmill_sampled(corpus: Path, rows: int, length: int, *, method: str) -> Pairs:
    """A tenth of the documents, drawn at random, so that every row is of many pieces."""
    import tokenmill as tm

    chosen = tm.sample(tm.open(corpus / "store"), 0.1)
    return iter(tm.load(chosen, seq_len=length, batch_size=rows, packing=method, framework="torch"))


def tokenmill_token_masks(corpus: Path, rows: int, length: int) -> Pairs:
    """The repetition filter and the goldfish mask."""
    import tokenmill as tm

    masks = [tm.RepetitionFilter(), tm.Goldfish()]
    return iter(tm.load(corpus / "store", seq_len=length, batch_size=rows, framework="torch", token_masks=masks))


def nanogpt(corpus: Path, rows: int, length: int) -> Pairs:
    """nanoGPT's get_batch: rows start at any token, sampled with replacement."""
    import torch

    data = np.memmap(corpus / "flat.bin", np.uint16, mode="r")
    while True:
        starts = torch.randint(len(data) - length, (rows,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
        yield x, y


def litdata(corpus: Path, rows: int, length: int, *, workers: int = 0) -> Pairs:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        str(corpus / "litdata"), item_loader=TokensLoader(length + 1), shuffle=True, drop_last=True
    )
    return map(split_rows, forever(StreamingDataLoader(dataset, batch_size=rows, num_workers=workers)))


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


def mosaicml(corpus: Path, rows: int, length: int, *, workers: int = 0) -> Pairs:
    """With a large `predownload`: its default of 8 batches was slower (82 against 228 Mtok/s at 8 x 32768)."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    folder = corpus / f"mds-{length}"
    dataset = StreamingDataset(local=str(folder), batch_size=rows, shuffle=True, predownload=100_000)
    loader = DataLoader(dataset, batch_size=rows, drop_last=True, num_workers=workers)
    return (split_rows(batch["tokens"]) for batch in forever(loader))


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


def grain(corpus: Path, rows: int, length: int, *, workers: int = 0) -> Pairs:
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
    dataset = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if workers:
        dataset = dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return iter(dataset)


def megatron(corpus: Path, rows: int, length: int, *, workers: int = 0) -> Pairs:
    """GPTDataset with the indices that the check before wrote, as in a resumed job."""
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
    loader = DataLoader(dataset, batch_size=rows, drop_last=True, num_workers=workers)
    return ((batch["tokens"], batch["labels"]) for batch in forever(loader))


def make_megatron(corpus: Path, target: Path, length: int) -> None:
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    (target / "flat.bin").hardlink_to(corpus / "flat.bin")
    lengths = np.load(corpus / "lengths.npy").tolist()
    with _IndexWriter(str(target / "flat.idx"), np.uint16) as writer:
        writer.write(lengths, None, range(len(lengths) + 1))


def datasets(corpus: Path, rows: int, length: int, *, workers: int = 0) -> Pairs:
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    stored = load_from_disk(str(corpus / f"datasets-{length}")).with_format("torch")
    loader = DataLoader(stored, batch_size=rows, shuffle=True, drop_last=True, num_workers=workers)
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
"""Make glibc keep large temporaries; by default it returns them to the kernel and faults them in again."""

NOT_COMPILED = {"TOKENMILL_COMPILED": "0"}
"""Use the loader as installed without a compiler."""

CONTENDERS: dict[str, Contender] = {
    "gather": Contender(gather),
    "gather, malloc keeps memory": Contender(gather, environment=KEEP_MEMORY),
    "tokenmill": ours(partial(tokenmill_rows, framework="torch")),
    "tokenmill, document mask": ours(tokenmill_masked, is_masked=True),
    "tokenmill, best-fit, 3-way mix": ours(tokenmill_mixed, is_masked=True, copies_slices=False),
    "tokenmill, fixed shapes": ours(partial(tokenmill_fixed, packing="concat"), is_masked=True, copies_slices=False),
    "tokenmill, fixed shapes, best-fit": ours(
        partial(tokenmill_fixed, packing="best-fit"), is_masked=True, copies_slices=False
    ),
    "tokenmill, context parallel": ours(tokenmill_cut, is_cut=True, copies_slices=False),
    "tokenmill, context parallel by document": ours(tokenmill_cut_documents, is_cut=True, copies_slices=False),
    "tokenmill, token budget": ours(tokenmill_budget, is_masked=True, copies_slices=False),
    "tokenmill, equal work": ours(
        partial(tokenmill_masked, packing="best-fit", balance=True, rank=1, world_size=2),
        is_masked=True,
        copies_slices=False,
    ),
    "tokenmill, 3-way mix, sources": ours(partial(tokenmill_sources, per_token=False), copies_slices=False),
    "tokenmill, 3-way mix, sources of tokens": ours(partial(tokenmill_sources, per_token=True), copies_slices=False),
    "tokenmill, a tenth of the documents": ours(partial(tokenmill_sampled, method="concat"), copies_slices=False),
    "tokenmill, a tenth, best-fit": ours(
        partial(tokenmill_sampled, method="best-fit"), is_masked=True, copies_slices=False
    ),
    "tokenmill, repetition and goldfish": ours(tokenmill_token_masks, is_masked=True),
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


def with_workers(name: str, stream: Callable[..., Pairs], count: int) -> Contender:
    """The same loader with worker processes."""
    return replace(CONTENDERS[name], stream=partial(stream, workers=count))


NUM_WORKERS = 2
WORKERS = f", {NUM_WORKERS} workers"
CONTENDERS |= {
    f"tokenmill{WORKERS}": ours(partial(tokenmill_rows, framework="torch", num_workers=NUM_WORKERS)),
    f"litdata{WORKERS}": with_workers("litdata", litdata, NUM_WORKERS),
    f"MosaicML streaming{WORKERS}": with_workers("MosaicML streaming", mosaicml, NUM_WORKERS),
    f"Grain{WORKERS}": with_workers("Grain", grain, NUM_WORKERS),
    f"Megatron GPTDataset{WORKERS}": with_workers("Megatron GPTDataset", megatron, NUM_WORKERS),
    f"HF datasets{WORKERS}": with_workers("HF datasets", datasets, NUM_WORKERS),
}
