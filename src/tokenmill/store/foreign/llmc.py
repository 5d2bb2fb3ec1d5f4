"""llm.c and modded-nanogpt: a `.bin` with a header of 256 integers in front of the tokens.

The first integer is a magic number, the second a version, the third the number of tokens. GPT-2's ids are
uint16 and Llama 3's uint32, under a magic number of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.base import TokenFile, one_document

__all__ = ["LlmC"]

HEADER_BYTES = 1024
FRONT = struct.Struct("<iii")
VARIANTS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""The version and the ids that a magic number stands for."""
OTHERS = {20240326: "a model", 20240327: "the state of a run", 20240522: "questions to evaluate with"}
"""What llm.c also writes as `.bin`; they are no tokens, and must not be taken for nanoGPT's."""


class LlmC:
    """Files such as `fineweb_train_000001.bin`; a file counts as one document, since nothing says where they end."""

    name = "llm.c"
    pattern = "*.bin"

    def recognise(self, path: Path) -> Path | None:
        """A `.bin` that begins with one of the magic numbers."""
        if path.suffix != ".bin" or not path.is_file():
            return None
        with path.open("rb") as file:
            magic = int.from_bytes(file.read(4), "little")
        return path if magic in VARIANTS or magic in OTHERS else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """The header says what the ids are, so `dtype` is not needed."""
        return [_read_header(path) for path in paths]


def _read_header(path: Path) -> TokenFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        front = file.read(FRONT.size)
    magic, version, count = FRONT.unpack(front.ljust(FRONT.size, b"\0"))
    if magic in OTHERS:
        raise StoreError(f"{path} is {OTHERS[magic]} of llm.c, not tokens")
    expected, kind = VARIANTS[magic]
    if version != expected:
        raise StoreError(f"{path} has version {version} of llm.c's format; tokenmill reads version {expected}")
    if count < 0 or size != HEADER_BYTES + count * kind.itemsize:
        raise StoreError(
            f"{path} has {size} bytes and its header says {count} ids of {kind.itemsize} bytes behind "
            f"{HEADER_BYTES}; it is damaged, or not finished"
        )
    return TokenFile(str(path), kind, count, one_document(), size, HEADER_BYTES)
