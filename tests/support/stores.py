"""Stores made directly from lists of ids, and the plain-Python truth about the rows that come out of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill as tm
from tokenmill.store.manifest import (
    EngineInfo,
    FileInfo,
    InputInfo,
    Manifest,
    SpecialTokensInfo,
    SplitInfo,
    TokenizerInfo,
    encode_sealed,
)
from tokenmill.store.shard import DTYPES, ShardWriter, publish_shard

Ids = Sequence[int]


def make_store(
    folder: Path, documents: Sequence[Ids], *, num_shards: int = 3, dtype: str = "uint16", val: Sequence[Ids] = ()
) -> Path:
    """A store of given documents, spread over shards in order; shards may be empty and are left out then."""
    splits = {"train": _write_split(folder, "train", documents, num_shards, dtype)}
    if val:
        splits["val"] = _write_split(folder, "val", val, 1, dtype)
    return seal_store(folder, splits, dtype)


def seal_store(folder: Path, splits: dict[str, SplitInfo], dtype: str = "uint16", **more: Any) -> Path:
    """Make a store of shards that are there, by writing its manifest."""
    manifest = Manifest(
        format_version=1,
        dtype=dtype,
        tokenizer=TokenizerInfo("numbers", "bytes", "0" * 64, 65536 if dtype == "uint16" else 1 << 20, {}),
        engine=EngineInfo("bytes", "0", None, 0),
        special_tokens=SpecialTokensInfo(None, None, "as-text", 0),
        splits=splits,
        num_documents_in=sum(split.num_documents for split in splits.values()) // (2 if more else 1),
        num_rejects=0,
        rejects={},
        files={},
        settings={},
        inputs=[InputInfo("in.jsonl", 0, "")],
        **more,
    )
    (folder / "manifest.json").write_bytes(encode_sealed(manifest))
    return folder


def _write_split(folder: Path, name: str, documents: Sequence[Ids], num_shards: int, dtype: str) -> SplitInfo:
    cuts = np.linspace(0, len(documents), num_shards + 1).astype(int).tolist()
    shards = []
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        some = documents[first:last]
        if not some:
            continue
        writer = ShardWriter(folder, f"{name}/shard-00000-{number:04d}", dtype=dtype, keep_keys=(), run="x")
        lengths = np.array([len(document) for document in some], np.int32)
        writer.append(
            np.array([token for document in some for token in document], DTYPES[dtype][1]),
            lengths,
            inputs=np.zeros(len(some), np.int32),
            positions=np.arange(len(some), dtype=np.int64),
            kept=None,
        )
        shards.append(writer.finish())
        publish_shard(folder, shards[-1], "x")
    return SplitInfo(len(documents), sum(map(len, documents)), shards)


def sparse_store(folder: Path, num_shards: int, tokens_per_shard: int, documents_per_shard: int = 4) -> Path:
    """A store of holes: any number of tokens, all of them 0, on no disk at all."""
    from tokenmill.store.manifest import ShardInfo
    from tokenmill.store.shard import HEADER, MAGIC

    (folder / "train").mkdir(parents=True)
    count = documents_per_shard
    lengths = np.full(count, tokens_per_shard // count, "<i4")
    lengths[-1] += tokens_per_shard - int(lengths.sum())
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    index = HEADER.pack(MAGIC, 1, 8, count, count + 1) + lengths.tobytes() + pointers.astype("<i8").tobytes()
    index += np.arange(count + 1, dtype="<i8").tobytes()
    shards = []
    for number in range(num_shards):
        name = f"train/shard-{number:05d}-0000"
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(2 * tokens_per_shard)
        (folder / f"{name}.idx").write_bytes(index)
        files = {".bin": FileInfo(2 * tokens_per_shard, "0" * 16), ".idx": FileInfo(len(index), "0" * 16)}
        shards.append(ShardInfo(name, count, tokens_per_shard, files))
    split = SplitInfo(count * num_shards, tokens_per_shard * num_shards, shards)
    manifest = Manifest(
        format_version=1,
        dtype="uint16",
        tokenizer=TokenizerInfo("numbers", "bytes", "0" * 64, 65536, {}),
        engine=EngineInfo("bytes", "0", None, 0),
        special_tokens=SpecialTokensInfo(None, None, "as-text", 0),
        splits={"train": split},
        num_documents_in=split.num_documents,
        num_rejects=0,
        rejects={},
        files={},
        settings={},
        inputs=[],
    )
    (folder / "manifest.json").write_bytes(encode_sealed(manifest))
    return folder


def make_documents(count: int, seed: int = 0, *, longest: int = 40, shortest: int = 1) -> list[list[int]]:
    """Documents of random lengths in which every token is a number of its own, up to 65,000 tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(longest, shortest + rng.exponential(longest / 4, count).astype(int))
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    assert edges[-1] < 65_000
    return [list(range(1 + first, 1 + last)) for first, last in itertools.pairwise(edges)]


