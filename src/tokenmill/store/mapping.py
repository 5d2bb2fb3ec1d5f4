"""Files as memory, without a descriptor each, and arrays over memory at any address.

A store may have tens of thousands of shards. Python's `mmap` keeps a descriptor open for every
mapping (a thousand is a common limit), so the system call is made directly and the descriptor
closed at once. Rows are then copied from all mappings together by one array that spans the
address space: an index into it is an address. Whoever indexes it makes sure that the address is
mapped; `ShardTable` is the only one who does.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError

__all__ = ["MAX_MAPPINGS", "MappedFile", "everywhere", "let_go", "will_need", "windows_everywhere"]

MAX_MAPPINGS = 50_000
"""Linux allows 65,530 in a process; the rest is for the program and its libraries."""
ADDRESS_BITS = 48
"""More than user space has on x86-64, and what it has on arm64."""
_READ, _SHARED, _FAILED = 1, 1, ctypes.c_void_p(-1).value
RANDOM, WILL_NEED, DONT_NEED = 1, 3, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_unmap = _libc.munmap
_advise = _libc.madvise
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MappedFile:
    """One file, mapped read-only for as long as somebody refers to this object or to an array of it."""

    __slots__ = ("__weakref__", "address", "num_bytes")

    num_live = 0

    def __init__(self, path: str | Path, num_bytes: int, *, is_random: bool = False) -> None:
        """Map a file of known size; `is_random` says that pages are wanted here and there, and no others with them."""
        self.address = 0
        self.num_bytes = num_bytes
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != num_bytes:
                raise StoreError(f"{path} has {size} bytes; the store says {num_bytes}")
            address = _libc.mmap(None, num_bytes, _READ, _SHARED, descriptor, 0)
            if address == _FAILED:
                raise StoreError(f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(descriptor)
        self.address = address
        MappedFile.num_live += 1
        if is_random:
            # A disk may be set to read 8 MB around every page, of which a row is 4 KB.
            _advise(address, num_bytes, RANDOM)

    def array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """A part of the file as a read-only array, which keeps the mapping."""
        kind = np.dtype(dtype)
        if offset < 0 or offset + count * kind.itemsize > self.num_bytes:
            raise StoreError(f"bytes {offset} to {offset + count * kind.itemsize} are not in {self.num_bytes} bytes")
        return np.asarray(_Memory(self.address + offset, kind.str, (count,), owner=self))

    def __del__(self) -> None:
        # At the end of the interpreter this module's names may be gone already.
        if self.address and _unmap is not None:
            _unmap(self.address, self.num_bytes)
            MappedFile.num_live -= 1


class _Memory:
    """Tells numpy of memory that it does not own; an array of it refers to this object, and so to its owner."""

    def __init__(
        self, address: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, owner: Any = None
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": kind,
            "shape": shape,
            "strides": strides,
            "data": (address, True),
        }


@lru_cache(maxsize=64)
def everywhere(kind: str, step: int) -> npt.NDArray[Any]:
    """An array whose item i is the value of type `kind` at address `(i + 1) * step`."""
    return np.asarray(_Memory(step, kind, ((1 << ADDRESS_BITS) // step - 1,), (step,)))


@lru_cache(maxsize=64)
def windows_everywhere(width: int, itemsize: int) -> npt.NDArray[Any]:
    """An array whose item i is the `width` tokens from address `(i + 1) * itemsize` on, as one opaque value.

    Indexing with an array of places copies whole rows at the speed of memcpy: 6-13 G tokens/s where a
    two-dimensional sliding window reaches 2-7.
    """
    num_items = (1 << ADDRESS_BITS) // itemsize - width
    return np.asarray(_Memory(itemsize, f"|V{itemsize * width}", (num_items,), (itemsize,)))


def will_need(address: int, num_bytes: int) -> None:
    """Ask the kernel to read mapped pages soon; it is a hint, so failing does not matter."""
    start = address // _PAGE * _PAGE
    _advise(start, address + num_bytes - start, WILL_NEED)


def let_go(address: int, num_bytes: int) -> None:
    """Take mapped pages off this process; the kernel keeps them while it has room, and gives them back when read."""
    start = address // _PAGE * _PAGE
    _advise(start, address + num_bytes - start, DONT_NEED)
