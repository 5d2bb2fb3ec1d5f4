"""What was proven once about a tokenizer and an engine, kept in the user's cache folder.

The structure of a tokenizer and the awkward strings need no second look as long as the tokenizer, the engine, the
reference, Python and our own code are the same; hashes of all of them name the file. The user's own documents are
compared in every run. If the folder cannot be written, each run proves everything again.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.files import write_durably
from tokenmill.machine import cache_folder
from tokenmill.regular_files import UnfitFile, read_regular

__all__ = ["Proof"]

FOLDER = "proven"
PACKAGES = ("tokenizers", "sentencepiece", "tiktoken", "gigatoken")


class Proof:
    """One thing to prove about a tokenizer and an engine."""

    def __init__(self, what: str, tokenizer: Tokenizer, engine: str, special_tokens: str) -> None:
        self._parts = [what, tokenizer.kind, engine, special_tokens]
        self._tokenizer = tokenizer

    @cached_property
    def _path(self) -> Path:
        digest = xxhash.xxh3_128()
        for part in (*self._parts, *_environment()):
            digest.update(part.encode() + b"\0")
        for name, data in sorted(self._tokenizer.files.items()):
            digest.update(f"{name} {len(data)}\0".encode())
            digest.update(data)
        return cache_folder() / FOLDER / f"{digest.hexdigest()}.json"

    def find(self) -> dict[str, Any] | None:
        """Return what was kept with the proof; None if there is none."""
        with suppress(OSError, UnfitFile, RuntimeError, msgspec.MsgspecError, UnicodeDecodeError):
            found = msgspec.json.decode(read_regular(self._path))
            return found if isinstance(found, dict) else None
        return None

    def keep(self, facts: dict[str, Any]) -> None:
        """Keep the proof for later runs, if there is a place for it."""
        with suppress(OSError, RuntimeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, msgspec.json.encode(facts))


@cache
def _environment() -> tuple[str, ...]:
    """The versions of the libraries and of Python, and a hash of our own code about engines."""
    code = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.glob("*.*")):
        if path.suffix in (".py", ".json"):
            code.update(path.read_bytes())
    return (sys.version, code.hexdigest(), *map(_version, PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
