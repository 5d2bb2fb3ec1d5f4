"""What tests of exports share: stores with a loss mask, and the truth that an export is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.store.documents import Documents
from tokenmill.store.manifest import FileInfo, Manifest, SpecialTokensInfo, encode_sealed, hash_bytes, read_manifest


def add_mask(store: Path, mask: Any, split: str = "train") -> Path:
    """Make a store supervised: one byte per token of a split, written beside its shards and sealed in the manifest."""
    manifest = read_manifest(store)
    shards, done = [], 0
    for shard in manifest.splits[split].shards:
        data = np.asarray(mask[done : done + shard.num_tokens], np.uint8).tobytes()
        assert len(data) == shard.num_tokens
        (store / f"{shard.name}.mask").write_bytes(data)
        files = {**shard.files, ".mask": FileInfo(len(data), hash_bytes(data))}
        shards.append(msgspec.structs.replace(shard, files=files))
        done += shard.num_tokens
    splits = {**manifest.splits, split: msgspec.structs.replace(manifest.splits[split], shards=shards)}
    return _seal(store, manifest, splits=splits)


def set_special_tokens(store: Path, *, bos_id: int | None = None, eos_id: int | None = None) -> Path:
    """Let the manifest name tokens that the documents were made with."""
    return _seal(store, read_manifest(store), special_tokens=SpecialTokensInfo(bos_id, eos_id, "as-text", 0))


def _seal(store: Path, manifest: Manifest, **changes: Any) -> Path:
    (store / "manifest.json").write_bytes(encode_sealed(msgspec.structs.replace(manifest, **changes)))
    return store


def documents_of(documents: Documents) -> list[list[int]]:
    """All documents of a split as lists."""
    return [documents.document(number).tolist() for number in range(documents.num_documents)]


def rows_of(documents: Documents, seq_len: int) -> list[list[int]]:
    """The full rows of a split's stream of tokens."""
    stream = documents.read(0, documents.num_tokens)
    return stream[: len(stream) // seq_len * seq_len].reshape(-1, seq_len).tolist()
