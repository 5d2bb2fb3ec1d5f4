"""Memory-mapped files without open descriptors, and arrays over the whole address space.

A store may have tens of thousands of shards. Python's `mmap` keeps a descriptor open for every
mapping (a thousand is a common limit), so this module calls `mmap` of libc and closes the descriptor.
Rows are then copied from all mappings by one array that spans the address space: an index into it is
an address, and the caller makes sure that it is mapped (see `ShardTable`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import StoreError
from tokenmill.regular_files import regular_descriptor

__all__ = ["MAX_MAPPINGS", "MappedFile", "everywhere", "let_go", "will_need", "windows_everywhere"]

MAX_MAPPINGS = 50_000
"""Linux allows 65,530 mappings in a process; the rest is for the program and its libraries."""
ADDRESS_BITS = 48
"""The user space of arm64; that of x86-64 is smaller."""
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
    """One file, mapped read-only while a reference to this object exists."""

    __slots__ = ("__weakref__", "address", "num_bytes")

    num_live = 0

    def __init__(
        self, path: str | Path, num_bytes: int, confirm: Callable[[int], None], *, is_random: bool = False
    ) -> None:
        """Map a file of known size; `is_random` turns off the kernel's readahead.

        `confirm` gets the descriptor before the file is mapped, and raises an error if the file is not the expected
        one.
        """
        self.address = 0
        self.num_bytes = num_bytes
        descriptor, size = regular_descriptor(path)
        try:
            if size != num_bytes:
                raise StoreError(f"{path} has {size} bytes; the store says {num_bytes}")
            confirm(descriptor)
            address = _libc.mmap(None, num_bytes, _READ, _SHARED, descriptor, 0)
            if address == _FAILED:
                raise StoreError(f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(descriptor)
        self.address = address
        MappedFile.num_live += 1
        if is_random:
            # Some disks read 8 MB ahead for every row of 4 KB.
            _advise(address, num_bytes, RANDOM)

    def __del__(self) -> None:
        # During shutdown of the interpreter, the names of this module may be None.
        if self.address and _unmap is not None:
            _unmap(self.address, self.num_bytes)
            MappedFile.num_live -= 1


def _array_over(address: int, kind: str, count: int, step: int) -> npt.NDArray[Any]:
    """A read-only array over memory that numpy does not own: `count` values, `step` bytes apart."""
    interface = {"version": 3, "typestr": kind, "shape": (count,), "strides": (step,), "data": (address, True)}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


@lru_cache(maxsize=64)
def everywhere(kind: str, step: int) -> npt.NDArray[Any]:
    """An array whose item i is the value of type `kind` at address `(i + 1) * step`."""
    return _array_over(step, kind, (1 << ADDRESS_BITS) // step - 1, step)


@lru_cache(maxsize=64)
def windows_everywhere(width: int, itemsize: int) -> npt.NDArray[Any]:
    """An array whose item i is the `width` tokens from address `(i + 1) * itemsize` on, as one opaque value.

    Indexing it with an array copies whole rows at the speed of memcpy: 6-13 G tokens/s where a
    two-dimensional sliding window reaches 2-7.
    """
    return _array_over(itemsize, f"|V{itemsize * width}", (1 << ADDRESS_BITS) // itemsize - width, itemsize)


def will_need(address: int, num_bytes: int) -> None:
    """Ask the kernel to read mapped pages soon; as it is a hint, errors are ignored."""
    start = address // _PAGE * _PAGE
    _advise(start, address + num_bytes - start, WILL_NEED)


def let_go(address: int, num_bytes: int) -> None:
    """Unmap pages from this process until they are read again; they stay in the page cache while memory allows."""
    start = address // _PAGE * _PAGE
    _advise(start, address + num_bytes - start, DONT_NEED)
