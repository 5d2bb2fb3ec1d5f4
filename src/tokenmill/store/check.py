"""Check the files of a store against its manifest, in one pass over their bytes.

A checksum finds damage, but not lengths that do not add up, ids outside the vocabulary or
documents without EOS. Both checks see the same piece of a file while it is in the CPU cache, in
bounded memory, so a shard is checked at about the speed of the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.errors import StoreError
from tokenmill.regular_files import open_parquet, open_regular
from tokenmill.store.manifest import RESTORE, FileInfo, Manifest, ShardInfo
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES, index_lengths

__all__ = ["CheckProgress", "CheckedShard", "check_file", "check_shard"]

PIECE_BYTES = 1 << 20
INDEX_PIECE = 1 << 16


class CheckProgress:
    """Counts files and bytes of several threads, and calls `advance` with the sum of bytes."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.num_bytes = 0
        self.num_files = 0
        self._advance = advance
        self._lock = threading.Lock()

    def add_file(self) -> None:
        """Count another file."""
        with self._lock:
            self.num_files += 1

    def add_bytes(self, size: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.num_bytes += size
            self._advance(self.num_bytes)


def check_file(
    path: Path, expected: FileInfo, progress: CheckProgress, look: Callable[[memoryview], None] = lambda _: None
) -> list[str]:
    """List the problems with the size and checksum of a file; `look` is called with each piece of it."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, expected.bytes))))
    try:
        with open_regular(path, buffering=0) as file:
            progress.add_file()
            size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                return [f"{path} has {size:,} bytes and the manifest says {expected.bytes:,}; {RESTORE}"]
            while count := _fill(file, buffer):
                digest.update(buffer[:count])
                look(buffer[:count])
                progress.add_bytes(count)
    except FileNotFoundError:
        return [f"{path} is missing; {RESTORE}"]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}; {RESTORE}"]
    if digest.hexdigest() != expected.xxh3:
        return [f"{path} is damaged: its checksum is {digest.hexdigest()}, not {expected.xxh3}; {RESTORE}"]
    return []


def _fill(file: Any, buffer: memoryview) -> int:
    """Fill the whole buffer except at the end of the file, so that every piece holds whole tokens."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


@dataclass
class CheckedShard:
    """The counts that were found in a shard, and its problems."""

    num_documents: int = 0
    num_tokens: int = 0
    num_looked_at: int = 0
    """Documents of which BOS and EOS were counted."""
    num_with_bos: int = 0
    num_with_eos: int = 0
    problems: list[str] = field(default_factory=list)


def check_shard(store: Path, manifest: Manifest, shard: ShardInfo, progress: CheckProgress) -> CheckedShard:
    """Check all files of a shard: first the index, which says where documents start in the ids."""
    checked = CheckedShard()
    missing = {".bin", ".docs.parquet", ".idx"} - set(shard.files)
    if missing:
        checked.problems.append(f"manifest.json lists no {min(missing)} file for shard {shard.name}; {RESTORE}")
        return checked
    scan = _TokenScan(manifest)
    for suffix in [*sorted(set(shard.files) - {".bin"}), ".bin"]:
        path = store / f"{shard.name}{suffix}"
        look = scan.look if suffix == ".bin" else lambda _: None
        damage = check_file(path, shard.files[suffix], progress, look)
        checked.problems += damage
        if damage:
            continue
        try:
            if suffix == ".idx":
                checked.num_documents = shard.num_documents
                scan.index = _read_index(path, shard, manifest.dtype)
            elif suffix == ".docs.parquet":
                _check_sources(path, shard, len(manifest.inputs), 2 if manifest.has_pairs else 1)
            elif suffix in BESIDE:
                _check_beside(path, suffix, shard)
        except StoreError as error:
            checked.problems.append(f"{error}; {RESTORE}")
        if suffix == ".bin":
            checked.num_tokens = scan.num_tokens
            checked.num_looked_at = checked.num_documents if scan.index is not None else 0
            checked.num_with_bos, checked.num_with_eos = scan.num_with_bos, scan.num_with_eos
            checked.problems += [f"{path}{problem}; {RESTORE}" for problem in scan.problems(shard)]
    return checked


class _Index(NamedTuple):
    """The length of each document in tokens, and its first byte."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]


def _read_index(path: Path, shard: ShardInfo, dtype: str) -> _Index:
    """Map an `.idx`, the parts of which must agree with each other and with the shard's counts."""
    count, width = shard.num_documents, DTYPES[dtype][1].itemsize
    offset = INDEX_HEADER_BYTES + 4 * count
    index = _Index(index_lengths(path, shard, dtype), np.memmap(path, "<i8", "r", offset, shape=(count,)))
    numbers = np.memmap(path, "<i8", "r", offset + 8 * count, shape=(count + 1,))
    num_tokens = 0
    for first in range(0, count, INDEX_PIECE):
        lengths, pointers = (some[first : first + INDEX_PIECE] for some in index)
        ends = np.cumsum(lengths, dtype=np.int64) + num_tokens
        if (lengths < 0).any() or not np.array_equal((ends - lengths) * width, pointers):
            raise StoreError(f"{path}: lengths and pointers disagree after document {first}")
        num_tokens = int(ends[-1])
    for first in range(0, count + 1, INDEX_PIECE):
        some = numbers[first : first + INDEX_PIECE]
        if not np.array_equal(some, np.arange(first, first + len(some))):
            raise StoreError(f"{path}: document numbers are not consecutive after {first}")
    if num_tokens != shard.num_tokens or num_tokens * width != shard.files[".bin"].bytes:
        raise StoreError(f"{path}: lengths add up to {num_tokens} tokens, not {shard.num_tokens}")
    return index


class _TokenScan:
    """Checks piece by piece that ids are in the vocabulary and, with a sound index, that documents have BOS and EOS."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._dtype = DTYPES[manifest.dtype][1]
        self._unsigned = np.dtype(f"<u{self._dtype.itemsize}")
        self._specials = manifest.special_tokens
        self.index: _Index | None = None
        """Where documents are; None if the index is damaged."""
        self.num_tokens = 0
        self.largest = -1
        self.num_with_bos = 0
        self.num_with_eos = 0

    def problems(self, shard: ShardInfo) -> Iterator[str]:
        """Describe what is wrong with the ids; the text follows the path of the `.bin`."""
        vocab_size = self._manifest.tokenizer.vocab_size
        if self.largest >= vocab_size:
            yield f" holds id {self.largest}, outside the vocabulary of {vocab_size}"
        # The end of a conversation depends on its chat template.
        settings = self._manifest.settings
        has_messages = settings.get("messages-key") is not None
        has_messages |= self._manifest.has_pairs and settings.get("chat-template") is not None
        for name, token, count, verb in (
            ("BOS", self._specials.bos_id, self.num_with_bos, "begin"),
            ("EOS", None if has_messages else self._specials.eos_id, self.num_with_eos, "end"),
        ):
            if self.index is not None and token is not None and count != shard.num_documents:
                yield f": {count:,} of {shard.num_documents:,} documents {verb} with the {name} token {token}"

    def look(self, piece: memoryview) -> None:
        """Check the next piece of the `.bin`."""
        if len(piece) % self._dtype.itemsize:
            return
        tokens = np.frombuffer(piece, self._dtype)
        # As an unsigned number, a negative id is very large.
        self.largest = max(self.largest, int(tokens.view(self._unsigned).max()))
        if self.index is not None:
            self._look_at_edges(tokens, self.index)
        self.num_tokens += len(tokens)

    def _look_at_edges(self, tokens: npt.NDArray[Any], index: _Index) -> None:
        """Count BOS and EOS among the first and last tokens of documents in this piece.

        These are the documents that start in the piece, and the one before them, which may end in it.
        """
        width, origin = self._dtype.itemsize, self.num_tokens
        bounds = np.array([origin, origin + len(tokens)]) * width
        first, stop = np.searchsorted(index.pointers, bounds).tolist()
        first = max(0, first - 1)
        lengths = index.lengths[first:stop]
        filled = lengths > 0
        starts = index.pointers[first:stop][filled] // width - origin
        ends = starts + lengths[filled] - 1
        if self._specials.bos_id is not None:
            inside = starts[starts >= 0]
            self.num_with_bos += int(np.count_nonzero(tokens[inside] == self._specials.bos_id))
        if self._specials.eos_id is not None:
            inside = ends[(ends >= 0) & (ends < len(tokens))]
            self.num_with_eos += int(np.count_nonzero(tokens[inside] == self._specials.eos_id))


def _check_beside(path: Path, suffix: str, shard: ShardInfo) -> None:
    """Check a loss mask or weights, which need a valid value for each token."""
    dtype = BESIDE[suffix]
    if shard.files[suffix].bytes != shard.num_tokens * dtype.itemsize:
        raise StoreError(f"{path} does not have a value for each of {shard.num_tokens:,} tokens")
    values = np.memmap(path, dtype, mode="r") if shard.num_tokens else np.zeros(0, dtype)
    for first in range(0, len(values), INDEX_PIECE):
        some = values[first : first + INDEX_PIECE]
        if not (some <= 1).all() if suffix == ".mask" else not ((some >= 0) & np.isfinite(some)).all():
            raise StoreError(f"{path} has an invalid {suffix[1:]} near token {first:,}")


def _check_sources(path: Path, shard: ShardInfo, num_inputs: int, per_record: int) -> None:
    """Check the table of documents, which has one row for each, in input order, with `per_record` of each record."""
    import pyarrow as pa

    try:
        with open_parquet(path) as file:
            num_rows = file.metadata.num_rows
            if num_rows != shard.num_documents:
                raise StoreError(f"{path} has {num_rows:,} rows for {shard.num_documents:,} documents")
            batches = file.iter_batches(INDEX_PIECE, columns=["input", "position"], use_threads=False)
            if num_rows % per_record or not _are_in_order(batches, num_inputs, per_record):
                raise StoreError(f"{path}: its documents are not in the order of the inputs")
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0][:120]
        raise StoreError(f"{path} cannot be read as Parquet ({reason})") from None


def _are_in_order(batches: Iterator[Any], num_inputs: int, per_record: int) -> bool:
    """Whether input numbers never decrease, positions increase within an input, and a record has one place."""
    last_input, last_position = 0, -1
    for batch in batches:
        inputs, positions = (np.asarray(batch.column(i)).astype(np.int64) for i in (0, 1))
        if per_record == 2 and not (inputs[::2] == inputs[1::2]).all() & (positions[::2] == positions[1::2]).all():
            return False
        inputs, positions = inputs[::per_record], positions[::per_record]
        steps = np.diff(inputs, prepend=last_input)
        moves = np.diff(positions, prepend=last_position)
        if (steps < 0).any() or (moves[steps == 0] <= 0).any() or inputs[-1] >= num_inputs:
            return False
        last_input, last_position = int(inputs[-1]), int(positions[-1])
    return True
