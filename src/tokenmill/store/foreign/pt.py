"""Folders of `chunk_*.pt`, each of which holds one tensor of ids with one dimension; a chunk is a document.

`torch.save` writes an uncompressed zip archive: the tensor's bytes lie in it as they are, and are mapped there.
What they are is in a pickle. It is not run, but compared, instruction by instruction, with the one that torch
writes for such a tensor. Other archives are left to torch itself, which loads them without running code.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill.errors import MissingDependencyError, StoreError
from tokenmill.store.foreign.base import TokenFile, one_document
from tokenmill.store.foreign.spool import Spool

__all__ = ["Pt"]

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
"""Instructions of a pickle that only number what may be referred to later."""
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


class Pt:
    """Files such as `chunk_000000.pt`."""

    name = "PyTorch"
    pattern = "chunk_*.pt"

    def recognise(self, path: Path) -> Path | None:
        """By name."""
        return path if path.suffix == ".pt" and path.is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Each mapped as it is; or all copied by way of torch, if one cannot be."""
        found = []
        for path in paths:
            file = _find_tensor(path)
            if file is None:
                return [_copy_by_torch(paths)]
            found.append(file)
        return found


class Tensor(NamedTuple):
    """A tensor with one dimension: ids from `first` on, of `num_stored` in an entry of the archive."""

    dtype: np.dtype[Any]
    entry: str
    num_stored: int
    first: int
    num_tokens: int


def _find_tensor(path: Path) -> TokenFile | None:
    """Where the ids are in an archive; None for what only torch can read."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            tensor = _read_pickle(archive)
            entry = tensor and _entry(archive, tensor.entry)
            if tensor is None or entry is None or _is_big_endian(archive):
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
    return TokenFile(str(path), tensor.dtype, tensor.num_tokens, one_document(), size, offset + tensor.first * itemsize)


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """An uncompressed entry, by its name in the archive's only folder, which is named after the file."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    is_plain = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED and not found[0].flag_bits & 1
    return found[0] if is_plain else None


def _is_big_endian(archive: zipfile.ZipFile) -> bool:
    entry = _entry(archive, "byteorder")
    return entry is not None and (entry.file_size > 8 or archive.read(entry) != b"little")


def _data_offset(path: Path, header_offset: int) -> int:
    """Where an entry's bytes begin: behind its header, its name and padding."""
    with path.open("rb") as file:
        file.seek(header_offset)
        magic, name_bytes, extra_bytes = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    if magic != LOCAL_MAGIC:
        raise zipfile.BadZipFile
    return header_offset + LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _read_pickle(archive: zipfile.ZipFile) -> Tensor | None:
    entry = _entry(archive, "data.pkl")
    if entry is None or entry.file_size > PICKLE_BYTES:
        return None
    return _match(archive.read(entry))


@lru_cache(maxsize=64)
def _match(pickle: bytes) -> Tensor | None:
    """What a pickle says of its tensor, if it is the one that torch writes; chunks of one size have equal ones."""
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
    return Tensor(np.dtype(STORAGES[storage]), f"data/{entry}", num_stored, first, num_tokens)


def _copy_by_torch(paths: Sequence[Path]) -> TokenFile:
    """Ids of chunks whose bytes are compressed, or written by a torch before 1.6."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(f"{paths[0]}, which is no uncompressed archive of one tensor,", "torch") from None
    spool = Spool("<i8", partial(Pt().describe, paths, None))
    for path in paths:
        try:
            tensor = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            reason = str(error).partition("\n")[0][:100]
            raise StoreError(f"{path} cannot be loaded by torch without running code in it: {reason}") from None
        ids = tensor.numpy() if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() else None
        if ids is None or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise StoreError(f"{path} holds {_say(tensor)}; expected one tensor of ids with one dimension")
        spool.append(ids, np.array([len(ids)]))
    return spool.finish()


def _say(loaded: Any) -> str:
    shape = getattr(loaded, "shape", None)
    return f"a {type(loaded).__name__}" if shape is None else f"a tensor of {loaded.dtype} with shape {tuple(shape)}"
