"""PyTorch files: `chunk_000000.pt` with one tensor of ids, and `metadata.json`; an opened chunk is one document.

`torch.save` writes an uncompressed zip archive, so the bytes of the tensor can be mapped where they lie in it. A pickle
says what they are. It is never run, only compared, instruction by instruction, with the one that torch writes for such
a tensor. Other archives are left to torch, which loads them without running code.

`torch.save` takes a quarter of a millisecond per file, mostly for bytes that are the same in every file. So an export
calls it once, and puts the ids of each row and their checksum into those bytes.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill.errors import MissingDependencyError, StoreError
from tokenmill.formats._row_files import row_blocks
from tokenmill.formats._spool import Spool
from tokenmill.formats.base import Array, Exporter, Opener, Shape, SplitSource, TokenFile
from tokenmill.regular_files import check_regular

__all__ = ["TensorFiles"]

NAME = "chunk_{number:06d}.pt"
STORAGES = {
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
    "torch ShortStorage": "<i2",
    "torch ByteStorage": "u1",
}
LOCAL_HEADER = struct.Struct("<4s22xHH")
LOCAL_MAGIC = b"PK\x03\x04"
PICKLE_BYTES = 4096
BOOKKEEPING = {"PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
"""Instructions of a pickle that only number objects for later references."""
NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
ANY = object()
TENSOR: list[tuple[str, Any]] = [
    ("GLOBAL", "torch._utils _rebuild_tensor_v2"),
    ("MARK", None),
    ("MARK", None),
    ("BINUNICODE", "storage"),
    ("GLOBAL", ANY),  # the type of the ids
    ("BINUNICODE", ANY),  # the name of the bytes in the archive
    ("BINUNICODE", ANY),  # the device
    ("NUMBER", ANY),  # how many ids are stored
    ("TUPLE", None),
    ("BINPERSID", None),
    ("NUMBER", ANY),  # how many come before the tensor's first
    ("NUMBER", ANY),  # how many the tensor has
    ("TUPLE1", None),
    ("NUMBER", 1),
    ("TUPLE1", None),
    ("NEWFALSE", None),
    ("GLOBAL", "collections OrderedDict"),
    ("EMPTY_TUPLE", None),
    ("REDUCE", None),
    ("TUPLE", None),
    ("REDUCE", None),
    ("STOP", None),
]


class TensorFiles(Opener, Exporter):
    """Opens any `.pt` with a tensor of ids in one dimension; exports an int64 tensor and a file per row."""

    label = "PyTorch"
    pattern = "chunk_*.pt"
    shape: Shape = "rows"
    is_folder = True

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Find the tensor in each archive; if one cannot be mapped, let torch copy all of them."""
        found = []
        for path in paths:
            file = _find_tensor(path)
            if file is None:
                return [self._copy(paths)]
            found.append(file)
        return found

    def _copy(self, paths: Sequence[Path]) -> TokenFile:
        """Load chunks that are compressed, or that a torch before 1.6 wrote."""
        torch = _import_torch(f"{paths[0]}, which is not an uncompressed archive of one tensor,")
        spool = Spool("<i8", partial(self.describe, paths, None))
        for path in paths:
            try:
                tensor = torch.load(path, weights_only=True, map_location="cpu")
            except Exception as error:
                reason = str(error).partition("\n")[0][:100]
                raise StoreError(f"{path} cannot be loaded by torch without running code in it: {reason}") from None
            ids = tensor.numpy() if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() else None
            if ids is None or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
                raise StoreError(f"{path} holds {_describe(tensor)}; expected one tensor of ids with one dimension")
            spool.append(ids, np.array([len(ids)]))
        return spool.finish()

    def check(self, split: SplitSource) -> None:
        """Refuse to export without torch."""
        _import_torch("--to pt")

    def write(self, split: SplitSource, folder: Path) -> None:
        """Write a file per row, then the metadata."""
        template = _Template(split.seq_len)
        number = 0
        for rows in row_blocks(split, "<i8", 0, split.num_rows):
            for row in rows:
                with open(folder / NAME.format(number=number), "wb", buffering=0) as file:  # noqa: PTH123 (fast)
                    file.write(template.fill(row) if template.is_good else _save(row))
                number += 1
        metadata = {
            "num_chunks": number,
            "seq_len": split.seq_len,
            "num_tokens": number * split.seq_len,
            "dtype": "int64",
            "split": split.name,
            "tokenizer": split.tokenizer,
            "vocab_size": split.vocab_size,
            "eos_id": split.eos_id,
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Load the first and the last file with torch; the others must differ from them in their values only."""
        torch = _import_torch("--to pt")
        template = _Template(split.seq_len)
        for number in range(split.num_rows):
            path = f"{folder}/{NAME.format(number=number)}"
            if number in (0, split.num_rows - 1) or not template.is_good:
                yield torch.load(path, weights_only=True, mmap=True).numpy()
            else:
                yield template.values(path)


def _import_torch(user: str) -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(user, "torch") from None
    return torch


class _Template:
    """The bytes that `torch.save` makes of a tensor, with places for its values and the two copies of their CRC."""

    def __init__(self, seq_len: int) -> None:
        values = np.random.default_rng(0).integers(0, 1 << 62, seq_len)
        raw = values.tobytes()
        self._bytes = bytearray(_save(values))
        self._start = self._bytes.find(raw)
        self._size = len(raw)
        checksum = zlib.crc32(raw).to_bytes(4, "little")
        self._checksums = [match.start() for match in re.finditer(re.escape(checksum), self._bytes)]
        self.is_good = self._start >= 0 and len(self._checksums) == 2
        """Whether torch loads another tensor that was put in."""
        if self.is_good:
            other = np.arange(seq_len, dtype=np.int64)
            loaded = _import_torch("--to pt").load(io.BytesIO(self.fill(other)), weights_only=True)
            self.is_good = np.array_equal(loaded.numpy(), other)

    def values(self, path: str) -> Array:
        """Read the values of a file, all other bytes of which must be those of the template."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (fast)
            data = file.read()
        row = np.frombuffer(data, "<i8", self._size // 8, self._start)
        if self.fill(row) != data:
            raise StoreError(f"{path} is not the file that was written")
        return row

    def fill(self, row: Array) -> bytearray:
        """Return the file of one row; the next call overwrites it."""
        raw = row.data.cast("B")
        self._bytes[self._start : self._start + self._size] = raw
        checksum = zlib.crc32(raw).to_bytes(4, "little")
        for place in self._checksums:
            self._bytes[place : place + 4] = checksum
        return self._bytes


def _save(values: Array) -> bytes:
    torch = _import_torch("--to pt")
    out = io.BytesIO()
    torch.save(torch.from_numpy(values.copy()), out)
    return out.getvalue()


class _Tensor(NamedTuple):
    """A tensor with one dimension: ids from `first` on, of `num_stored` in an entry of the archive."""

    dtype: np.dtype[Any]
    entry: str
    num_stored: int
    first: int
    num_tokens: int


def _find_tensor(path: Path) -> TokenFile | None:
    """Find the ids in an archive; None if only torch can read it."""
    size = check_regular(path).st_size
    try:
        with zipfile.ZipFile(path) as archive:
            pickle, order = _entry(archive, "data.pkl"), _entry(archive, "byteorder")
            if order is not None and (order.file_size > 8 or archive.read(order) != b"little"):
                return None
            is_short = pickle is not None and pickle.file_size <= PICKLE_BYTES
            tensor = _match(archive.read(pickle)) if pickle is not None and is_short else None
            entry = tensor and _entry(archive, tensor.entry)
            if tensor is None or entry is None:
                return None
            offset = _data_offset(path, entry.header_offset)
    except (zipfile.BadZipFile, struct.error, ValueError, EOFError, NotImplementedError, OverflowError, RuntimeError):
        return None
    itemsize = tensor.dtype.itemsize
    if (
        min(tensor[2:]) < 0
        or tensor.first + tensor.num_tokens > tensor.num_stored
        or entry.file_size != tensor.num_stored * itemsize
        or offset + entry.file_size > size
    ):
        raise StoreError(f"{path} is damaged: its tensor is not inside the archive")
    return TokenFile(str(path), tensor.dtype, tensor.num_tokens, size, offset=offset + tensor.first * itemsize)


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """Find an uncompressed entry by its name in the only folder of the archive, which is named after the file."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    is_plain = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED and not found[0].flag_bits & 1
    return found[0] if is_plain else None


def _data_offset(path: Path, header_offset: int) -> int:
    """Compute where the bytes of an entry begin: after its header, its name and padding."""
    with path.open("rb") as file:
        file.seek(header_offset)
        magic, name_bytes, extra_bytes = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    if magic != LOCAL_MAGIC:
        raise zipfile.BadZipFile
    return header_offset + LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


@lru_cache(maxsize=64)
def _match(pickle: bytes) -> _Tensor | None:
    """Parse a pickle if it is the one that torch writes for a tensor; chunks of one size have equal pickles."""
    found: list[tuple[str, Any]] = []
    for opcode, value, _ in pickletools.genops(pickle):
        if opcode.name not in BOOKKEEPING:
            found.append(("NUMBER" if opcode.name in NUMBERS else opcode.name, value))
    is_tensor = len(found) == len(TENSOR) and all(
        name == wanted and (value == known or known is ANY)
        for (name, value), (wanted, known) in zip(found, TENSOR, strict=True)
    )
    if not is_tensor:
        return None
    storage, entry, _, num_stored, first, num_tokens = (
        value for (_, value), (_, known) in zip(found, TENSOR, strict=True) if known is ANY
    )
    if storage not in STORAGES:
        return None
    return _Tensor(np.dtype(STORAGES[storage]), f"data/{entry}", num_stored, first, num_tokens)


def _describe(loaded: Any) -> str:
    shape = getattr(loaded, "shape", None)
    return f"a {type(loaded).__name__}" if shape is None else f"a tensor of {loaded.dtype} with shape {tuple(shape)}"