def collect(loader: Any, num_batches: int) -> list[Any]:
    """The next batches."""
    iterator = iter(loader)
    return [next(iterator) for _ in range(num_batches)]


def make_short_documents(folder: Path, seq_len: int) -> Path:
    """Documents of one token, so that the first rows have as many documents as tokens, and then longer ones."""
    lengths = [1] * (4 * seq_len) + [5] * seq_len
    ends = np.cumsum(lengths).tolist()
    return make_store(folder, [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)])


# What the loaders of all frameworks are compared on.

SEQ_LEN = 16


def make_two_stores(folder: Path) -> list[Any]:
    """A store of 900 documents and one of 300, in folders `0` and `1`."""
    sizes = enumerate((900, 300))
    return [tm.open(make_store(folder / str(n), make_documents(count, seed=n, longest=50))) for n, count in sizes]


def shuffled(store: Any, **packing: Any) -> tm.Rows:
    """Rows of `SEQ_LEN` tokens."""
    return tm.shuffle(tm.pack(store, seq_len=SEQ_LEN, **packing), seed=3)


CASES: dict[str, tuple[Callable[[list[Any]], tm.Rows], dict[str, Any]]] = {
    "concat": (lambda s: shuffled(s[0]), {}),
    "concat, masked": (lambda s: shuffled(s[0]), {"document_mask": True, "dtype": np.int32}),
    "best-fit": (lambda s: shuffled(s[0], method="best-fit"), {}),
    "mix": (lambda s: tm.mix([(shuffled(s[0]), 0.7), (shuffled(s[1], method="best-fit"), 0.3)]), {}),
    "epochs": (lambda s: shuffled(s[1]), {"epochs": 1.5, "document_mask": True}),
    "drop_last": (lambda s: shuffled(s[1]), {"epochs": 1.5, "drop_last": True}),
    "prefetched": (lambda s: shuffled(s[0]), {"prefetch": 2}),
}
"""Rows out of two stores, and settings of their loader."""


Pair = tuple[list[int], list[int], list[int]]
"""The ids of a prompt and of two answers to it."""


def make_pair_store(folder: Path, pairs: Sequence[Pair], *, num_shards: int = 2) -> Path:
    """A store of preference pairs of given ids, whose number is kept as the field `number`."""
    shards, cuts = [], np.linspace(0, len(pairs), num_shards + 1).astype(int).tolist()
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        if first == last:
            continue
        name = f"train/shard-00000-{number:04d}"
        flags: Any = {"beside": [".mask"], "has_pairs": True, "keep_keys": ["number"], "run": "x"}
        writer = ShardWriter(folder, name, dtype="uint16", **flags)
        texts = [prompt + answer for prompt, *answers in pairs[first:last] for answer in answers]
        shared = []
        for prompt, *answers in pairs[first:last]:
            a, b = (prompt + answer for answer in answers)
            shared += [[len(prompt), count_shared(a, b), count_shared(a[::-1], b[::-1])]] * 2
        places = [(prompt, answer) for prompt, *answers in pairs[first:last] for answer in answers]
        writer.append(
            np.array([token for text in texts for token in text], np.uint16),
            np.array([len(text) for text in texts], np.int32),
            inputs=np.zeros(len(texts), np.int32),
            positions=np.repeat(np.arange(first, last), 2).astype(np.int64),
            kept=[(str(number),) for number in range(first, last) for _ in range(2)],
            weights=np.array([float(t >= len(p)) for p, a in places for t in range(len(p + a))], np.float32),
            shared=np.array(shared, np.int32),
        )
        shards.append(writer.finish())
        publish_shard(folder, shards[-1], "x")
    counts = sum(shard.num_documents for shard in shards), sum(shard.num_tokens for shard in shards)
    return seal_store(folder, {"train": SplitInfo(*counts, shards)}, holds="pairs")


def count_shared(a: Ids, b: Ids) -> int:
    """How many ids two lists have in common at their start."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
