"""One shard: bare tokens in `.bin`, Megatron's index in `.idx`, the origin of documents in `.docs.parquet`.

A writer streams all three under temporary names, so its memory does not grow with the task. `finish`
makes them durable, and `publish_shard` renames them. See FORMAT.md for the bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.checksum import hash_rest
from tokenmill.errors import StoreError
from tokenmill.files import sync_files
from tokenmill.regular_files import open_regular
from tokenmill.store.manifest import FileInfo, ShardInfo
from tokenmill.text_batch import IntArray

__all__ = [
    "BESIDE",
    "DTYPES",
    "HEADER",
    "INDEX_HEADER_BYTES",
    "MAGIC",
    "SHARED",
    "OutputFile",
    "ShardWriter",
    "dtype_code",
    "dtype_for",
    "hash_file",
    "index_lengths",
    "index_pieces",
    "publish_shard",
]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
INDEX_HEADER_BYTES = HEADER.size
DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {"uint16": (8, np.dtype("<u2")), "int32": (4, np.dtype("<i4"))}
"""Megatron's code and the numpy type of each kind of shard."""
BESIDE: dict[str, np.dtype[Any]] = {".mask": np.dtype("u1"), ".weight": np.dtype("<f2")}
"""The companion files of supervised stores, which have a value for each token, and its type."""
SHARED = ("prompt", "prefix", "suffix")
"""Columns of the documents of preference pairs, the same for both of a pair: the tokens of the prompt, and how many
tokens the two documents share at their start and at their end."""

DOCUMENTS_PER_ROW_GROUP = 65_536
INDEX_PIECE = 1 << 16
LENGTHS_IN_MEMORY = 1 << 20
FLUSH_BYTES = 1 << 20
COPY_BYTES = 8 << 20


def dtype_for(vocab_size: int) -> str:
    """The narrower of the two types of ids that holds a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Megatron's code of a type."""
    return next(code for code, known in DTYPES.values() if known == dtype)


class ShardWriter:
    """Writes one shard under temporary names. `name` is relative to the store, such as `train/shard-00000-0000`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        dtype: str,
        keep_keys: Sequence[str],
        run: str,
        beside: Sequence[str] = (),
        has_pairs: bool = False,
    ) -> None:
        self._dtype = DTYPES[dtype][1]
        self._folder = folder
        self._name = name
        self._run = run
        self.num_documents = 0
        self.num_tokens = 0
        self._bin = _HashedFile(self._temporary(".bin"))
        self._lengths = SpooledTemporaryFile(LENGTHS_IN_MEMORY, dir=str(self._temporary("").parent))  # noqa: SIM115
        self._documents = _DocumentsFile(self._temporary(".docs.parquet"), keep_keys, SHARED if has_pairs else ())
        self._beside = {suffix: _HashedFile(self._temporary(suffix)) for suffix in beside}

    def append(
        self,
        tokens: IntArray,
        lengths: npt.NDArray[np.int32],
        *,
        inputs: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        kept: list[tuple[Any, ...]] | None,
        weights: npt.NDArray[np.float32] | None = None,
        shared: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Add documents: their concatenated tokens, of the shard's type, and the origin of each.

        `weights` has the weight of each token's loss, for the companion files of supervised data; `shared` the columns
        `SHARED` of preference pairs.
        """
        assert tokens.dtype == self._dtype, tokens.dtype
        self._bin.write(tokens.data.cast("B"))
        self._lengths.write(lengths.data.cast("B"))
        self._documents.append(inputs, positions, shared, kept)
        for suffix, file in self._beside.items():
            assert weights is not None
            values = weights > 0 if suffix == ".mask" else weights
            file.write(np.ascontiguousarray(values, BESIDE[suffix]).view(np.uint8).data)
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def finish(self) -> ShardInfo:
        """Write the index and make all files durable, still under temporary names."""
        with closing(_HashedFile(self._temporary(".idx"))) as index:
            for piece in index_pieces(self._stored_lengths, self.num_documents, self._dtype):
                index.write(piece)
            self._lengths.close()
            files = {".bin": self._bin.finish(), ".docs.parquet": self._documents.finish(), ".idx": index.finish()}
        files |= {suffix: file.finish() for suffix, file in self._beside.items()}
        sync_files([self._temporary(suffix) for suffix in files])
        return ShardInfo(self._name, self.num_documents, self.num_tokens, files)

    def discard(self) -> None:
        """Remove the temporary files."""
        self._lengths.close()
        self._documents.close()
        for file in (self._bin, *self._beside.values()):
            file.close()
        for suffix in (".bin", ".idx", ".docs.parquet", *self._beside):
            self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return Path(f"{self._folder / self._name}{suffix}.{self._run}.tmp")

    def _stored_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.seek(0)
        while piece := self._lengths.read(4 * INDEX_PIECE):
            yield np.frombuffer(piece, "<i4")


def index_pieces(
    lengths: Callable[[], Iterator[npt.NDArray[np.signedinteger[Any]]]], count: int, dtype: np.dtype[Any]
) -> Iterator[bytes]:
    """The header, i32 lengths, i64 byte pointers and i64 document numbers of an index, in bounded memory.

    `lengths` is called twice, and yields the lengths of the `count` documents some at a time.
    """
    yield HEADER.pack(MAGIC, 1, dtype_code(dtype), count, count + 1)
    for some in lengths():
        yield some.astype("<i4", copy=False).tobytes()
    start = 0
    for some in lengths():
        ends = np.cumsum(some, dtype="<i8") + start
        yield ((ends - some) * dtype.itemsize).astype("<i8").tobytes()
        start = int(ends[-1])
    for first in range(0, count + 1, INDEX_PIECE):
        yield np.arange(first, min(first + INDEX_PIECE, count + 1), dtype="<i8").tobytes()


