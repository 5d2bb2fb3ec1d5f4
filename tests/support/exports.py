"""Stores with a loss mask or special tokens, and what an export of a store must contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.store.documents import Documents
from tokenmill.store.manifest import FileInfo, Manifest, SpecialTokensInfo, encode_sealed, hash_bytes, read_manifest
from tokenmill.store.store import TokenSource


def add_mask(store: Path, mask: Any, split: str = "train") -> Path:
    """Add a loss mask to a store: one byte per token of a split, beside its shards and in the manifest."""
    return _add_values(store, ".mask", np.asarray(mask, np.uint8), split)


def add_weights(store: Path, weights: Any, split: str = "train") -> Path:
    """Add the weight of each token's loss."""
    return _add_values(store, ".weight", np.asarray(weights, "<f2"), split)


def _add_values(store: Path, suffix: str, values: Any, split: str) -> Path:
    manifest = read_manifest(store)
    shards, done = [], 0
    for shard in manifest.splits[split].shards:
        data = values[done : done + shard.num_tokens].tobytes()
        assert len(data) == shard.num_tokens * values.itemsize
        (store / f"{shard.name}{suffix}").write_bytes(data)
        files = {**shard.files, suffix: FileInfo(len(data), hash_bytes(data))}
        shards.append(msgspec.structs.replace(shard, files=files))
        done += shard.num_tokens
    splits = {**manifest.splits, split: msgspec.structs.replace(manifest.splits[split], shards=shards)}
    return _seal(store, manifest, splits=splits)


def set_special_tokens(store: Path, *, bos_id: int | None = None, eos_id: int | None = None) -> Path:
    """Name in the manifest the tokens that the documents were made with."""
    return _seal(store, read_manifest(store), special_tokens=SpecialTokensInfo(bos_id, eos_id, "as-text", 0))


def _seal(store: Path, manifest: Manifest, **changes: Any) -> Path:
    (store / "manifest.json").write_bytes(encode_sealed(msgspec.structs.replace(manifest, **changes)))
    return store


def documents_of(documents: Documents | TokenSource) -> list[list[int]]:
    """Return all documents of a split as lists."""
    return [documents.document(number).tolist() for number in range(documents.num_documents)]


def rows_of(documents: Documents, seq_len: int) -> list[list[int]]:
    """Cut a split's stream of tokens into full rows."""
    stream = documents.read(0, documents.num_tokens)
    return stream[: len(stream) // seq_len * seq_len].reshape(-1, seq_len).tolist()


def read_llmc(folder: Path, split: str = "train") -> tuple[list[list[int]], Any]:
    """Read shards as llm.c and modded-nanogpt do: header, exact file size, tokens."""
    shards = []
    for path in sorted(folder.glob(f"{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        kind = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}[tuple(header[:2].tolist())]
        tokens = np.fromfile(path, kind, offset=1024)
        assert len(tokens) == header[2] and path.stat().st_size == 1024 + kind.itemsize * header[2]
        assert not header[3:].any()
        shards.append(tokens.tolist())
    return shards, kind


def load_npy(folder: Path, split: str = "train") -> dict[str, Any]:
    """Map the four arrays of a split."""
    names = ("input_ids", "target_ids", "attention_mask", "loss_mask")
    return {name: np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in names}