def publish_shard(folder: Path, shard: ShardInfo, run: str) -> None:
    """Rename the files of a finished shard to their final names; the caller syncs the directory."""
    for suffix in shard.files:
        path = f"{folder / shard.name}{suffix}"
        os.replace(f"{path}.{run}.tmp", path)  # noqa: PTH105


class OutputFile:
    """A file that is written front to back; the kernel is asked to start early, so that the final sync is short."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._num_bytes = 0
        self._num_flushed = 0

    def write(self, data: bytes | memoryview | npt.NDArray[Any]) -> None:
        """Append bytes, or the bytes of an array."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view("u1").data
        view = memoryview(data)
        self._num_bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]
        self._flush()

    def append(self, path: str) -> None:
        """Append a whole file: inside the kernel if possible, without a copy if the file system can share blocks."""
        with open_regular(path, buffering=0) as source:
            left = os.fstat(source.fileno()).st_size
            self._num_bytes += left
            try:
                while left > 0:
                    count = os.copy_file_range(source.fileno(), self._file.fileno(), min(left, COPY_BYTES))
                    if count == 0:
                        break
                    left -= count
            except (AttributeError, OSError):
                pass
            # The call fails across file systems and does not exist everywhere; both files stay where it stopped.
            self._num_bytes -= left
            while piece := source.read(1 << 20):
                self.write(piece)
        self._flush()

    def _flush(self) -> None:
        length = self._num_bytes - self._num_flushed
        if length >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._num_flushed, length, os.POSIX_FADV_DONTNEED)
            self._num_flushed = self._num_bytes

    def close(self) -> None:
        """Close the file; it is not synced."""
        self._file.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HashedFile(OutputFile):
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._hash = xxhash.xxh3_64()

    def write(self, data: Any) -> None:
        self._hash.update(data)
        super().write(data)

    def finish(self) -> FileInfo:
        self.close()
        return FileInfo(self._num_bytes, self._hash.hexdigest())


_Shared = npt.NDArray[np.int32]


class _DocumentsFile:
    """The table of documents: input number, position in it, and the kept fields as strings."""

    def __init__(self, path: Path, keep_keys: Sequence[str], shared: Sequence[str]) -> None:
        self._path = path
        self._keys, self._shared = list(keep_keys), list(shared)
        self._buffer: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], _Shared, list[tuple[Any, ...]]]] = []
        self._buffered = 0
        self._writer: Any = None

    def append(
        self,
        inputs: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        shared: _Shared | None,
        kept: list[tuple[Any, ...]] | None,
    ) -> None:
        if shared is None:
            shared = np.empty((len(inputs), 0), np.int32)
        while len(inputs):
            room = DOCUMENTS_PER_ROW_GROUP - self._buffered
            self._buffer.append((inputs[:room], positions[:room], shared[:room], kept[:room] if kept else []))
            self._buffered += len(inputs[:room])
            if self._buffered == DOCUMENTS_PER_ROW_GROUP:
                self._flush()
            inputs, positions, shared = inputs[room:], positions[room:], shared[room:]
            kept = kept[room:] if kept else None

    def finish(self) -> FileInfo:
        self._flush()
        self.close()
        with self._path.open("rb") as file:
            return hash_file(file)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = [("input", pa.int32()), ("position", pa.int64()), *((name, pa.int32()) for name in self._shared)]
        schema = pa.schema([*numbers, *((f"key.{key}", pa.string()) for key in self._keys)])
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._path,
                schema,
                compression="zstd",
                use_dictionary=["input"],
                column_encoding={"position": "DELTA_BINARY_PACKED"},
            )
        inputs = np.concatenate([np.empty(0, np.int32), *(piece[0] for piece in self._buffer)])
        positions = np.concatenate([np.empty(0, np.int64), *(piece[1] for piece in self._buffer)])
        shared = np.concatenate([np.empty((0, len(self._shared)), np.int32), *(piece[2] for piece in self._buffer)])
        # From numpy arrays, pyarrow would import an installed pandas, which takes 0.2 s a worker; so it gets buffers.
        columns = [
            pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])
            for (_, kind), column in zip(numbers, (inputs, positions, *shared.T), strict=True)
        ]
        kept = [row for piece in self._buffer for row in piece[3]]
        columns += [pa.array([row[i] for row in kept], pa.string()) for i in range(len(self._keys))]
        table = pa.Table.from_arrays(columns, schema=schema)
        self._writer.write_table(table, row_group_size=DOCUMENTS_PER_ROW_GROUP)
        self._buffer, self._buffered = [], 0


def hash_file(file: BinaryIO) -> FileInfo:
    """The size and XXH3-64 of an open file, from its position on."""
    size, digest = hash_rest(file)
    return FileInfo(size, digest.hexdigest())


def index_lengths(path: Path, shard: ShardInfo, dtype: str) -> npt.NDArray[np.int32]:
    """The document lengths in an `.idx`, after a check of its size and header."""
    code, _ = DTYPES[dtype]
    expected = INDEX_HEADER_BYTES + 20 * shard.num_documents + 8
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected:
            raise StoreError(f"{path} has {size} bytes; {shard.num_documents} documents need {expected}")
        header = HEADER.unpack(file.read(INDEX_HEADER_BYTES))
        if header != (MAGIC, 1, code, shard.num_documents, shard.num_documents + 1):
            raise StoreError(f"{path} is not the index of a {dtype} shard of {shard.num_documents} documents")
        return np.memmap(file, "<i4", mode="r", offset=INDEX_HEADER_BYTES, shape=(shard.num_documents,))
